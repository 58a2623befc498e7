"""Figures in words: how the status page and `outrider top` write what a glance found.

Pure. Each table is a list of names and of what a glance says to them, so that both show the same.
"""

from collections.abc import Callable, Sequence

from outrider.deploy.glance import DraftGlance, Glance

NOTHING = "-"  # there was no traffic to tell it from

Figure = tuple[str, Callable[[Glance], str]]


def percent(share: float | None) -> str:
    """A share of 1."""
    return NOTHING if share is None else f"{100 * share:.1f} %"


def decimal(value: float | None) -> str:
    """Two digits after the point."""
    return NOTHING if value is None else f"{value:.2f}"


def whole(value: float | None) -> str:
    """A number of things: as it is below a million, then to three digits; rates to one decimal."""
    if value is None:
        return NOTHING
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g} {letter}"
    return f"{value:.1f}" if value < 10 and value != int(value) else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Milliseconds below a second, else seconds."""
    if seconds is None:
        return NOTHING
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def window(glance: Glance) -> str:
    """What the glance is about."""
    return "since start" if glance.seconds is None else f"last {whole(glance.seconds)} s"


def living(draft: DraftGlance) -> str:
    """How many of a draft's replicas there are."""
    return f"{_living(draft)} living"


def about(draft: DraftGlance) -> str:
    """What is told of a draft beside its rate."""
    length = draft.mean_acceptance_length
    return living(draft) if length is None else f"{living(draft)}, length {decimal(length)}"


def _living(drafts: DraftGlance | Glance) -> str:
    return f"{drafts.living} of {drafts.replicas}"


def _part(number: int, whole: int) -> str:
    return percent(number / whole if whole else None)


SPECULATION: Sequence[Figure] = (
    ("acceptance rate", lambda glance: percent(glance.acceptance_rate)),
    ("mean acceptance length", lambda glance: decimal(glance.mean_acceptance_length)),
    ("output from drafts", lambda glance: percent(glance.share_from_drafts)),
)
SPEED: Sequence[Figure] = (
    ("tokens per second", lambda glance: whole(glance.tokens_per_s)),
    ("tokens per second of rounds", lambda glance: whole(glance.tokens_per_round_s)),
    ("tokens emitted", lambda glance: whole(glance.tokens)),
    ("time to first token, median", lambda glance: duration(glance.first_token_s)),
    ("time per output token, median", lambda glance: duration(glance.per_output_token_s)),
)
WASTE: Sequence[Figure] = (
    ("drafted tokens rejected", lambda glance: _part(glance.rejected, glance.drafted)),
    ("proposals late", lambda glance: _part(glance.late, glance.proposals)),
    ("proposals dropped", lambda glance: _part(glance.dropped, glance.proposals)),
    ("proposals missing", lambda glance: whole(glance.fallbacks)),
    ("tokens cut by stop rules", lambda glance: _part(glance.cut, glance.tokens + glance.cut)),
)
TROUBLE: Sequence[Figure] = (
    ("draft replicas lost", lambda glance: whole(glance.deaths)),
    ("draft replicas quarantined", lambda glance: whole(glance.quarantines)),
    ("target rebuilt", lambda glance: whole(glance.rebuilds)),
    ("answers ended by an error", lambda glance: whole(glance.errors)),
    ("answers refused, queue full", lambda glance: whole(glance.refused)),
)
LOST = "the target is lost, and being rebuilt"
LOAD: Sequence[Figure] = (  # of this moment
    ("running", lambda glance: whole(glance.running)),
    ("queued", lambda glance: whole(glance.waiting)),
    ("cache rows", lambda glance: f"{glance.running} of {glance.rows}"),
    ("draft replicas living", _living),
)

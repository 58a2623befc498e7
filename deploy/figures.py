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
    """No digits after the point, commas between thousands; one digit of what is below ten."""
    if value is None:
        return NOTHING
    return f"{value:.1f}" if 0 < value < 10 and value != int(value) else f"{value:,.0f}"


def duration(seconds: float | None) -> str:
    """Milliseconds below a second, else seconds."""
    if seconds is None:
        return NOTHING
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def window(glance: Glance) -> str:
    """What the glance is about."""
    return "since start" if glance.seconds is None else f"last {whole(glance.seconds)} s"


def members(draft: DraftGlance) -> str:
    """How many of a draft's replicas live."""
    return f"{draft.living} of {draft.replicas}"


def _part(number: int, of: int) -> str:
    return f"{number:,} ({percent(number / of)})" if of else f"{number:,}"


def _dropped(glance: Glance) -> str:
    number = sum(glance.dropped.values())
    reasons = sorted(glance.dropped, key=lambda reason: -glance.dropped[reason])
    told = ", ".join(reason.replace("_", " ") for reason in reasons)
    return _part(number, glance.proposals) + (f": {told}" if told else "")


SPECULATION: Sequence[Figure] = (
    ("acceptance rate", lambda glance: percent(glance.acceptance_rate)),
    ("mean acceptance length", lambda glance: decimal(glance.mean_acceptance_length)),
    ("share of output from drafts", lambda glance: percent(glance.share_from_drafts)),
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
    ("proposals dropped", _dropped),
    ("turns without a proposal", lambda glance: whole(glance.fallbacks)),
    ("tokens cut by stop rules", lambda glance: whole(glance.cut)),
)
TROUBLE: Sequence[Figure] = (
    ("draft members lost", lambda glance: whole(glance.deaths)),
    ("draft members quarantined", lambda glance: whole(glance.quarantines)),
    ("target rebuilt", lambda glance: whole(glance.rebuilds)),
    ("answers ended by an error", lambda glance: whole(glance.errors)),
    ("answers refused, queue full", lambda glance: whole(glance.refused)),
)
LOAD: Sequence[Figure] = (  # of this moment
    ("running", lambda glance: whole(glance.running)),
    ("queued", lambda glance: whole(glance.waiting)),
    ("cache rows", lambda glance: f"{glance.running} of {glance.rows}"),
    ("draft members living", lambda glance: f"{glance.living} of {glance.replicas}"),
)

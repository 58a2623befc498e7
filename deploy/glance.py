"""At a glance: the rates that the status page and `outrider top` show, from two readings.

Pure. A reading is the table of instruments, filled; a glance is what happened between two of them,
or since the start. Every rate is a ratio of two sums, as README's section Rates defines it, and
None where there was nothing to divide by.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from outrider.actors.stats import Histogram, Snapshot
from outrider.deploy.instruments import BY_NAME, INSTRUMENTS
from outrider.deploy.readings import Value, Values

Counts = Mapping[str, Values]  # by the instrument's name

SPAN_S = 60.0  # how far back a page looks
SPACING_S = 5.0  # between the readings that it keeps
SHORTEST_S = 1.0  # readings closer than this may have come in the wrong order


@dataclass(frozen=True)
class DraftGlance:
    """What one draft of the settings did."""

    name: str
    drafts: int  # blocks verified
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    acceptance_by_position: tuple[float, ...]  # of its blocks; empty if there were none
    replicas: int  # now
    living: int  # now


@dataclass(frozen=True)
class Glance:
    """What happened in `seconds`, or since the coordinator started if that is None."""

    seconds: float | None
    tokens: int  # emitted
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    tokens_per_s: float | None  # by the clock; None since the start, which nobody timed
    tokens_per_round_s: float | None
    share_from_drafts: float | None
    first_token_s: float | None  # median
    per_output_token_s: float | None  # median
    drafted: int  # tokens
    rejected: int  # of them
    proposals: int
    late: int  # of them
    dropped: int  # of them
    fallbacks: int  # turns of a sequence at which a draft was late, busy or gone
    cut: int  # tokens decided but not emitted
    deaths: int
    quarantines: int
    rebuilds: int
    errors: int  # answers that ended with one
    refused: int
    drafts: tuple[DraftGlance, ...]
    running: int  # now
    waiting: int  # now
    rows: int  # now
    is_ready: bool  # now: the target is loaded and answers

    @property
    def is_idle(self) -> bool:
        """Whether there was no traffic."""
        return not (self.tokens or self.drafted)

    @property
    def replicas(self) -> int:
        """Members of all drafts, as configured."""
        return sum(draft.replicas for draft in self.drafts)

    @property
    def living(self) -> int:
        """Members of all drafts that answer."""
        return sum(draft.living for draft in self.drafts)


def read(snapshot: Snapshot) -> Counts:
    """The reading that a snapshot is."""
    return {instrument.name: instrument.read(snapshot) for instrument in INSTRUMENTS}


def look(now: Counts, then: Counts | None = None, seconds: float | None = None) -> Glance:
    """What happened since `then`, which was so many seconds ago; without it, since the start.

    Counts below those of `then` are of another life of the coordinator: all of them are new.
    """
    sums = _Sums(now if then is None else _subtract(now, then))
    drafts = sums.total("spec_decode_num_drafts")
    drafted = sums.total("spec_decode_num_draft_tokens")
    accepted = sums.total("spec_decode_num_accepted_tokens")
    tokens = sums.total("generation_tokens")
    return Glance(
        seconds=seconds,
        tokens=int(tokens),
        acceptance_rate=_ratio(accepted, drafted),
        mean_acceptance_length=_length(accepted, drafts),
        tokens_per_s=_ratio(tokens, seconds or 0),
        tokens_per_round_s=_ratio(tokens, sums.total("round_seconds")),
        share_from_drafts=_ratio(sums.total("generation_tokens", source="accepted"), tokens),
        first_token_s=sums.median("time_to_first_token_seconds"),
        per_output_token_s=sums.median("request_time_per_output_token_seconds"),
        drafted=int(drafted),
        rejected=int(drafted - accepted),
        proposals=int(sums.total("proposals")),
        late=int(sums.total("late_proposals")),
        dropped=int(sums.total("dropped_proposals")),
        fallbacks=int(sums.total("fallbacks") - sums.total("fallbacks", reason="empty")),
        cut=int(sums.total("cut_tokens")),
        deaths=int(sums.total("draft_deaths")),
        quarantines=int(sums.total("draft_quarantines")),
        rebuilds=int(sums.total("target_rebuilds")),
        errors=int(sums.total("requests", reason="error")),
        refused=int(sums.total("rejected_requests")),
        drafts=tuple(_look_at(sums, name) for name in _drafts(sums)),
        running=int(sums.total("num_requests_running")),
        waiting=int(sums.total("num_requests_waiting")),
        rows=int(sums.total("cache_rows")),
        is_ready=sums.total("target_ready") > 0,
    )


def latest(total: Glance, recent: Glance | None) -> Glance:
    """The one to show first: what happened lately if there was traffic, else all of it."""
    return total if recent is None or recent.is_idle else recent


def quantile(histogram: Histogram, q: float) -> float | None:
    """As Prometheus' histogram_quantile: evenly spread in its bucket, at most the last bound."""
    rank = q * sum(histogram.counts)
    if not rank:
        return None
    below, lower = 0, 0.0
    for upper, count in zip(histogram.bounds, histogram.counts, strict=False):
        if count and below + count >= rank:
            return lower + (upper - lower) * (rank - below) / count
        below, lower = below + count, upper
    return histogram.bounds[-1]


class History:
    """Readings of the last minute, a few seconds apart. Knows no clock: it is told the time."""

    def __init__(self) -> None:
        self._kept: list[tuple[float, Counts]] = []  # oldest first

    def __len__(self) -> int:
        """Readings that are kept."""
        return len(self._kept)

    def add(self, counts: Counts, now: float) -> None:
        """Keep this reading, unless the one before it is too near."""
        self._kept = [(at, old) for at, old in self._kept if now - at <= SPAN_S]
        if not self._kept or now - self._kept[-1][0] >= SPACING_S:
            self._kept.append((now, counts))

    def look(self, counts: Counts, now: float) -> Glance | None:
        """What happened since the oldest of them; None if there is none yet."""
        for at, then in self._kept:
            if SHORTEST_S <= now - at <= SPAN_S:
                return look(counts, then, now - at)
        return None


class _Sums:
    """A reading, added up over labels."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts

    def total(self, name: str, **where: str) -> float:
        """The sum over all series with these labels."""
        return sum(value for _, value in self._matching(name, where))

    def by(self, name: str, label: str, **where: str) -> dict[str, float]:
        """The same for each value of `label`, in the order of the reading."""
        place = self._place(name, label)
        sums: dict[str, float] = {}
        for labels, value in self._matching(name, where):
            sums[labels[place]] = sums.get(labels[place], 0) + value
        return sums

    def median(self, name: str) -> float | None:
        """Of a histogram without labels."""
        histogram = self._values(name).get(())
        return quantile(histogram, 0.5) if isinstance(histogram, Histogram) else None

    def _matching(
        self, name: str, where: Mapping[str, str]
    ) -> Iterator[tuple[tuple[str, ...], float]]:
        places = {self._place(name, label): value for label, value in where.items()}
        for labels, value in self._values(name).items():
            if not isinstance(value, Histogram) and all(
                labels[place] == wanted for place, wanted in places.items()
            ):
                yield labels, value

    def _values(self, name: str) -> Values:
        return self._counts.get(f"outrider_{name}", {})

    @staticmethod
    def _place(name: str, label: str) -> int:
        return BY_NAME[f"outrider_{name}"].labels.index(label) - 1  # the first is the model


def _drafts(sums: _Sums) -> dict[str, float]:
    return sums.by("proposals", "draft") | sums.by("draft_replicas", "draft")


def _look_at(sums: _Sums, draft: str) -> DraftGlance:
    drafts = sums.total("spec_decode_num_drafts", draft=draft)
    drafted = sums.total("spec_decode_num_draft_tokens", draft=draft)
    accepted = sums.total("spec_decode_num_accepted_tokens", draft=draft)
    accepted_at = sums.by("spec_decode_num_accepted_tokens_per_pos", "position", draft=draft)
    drafted_at = sums.by("spec_decode_num_draft_tokens_per_pos", "position", draft=draft)
    positions = sorted((position for position, n in drafted_at.items() if n and drafts), key=int)
    by_position = tuple(accepted_at.get(position, 0) / drafts for position in positions)
    return DraftGlance(
        name=draft,
        drafts=int(drafts),
        acceptance_rate=_ratio(accepted, drafted),
        mean_acceptance_length=_length(accepted, drafts),
        acceptance_by_position=by_position,
        replicas=int(sums.total("draft_replicas", draft=draft)),
        living=int(sums.total("draft_replicas_living", draft=draft)),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _length(accepted: float, drafts: float) -> float | None:
    return 1 + accepted / drafts if drafts else None


def _subtract(now: Counts, then: Counts) -> Counts:
    """Counters and histograms since `then`; gauges as they are."""
    sums = {name for name in now if BY_NAME[name].kind != "gauge"}
    before = {name: then.get(name, {}) for name in sums}
    if any(
        _is_less(now[name].get(labels), value)
        for name in sums
        for labels, value in before[name].items()
    ):
        return now
    return {
        name: {labels: _minus(value, before[name].get(labels)) for labels, value in values.items()}
        if name in sums
        else values
        for name, values in now.items()
    }


def _is_less(now: Value | None, then: Value) -> bool:
    if isinstance(then, Histogram):
        return not isinstance(now, Histogram) or sum(now.counts) < sum(then.counts)
    return not isinstance(now, float | int) or now < then


def _minus(now: Value, then: Value | None) -> Value:
    if then is None:
        return now
    if isinstance(now, Histogram) and isinstance(then, Histogram):
        grown = Histogram(now.bounds)
        grown.counts = [a - b for a, b in zip(now.counts, then.counts, strict=True)]
        grown.sum = now.sum - then.sum
        return grown
    assert not isinstance(now, Histogram) and not isinstance(then, Histogram), "one instrument"
    return now - then

"""Plain integers and seconds that the coordinator counts: sums only, no rates, no metric library.

Every rate is a ratio of two of these sums, computed by whoever shows it. What is shown is a
`Snapshot`: a copy of the sums, and what is held at that moment.
"""

import bisect
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol, get_args

from outrider.actors.messages import Method
from outrider.actors.requests import SpeculationCounts

# vLLM's, so that its dashboards' heat maps and quantiles mean the same.
FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
PER_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
NUM_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))

# By what is in the pass: tokens of a prompt, else drafted tokens, else one token of each row.
RoundKind = Literal["prompt", "block", "plain"]
ROUND_KINDS: tuple[RoundKind, ...] = get_args(RoundKind)


@dataclass
class Histogram:
    """Observations by size: `counts[i]` are at most `bounds[i]`, the last are above all bounds."""

    bounds: tuple[float, ...]  # ascending
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one observation."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(frozen=True)
class MethodStats:
    """What one way to draft brought, and took."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_calls: int = 0
    seconds: float = 0.0  # in calls that propose

    def __add__(self, other: "MethodStats") -> "MethodStats":
        return MethodStats(
            self.num_drafts + other.num_drafts,
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            self.num_calls + other.num_calls,
            self.seconds + other.seconds,
        )


@dataclass
class DraftStats:
    """What one draft of the settings did, over all its replicas and their lives.

    Once nothing is held any more, every proposal was verified or dropped:
    `proposals == counts.num_drafts + dropped.total()`.
    """

    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    methods: dict[Method, MethodStats] = field(default_factory=dict)
    proposals: int = 0  # that came with at least one token
    late: int = 0  # of them, after their deadline
    salvaged: int = 0  # of them, cut to what still continued the ids committed meanwhile
    dropped: Counter[str] = field(default_factory=Counter)  # of them, never verified, by reason
    fallbacks: Counter[str] = field(default_factory=Counter)  # turns without one in time, by reason
    quarantines: int = 0  # times a replica left the pool
    deaths: int = 0  # of them, those after which another actor was made

    @property
    def seconds(self) -> float:
        """Spent in calls that propose."""
        return sum(stats.seconds for stats in self.methods.values())

    def expect(self, methods: Iterable[Method], num_tokens: int) -> None:
        """Begin to count at zero what these methods, and blocks so long, will bring."""
        for method in methods:
            self.methods.setdefault(method, MethodStats())
        self.counts.add(
            SpeculationCounts(drafted_at=[0] * num_tokens, accepted_at=[0] * num_tokens)
        )

    def record(self, method: Method, drafted: int, accepted: int) -> None:
        """Count one verified block."""
        self.counts.record(drafted, accepted)
        self._add(method, MethodStats(1, drafted, accepted))

    def spend(self, method: Method, seconds: float) -> None:
        """Count one call and its time."""
        self._add(method, MethodStats(num_calls=1, seconds=seconds))

    def _add(self, method: Method, stats: MethodStats) -> None:
        self.methods[method] = self.methods.get(method, MethodStats()) + stats


@dataclass
class RoundStats:
    """What rounds of one kind did, and took."""

    num_rounds: int = 0  # passes of the target that came to an end
    num_rows: int = 0  # in them
    seconds: float = 0.0  # whole rounds, from plan to publication
    draft_wait_seconds: float = 0.0  # of them, asking drafts and waiting for proposals
    verify_seconds: float = 0.0  # of them, in the pass, as the target measured it


@dataclass
class Stats:
    """What the coordinator did since it started.

    A pass decides, for every row that is past its prompt, the accepted tokens of its block and one
    token of the target's own. They are counted by source: `accepted`, `own` (after a block) and
    `plain` (without one); as emitted, or as cut by a rule that ended the answer before them.
    """

    rounds: dict[RoundKind, RoundStats] = field(
        default_factory=lambda: {kind: RoundStats() for kind in ROUND_KINDS}
    )
    emitted: Counter[str] = field(default_factory=Counter)  # tokens by source
    cut: Counter[str] = field(default_factory=Counter)  # tokens by source
    prompt_tokens: int = 0  # of every answer: each has to run its prompt
    finished: Counter[str] = field(default_factory=Counter)  # sequences by finish reason
    rejected: int = 0  # sequences turned away because the queue was full
    rebuilds: int = 0  # of the target
    drafts: dict[str, DraftStats] = field(default_factory=dict)  # by the draft's name
    first_token_s: Histogram = field(default_factory=partial(Histogram, FIRST_TOKEN_S))
    inter_token_s: Histogram = field(default_factory=partial(Histogram, PER_TOKEN_S))
    per_output_token_s: Histogram = field(default_factory=partial(Histogram, PER_TOKEN_S))
    end_to_end_s: Histogram = field(default_factory=partial(Histogram, REQUEST_S))
    queue_s: Histogram = field(default_factory=partial(Histogram, REQUEST_S))
    prompt_length: Histogram = field(default_factory=partial(Histogram, NUM_TOKENS))
    output_length: Histogram = field(default_factory=partial(Histogram, NUM_TOKENS))

    @property
    def num_rounds(self) -> int:
        """Rounds, of whatever kind."""
        return sum(kind.num_rounds for kind in self.rounds.values())

    @property
    def round_seconds(self) -> float:
        """Spent in them."""
        return sum(kind.seconds for kind in self.rounds.values())

    @property
    def draft_wait_seconds(self) -> float:
        """Of them, asking drafts and waiting for proposals."""
        return sum(kind.draft_wait_seconds for kind in self.rounds.values())

    @property
    def verify_seconds(self) -> float:
        """Of them, in the pass."""
        return sum(kind.verify_seconds for kind in self.rounds.values())

    @property
    def emitted_tokens(self) -> int:
        """Tokens emitted, whatever their source."""
        return self.emitted.total()

    def record(self, drafted: int, accepted: int, emitted: int) -> None:
        """Count the tokens decided for one row, `accepted + 1`: the first `emitted` went out."""
        own = "own" if drafted else "plain"
        from_draft = min(accepted, emitted)
        self.emitted["accepted"] += from_draft
        self.emitted[own] += emitted - from_draft
        self.cut["accepted"] += accepted - from_draft
        self.cut[own] += 1 - (emitted - from_draft)


@dataclass(frozen=True)
class Pool:
    """The replicas of one draft: configured, and answering now."""

    size: int = 1
    living: int = 1


@dataclass(frozen=True)
class Levels:
    """What the coordinator holds at one moment."""

    waiting: int = 0  # sequences without a row
    max_waiting: int = 0  # beyond, they are refused
    running: int = 0  # sequences with one
    rows: int = 0  # of the target's cache, used or free
    cached_tokens: int = 0  # that the used rows hold
    cache_tokens: int = 0  # that all rows could hold
    is_ready: bool = True  # the target is loaded and not known to be lost
    pools: Mapping[str, Pool] = field(default_factory=dict)  # by the draft's name


@dataclass(frozen=True)
class Snapshot:
    """A copy of the sums at one moment, and the levels of the same."""

    stats: Stats
    levels: Levels


class Sink(Protocol):
    """Where snapshots go while the coordinator runs, in their order and never two at once."""

    def write(self, snapshot: Snapshot) -> None:
        """Take the sums of one life of the coordinator, which begin at zero and only grow."""

"""Plain integers and seconds that the coordinator counts: sums only, no rates, no metric library.

Every rate is a ratio of two of these sums, computed by whoever shows it.
"""

from collections import Counter
from dataclasses import dataclass, field

from outrider.actors.messages import Method
from outrider.actors.requests import SpeculationCounts


@dataclass(frozen=True)
class MethodStats:
    """What one way to translate a draft's tokens brought, and took."""

    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    seconds: float = 0.0

    def __add__(self, other: "MethodStats") -> "MethodStats":
        return MethodStats(
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_accepted_tokens + other.num_accepted_tokens,
            self.seconds + other.seconds,
        )


@dataclass
class DraftStats:
    """What one draft of the settings did, over all its replicas and their lives."""

    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    fallbacks: Counter[str] = field(default_factory=Counter)  # rounds of a sequence without it
    dropped: Counter[str] = field(default_factory=Counter)  # proposals never verified, by reason
    methods: dict[Method, MethodStats] = field(default_factory=dict)
    deaths: int = 0

    @property
    def seconds(self) -> float:
        """Spent in calls that propose."""
        return sum(stats.seconds for stats in list(self.methods.values()))

    def record(self, method: Method, drafted: int, accepted: int) -> None:
        """Count one verified block."""
        self.counts.record(drafted, accepted)
        self._add(method, MethodStats(drafted, accepted))

    def spend(self, method: Method, seconds: float) -> None:
        """Count the time of one call."""
        self._add(method, MethodStats(seconds=seconds))

    def _add(self, method: Method, stats: MethodStats) -> None:
        self.methods[method] = self.methods.get(method, MethodStats()) + stats


@dataclass
class Stats:
    """What the coordinator did since it started."""

    rounds: int = 0
    emitted_tokens: int = 0
    prompt_tokens: int = 0
    verify_seconds: float = 0.0  # spent in passes of the target
    finished: Counter[str] = field(default_factory=Counter)  # sequences by finish reason
    drafts: dict[str, DraftStats] = field(default_factory=dict)  # by the draft's name

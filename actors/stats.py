"""Plain integers and seconds that the coordinator counts: sums only, no rates, no metric library.

Every rate is a ratio of two of these sums, computed by whoever shows it.
"""

from collections import Counter
from dataclasses import dataclass, field

from outrider.actors.requests import SpeculationCounts


@dataclass
class DraftStats:
    """What one draft of the settings did, over all its replicas and their lives."""

    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    fallbacks: Counter[str] = field(default_factory=Counter)  # rounds of a sequence without it
    dropped: Counter[str] = field(default_factory=Counter)  # proposals never verified, by reason
    seconds: float = 0.0  # spent in calls that propose
    deaths: int = 0


@dataclass
class Stats:
    """What the coordinator did since it started."""

    rounds: int = 0
    emitted_tokens: int = 0
    prompt_tokens: int = 0
    verify_seconds: float = 0.0  # spent in passes of the target
    finished: Counter[str] = field(default_factory=Counter)  # sequences by finish reason
    drafts: dict[str, DraftStats] = field(default_factory=dict)  # by the draft's name

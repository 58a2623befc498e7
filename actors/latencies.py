"""How long sequences wait: clock readings of their events become histograms.

Knows no clock: every method is told the time, in seconds from any one point.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.actors.stats import Stats


@dataclass
class _Times:
    arrived: float
    first: float | None = None  # its first tokens
    last: float = 0.0  # its latest tokens
    num_tokens: int = 0


class Latencies:
    """The sequences being served; their latencies are counted in `stats`, in vLLM's sense."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._times: dict[int, _Times] = {}  # by sequence

    def __len__(self) -> int:
        """Sequences of which anything is kept."""
        return len(self._times)

    def arrive(self, sequences: Iterable[int], now: float) -> None:
        """Sequences were queued."""
        for id in sequences:
            self._times[id] = _Times(now)

    def admit(self, sequences: Iterable[int], now: float) -> None:
        """Sequences left the queue."""
        for id in sequences:
            self._stats.queue_s.observe(now - self._times[id].arrived)

    def emit(self, sequence: int, num_tokens: int, now: float, *, is_last: bool) -> None:
        """Tokens of a sequence went out at once; after the last it is forgotten."""
        times, stats = self._times[sequence], self._stats
        if times.first is None:
            times.first = now
            stats.first_token_s.observe(now - times.arrived)
        else:
            stats.inter_token_s.observe(now - times.last)
        times.last = now
        times.num_tokens += num_tokens
        if is_last:
            stats.end_to_end_s.observe(now - times.arrived)
            if times.num_tokens > 1:
                seconds = (now - times.first) / (times.num_tokens - 1)
                stats.per_output_token_s.observe(seconds)
            del self._times[sequence]

    def forget(self, sequences: Iterable[int]) -> None:
        """Sequences ended, in whatever way; unknown ones are ignored."""
        for id in sequences:
            self._times.pop(id, None)

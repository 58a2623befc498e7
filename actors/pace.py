"""How long a draft may take: three times its recent median for as much work, at least 50 ms.

Time is an argument: the caller measures. Work is counted in tokens run, and remembered by powers
of two, since a call that prefills a prompt takes longer than one that adds a token to each row.
"""

from collections import deque
from statistics import median

_FACTOR = 3.0
_LEAST_S = 0.05
_REMEMBERED = 32


class Pace:
    """Recent durations of one draft actor's calls."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s  # before anything was measured
        self._seconds: dict[int, deque[float]] = {}  # by the bit length of the work

    def record(self, num_ids: int, seconds: float) -> None:
        """Remember that a call with so many tokens of work took so many seconds."""
        bucket = self._seconds.setdefault(num_ids.bit_length(), deque(maxlen=_REMEMBERED))
        bucket.append(seconds)

    def deadline_s(self, num_ids: int) -> float:
        """Seconds to wait for a call with so many tokens of work."""
        if not self._seconds:
            return self._first_s
        size = num_ids.bit_length()
        known = min(self._seconds, key=lambda bits: (abs(bits - size), -bits))
        # More work than was ever measured may take proportionally longer.
        scale = 2.0 ** max(size - known, 0)
        return max(_FACTOR * scale * median(self._seconds[known]), _LEAST_S)

"""Which of its methods a draft of another vocabulary uses next: the one that pays more.

What pays is accepted tokens per second of drafting, over the recent past. The other method is
tried again now and then, since a text may change its mind. Time is an argument: knows no clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.actors.messages import Method
from outrider.actors.stats import MethodStats

_TRIALS = 4  # calls of each method before any is preferred
_RETRY = 16  # every so many calls go to the others in turn
_KEPT = 0.99  # of the past, with every call


@dataclass
class _Past:
    accepted: float = 0.0
    seconds: float = 0.0
    seen: MethodStats = field(default_factory=MethodStats)

    def update(self, now: MethodStats) -> None:
        self.accepted = _KEPT * self.accepted + now.num_accepted_tokens
        self.accepted -= self.seen.num_accepted_tokens
        self.seconds = _KEPT * self.seconds + now.seconds - self.seen.seconds
        self.seen = now

    @property
    def rate(self) -> float:
        """Accepted tokens per second of drafting."""
        return self.accepted / self.seconds if self.seconds > 0 else 0.0


class MethodChoice:
    """The choice for one draft."""

    def __init__(self, methods: Sequence[Method]) -> None:
        self._past: dict[Method, _Past] = {method: _Past() for method in methods}
        self._num_calls = 0

    def choose(self, stats: Mapping[Method, MethodStats]) -> Method:
        """The method of the next call, by all that `stats` counted so far."""
        methods = list(self._past)
        for method, past in self._past.items():
            past.update(stats.get(method, past.seen))
        number = self._num_calls
        self._num_calls += 1
        if number < _TRIALS * len(methods):
            return methods[number % len(methods)]
        best = max(methods, key=lambda method: self._past[method].rate)
        others = [method for method in methods if method != best]
        if others and number % _RETRY == 0:
            return others[number // _RETRY % len(others)]
        return best

"""Simulated workers for `outrider bench loop`: they wait and toss coins instead of computing.

Private to the benchmark: what they print is always marked "simulated". They speak the workers'
protocol, so that the coordinator, the scheduler and Ray are the real ones.
"""

import asyncio
import bisect
import random
import time
from dataclasses import dataclass

import ray

from outrider.actors.messages import Contexts, LoadReport, Outcomes, Proposals, Rows
from outrider.actors.vocabulary import Vocabulary

VOCABULARY = Vocabulary({id: str(id) for id in range(1000)})
MAX_MODEL_LEN = 1_000_000


@dataclass(frozen=True)
class Latency:
    """Seconds of a call by the number of tokens it runs: linear between the table's points."""

    num_tokens: tuple[int, ...]  # ascending
    seconds: tuple[float, ...]

    def __call__(self, num_tokens: int) -> float:
        after = bisect.bisect_left(self.num_tokens, num_tokens)
        if after == 0:
            return self.seconds[0]
        if after == len(self.num_tokens):
            return self.seconds[-1] * num_tokens / self.num_tokens[-1]
        n0, n1 = self.num_tokens[after - 1 : after + 1]
        s0, s1 = self.seconds[after - 1 : after + 1]
        return s0 + (s1 - s0) * (num_tokens - n0) / (n1 - n0)


@dataclass(frozen=True)
class Simulation:
    """What the workers pretend."""

    target: Latency
    draft: Latency  # of one step, by the rows it runs
    acceptance: float  # probability that a drafted token is accepted, given those before it


def worker_classes(simulation: Simulation) -> tuple[type, type]:
    """Target and draft classes that pretend `simulation`; local ones, so that Ray ships them."""

    class Target(SimulatedTarget):
        _simulation = simulation

    class Draft(SimulatedDraft):
        _simulation = simulation

    return Target, Draft


class _Worker:
    """What both kinds have in common; the constructor's arguments are those of real workers."""

    _simulation: Simulation

    def __init__(self, *_: object) -> None:
        self._coin = random.Random(0)

    @ray.method(concurrency_group="compute")
    async def load(self) -> LoadReport:
        """Pretend to have loaded."""
        return LoadReport(VOCABULARY, VOCABULARY.size, (), MAX_MODEL_LEN)

    @ray.method(concurrency_group="control")
    async def ping(self) -> None:
        """Answer."""


class SimulatedTarget(_Worker):
    """A target that accepts with a given probability after a given time."""

    @ray.method(concurrency_group="compute")
    async def verify(self, rows: Rows) -> Outcomes:
        """Wait as long as the pass would take, then toss a coin for every drafted token."""
        begin = time.perf_counter()
        await asyncio.sleep(self._simulation.target(rows.num_ids))
        accepted = [self._toss(drafted) for drafted in rows.num_drafted]
        seconds = time.perf_counter() - begin
        return Outcomes(accepted, [1] * len(accepted), [[] for _ in accepted], seconds)

    def _toss(self, drafted: int) -> int:
        for accepted in range(drafted):
            if self._coin.random() >= self._simulation.acceptance:
                return accepted
        return drafted


class SimulatedDraft(_Worker):
    """A draft that proposes after a given time."""

    @ray.method(concurrency_group="compute")
    async def propose(self, contexts: Contexts) -> Proposals:
        """Wait as long as the steps would take."""
        begin = time.perf_counter()
        steps = max(contexts.num_tokens, default=0)
        await asyncio.sleep(steps * self._simulation.draft(len(contexts.sequence)))
        return Proposals(
            contexts.sequence,
            contexts.epoch,
            [start + len(ids) for start, ids in zip(contexts.start, contexts.ids, strict=True)],
            [[0] * num_tokens for num_tokens in contexts.num_tokens],
            [None] * len(contexts.sequence),
            seconds=time.perf_counter() - begin,
        )

    @ray.method(concurrency_group="compute")
    async def free(self, sequences: list[int]) -> None:
        """Nothing is kept."""

    @ray.method(concurrency_group="compute")
    async def reset(self) -> None:
        """Nothing is kept."""

    @ray.method(concurrency_group="control")
    async def num_copies(self) -> int:
        """Nothing is kept."""
        return 0

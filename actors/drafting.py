"""The drafts as the coordinator sees them: asked for a round, heard late, forgotten, lost.

A thin shell: which ids go out and what becomes of proposals is the ledger's; how long to wait is
the pace's; lives and deaths are the pool's.
"""

import asyncio
import contextlib
import contextvars
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import ray
from ray.actor import ActorHandle

from outrider.actors.ledger import Ledger
from outrider.actors.lookup import PromptLookup
from outrider.actors.messages import Contexts, LoadReport, Method, Proposals
from outrider.actors.method_choice import MethodChoice
from outrider.actors.pace import Pace
from outrider.actors.pairing import PairReport, has_same_vocabulary
from outrider.actors.sequence import Proposal, Sequence
from outrider.actors.stats import DraftStats, Pool
from outrider.cluster.config import DraftModelSpec, PromptLookupSpec, TimeoutsSpec
from outrider.cluster.errors import ConfigError, WorkerLostError
from outrider.cluster.pool import DraftPool, PoolMember

logger = logging.getLogger(__name__)


class Draft(Protocol):
    """One entry of `drafts`: it proposes for many sequences at once."""

    name: str
    num_speculative_tokens: int

    @property
    def pool(self) -> Pool:
        """Its replicas."""

    async def start(self) -> None:
        """Load whatever it needs."""

    async def pair(self, target: LoadReport) -> None:
        """Get ready to draft for this target; ConfigError if that cannot be."""

    async def propose(self, sequences: list[Sequence], alive: Mapping[int, Sequence]) -> None:
        """Give each sequence a proposal if there is one in time. `alive`: all sequences, by id."""

    def forget(self, sequences: list[int]) -> None:
        """These sequences ended: drop what is kept of them."""

    async def num_copies(self) -> int:
        """Sequences of which anything is kept, on either side of the wire."""

    def kill(self) -> None:
        """End every actor behind it."""


class LookupDraft:
    """Prompt lookup, in the coordinator's own process."""

    def __init__(self, spec: PromptLookupSpec, stats: DraftStats) -> None:
        self.name = spec.name
        self.num_speculative_tokens = spec.num_speculative_tokens
        self._stats = stats
        self._lookup = PromptLookup(spec.prompt_lookup_min, spec.prompt_lookup_max)
        self.pool = Pool()  # it lives as long as the coordinator
        stats.expect(("prompt_lookup",), self.num_speculative_tokens)

    async def start(self) -> None:
        """Nothing to load."""

    async def pair(self, target: LoadReport) -> None:
        """It drafts for any target."""

    async def propose(self, sequences: list[Sequence], alive: Mapping[int, Sequence]) -> None:
        """Look every sequence up; those without a recurring n-gram get nothing."""
        begin = time.perf_counter()
        for sequence in sequences:
            length = sequence.draft_length(self.num_speculative_tokens)
            ids = self._lookup.propose(sequence.id, sequence.committed, length)
            if ids:
                base = len(sequence.committed)
                sequence.proposal = Proposal(self.name, base, ids, method="prompt_lookup")
                self._stats.proposals += 1
            else:
                self._stats.fallbacks["empty"] += 1
        self._stats.spend("prompt_lookup", time.perf_counter() - begin)

    def forget(self, sequences: list[int]) -> None:
        """Drop the sequences' n-grams."""
        self._lookup.forget(sequences)

    async def num_copies(self) -> int:
        """Sequences whose n-grams are kept."""
        return len(self._lookup)

    def kill(self) -> None:
        """Nothing to end."""


class PooledDraft:
    """A neural draft: actors, each with its ledger and pace; a sequence stays with one of them."""

    def __init__(
        self,
        spec: DraftModelSpec,
        make: Callable[[int], ActorHandle[Any]],
        stats: DraftStats,
        timeouts: TimeoutsSpec,
        *,
        with_law: bool,
    ) -> None:
        self.name = spec.name
        self.num_speculative_tokens = spec.num_speculative_tokens
        self._stats = stats
        self._pool = DraftPool(
            f"draft {spec.name}",
            make,
            spec.replicas,
            load_timeout_s=timeouts.load_s,
            silence_s=timeouts.draft_s,
            on_lost=self._on_lost,
            on_dead=self._on_dead,
        )
        self._with_law = with_law
        self._ledgers: list[Ledger] = []  # from `pair` on
        self._paces = [Pace(timeouts.draft_s) for _ in self._pool.members]
        self._calls: list[asyncio.Task[None] | None] = [None for _ in self._pool.members]
        self._late: set[int] = set()  # members whose call outlasted its round's patience
        self._home: dict[int, int] = {}  # sequence -> member
        self._frees: set[asyncio.Task[None]] = set()

    @property
    def pool(self) -> Pool:
        """Its actors."""
        members = self._pool.members
        return Pool(len(members), sum(member.is_living for member in members))

    async def start(self) -> None:
        """Load every actor."""
        self._report: LoadReport = (await self._pool.start())[0]

    async def pair(self, target: LoadReport) -> None:
        """Tell every actor how to translate, if the target's vocabulary is another."""
        methods: tuple[Method, ...] = ("same",)
        if not has_same_vocabulary(target, self._report):
            methods = await self._translate(target)
        self._choice = MethodChoice(methods)
        self._stats.expect(methods, self.num_speculative_tokens)
        self._ledgers = [
            Ledger(
                self.name,
                self.num_speculative_tokens,
                target.num_ids,
                self._stats,
                with_law=self._with_law,
            )
            for _ in self._pool.members
        ]

    async def _translate(self, target: LoadReport) -> tuple[Method, ...]:
        self._pool.load_args = (ray.put(target),)
        pairings = (
            member.ask("pair", *self._pool.load_args, timeout_s=self._pool.load_timeout_s)
            for member in self._pool.members
        )
        try:
            report: PairReport = (await asyncio.gather(*pairings))[0]  # the same from each
        except WorkerLostError as error:
            raise ConfigError(f"draft {self.name}: {error}") from error
        logger.info("draft %s: %s", self.name, report)
        return report.methods

    async def propose(self, sequences: list[Sequence], alive: Mapping[int, Sequence]) -> None:
        """One batched call per living member; waits for each no longer than its deadline."""
        waits = []
        for index, group in self._by_member(sequences).items():
            if self._calls[index] is not None:
                self._stats.fallbacks["busy"] += len(group)
                continue
            method = self._choice.choose(self._stats.methods)
            contexts = self._ledgers[index].contexts(group, method)
            work = sum(map(len, contexts.ids)) + sum(contexts.num_tokens)
            call = asyncio.create_task(self._call(index, contexts, work, alive))
            self._calls[index] = call
            waits.append(self._wait(index, call, self._paces[index].deadline_s(work), group))
        await asyncio.gather(*waits)

    def forget(self, sequences: list[int]) -> None:
        """Free the copies that members may hold, in one call each."""
        for id in sequences:
            self._home.pop(id, None)
        for member, ledger in zip(self._pool.members, self._ledgers, strict=False):
            held = ledger.forget(sequences)
            if held and member.is_living:
                # Not in the context of a request that was given up: Ray would take the call for a
                # part of it, cancel it, too, and so lose the member.
                context = contextvars.Context()
                task = asyncio.create_task(self._free(member, held), context=context)
                self._frees.add(task)
                task.add_done_callback(self._frees.discard)

    async def num_copies(self) -> int:
        """Copies in the living actors, and sequences accounted for."""
        counted = sum(map(len, self._ledgers))
        for member in self._pool.members:
            with contextlib.suppress(WorkerLostError):  # then it holds none
                counted += await member.ask("num_copies")
        return counted

    def kill(self) -> None:
        """End every actor."""
        for call in self._calls:
            if call is not None:
                call.cancel()
        self._pool.kill()

    def _by_member(self, sequences: Iterable[Sequence]) -> dict[int, list[Sequence]]:
        """Sequences by the living member they stay with; new ones go to the least loaded."""
        living = [member.index for member in self._pool.members if member.is_living]
        groups: dict[int, list[Sequence]] = {}
        for sequence in sequences:
            if not living:
                self._stats.fallbacks["no_draft"] += 1
                continue
            home = self._home.get(sequence.id)
            if home not in living:
                home = min(living, key=lambda index: len(self._ledgers[index]))
                self._home[sequence.id] = home
                self._ledgers[home].expect(sequence.id)
            groups.setdefault(home, []).append(sequence)
        return groups

    async def _call(
        self, index: int, contexts: Contexts, work: int, alive: Mapping[int, Sequence]
    ) -> None:
        begin = time.monotonic()
        try:
            proposals: Proposals = await self._pool.members[index].call("propose", contexts)
            self._paces[index].record(work, time.monotonic() - begin)
            self._ledgers[index].receive(proposals, alive)
            num_proposed = sum(map(bool, proposals.ids))
            if index in self._late:
                self._stats.late += num_proposed
            else:
                self._stats.fallbacks["empty"] += len(contexts.sequence) - num_proposed
        except WorkerLostError:
            if index not in self._late:  # else the turn was counted at its deadline
                self._stats.fallbacks["lost"] += len(contexts.sequence)
        finally:
            self._calls[index] = None
            self._late.discard(index)

    async def _wait(
        self, index: int, call: asyncio.Task[None], limit_s: float, group: list[Sequence]
    ) -> None:
        done, _ = await asyncio.wait({call}, timeout=limit_s)
        if not done:
            self._late.add(index)
            self._stats.fallbacks["deadline"] += len(group)

    async def _free(self, member: PoolMember, sequences: list[int]) -> None:
        with contextlib.suppress(WorkerLostError):  # then the copies died with the actor
            await member.call("free", sequences)

    def _on_dead(self, index: int) -> None:
        self._stats.deaths += 1

    def _on_lost(self, index: int) -> None:
        self._stats.quarantines += 1
        if self._ledgers:
            self._ledgers[index].begin_epoch()

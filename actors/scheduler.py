"""Who takes part in the next round: sequences in, plans out; outcomes in, deltas out.

A pure state machine: no clock, no Ray, no I/O. A row of the target's cache belongs to one running
sequence at a time and returns on every way out. A prompt longer than a pass's share is prefilled
in chunks beside the decoding rows; after the loss of the target the same path prefills the
committed ids again.
"""

import heapq
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from outrider.actors.messages import Outcomes, Rows
from outrider.actors.requests import Delta
from outrider.actors.sequence import NO_BLOCK, Block, Sequence
from outrider.actors.stats import RoundKind, Stats
from outrider.cluster.errors import OverloadedError, RequestError


@dataclass(frozen=True)
class Plan:
    """The sequences of one round, and how many committed ids of each the pass will run."""

    sequences: list[Sequence]
    num_ids: list[int]
    admitted: list[Sequence]  # those that got their row just now

    @property
    def decoding(self) -> list[Sequence]:
        """Sequences whose next pass decides a token and may carry a proposal."""
        return [s for s in self.sequences if s.num_pending == 1]


@dataclass(frozen=True)
class Batch:
    """What one pass verifies: the message, and whose rows they are."""

    rows: Rows
    sequences: list[Sequence]
    blocks: list[Block]

    @property
    def kind(self) -> RoundKind:
        """What is in the pass beside one token of each row."""
        num_drafted = sum(self.rows.num_drafted)
        if self.rows.num_ids - num_drafted > len(self.rows.row):
            return "prompt"
        return "block" if num_drafted else "plain"


class Scheduler:
    """Admission by free rows, first come first served; then rounds of all running sequences."""

    def __init__(
        self, *, num_rows: int, max_queued: int, max_num_batched_tokens: int, stats: Stats
    ) -> None:
        self._free_rows = list(range(num_rows))  # a heap: low rows first keeps the used ones dense
        self._num_rows = num_rows
        self._max_queued = max_queued
        self._max_num_batched_tokens = max_num_batched_tokens
        self._stats = stats
        self._waiting: deque[Sequence] = deque()
        self._running: dict[int, Sequence] = {}

    @property
    def num_waiting(self) -> int:
        """Sequences without a row."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences with a row."""
        return len(self._running)

    @property
    def num_free_rows(self) -> int:
        """Rows that no sequence holds."""
        return len(self._free_rows)

    @property
    def num_cached_tokens(self) -> int:
        """Committed ids that the rows hold."""
        return sum(sequence.num_cached for sequence in self._running.values())

    @property
    def has_work(self) -> bool:
        """Whether a round would do anything."""
        return bool(self._running or self._waiting)

    def check_size(self, num_sequences: int) -> None:
        """RequestError if a request of so many sequences could never be taken in."""
        if num_sequences > self._num_rows + self._max_queued:
            raise RequestError(
                f"the request asks for {num_sequences} answers at once, more than "
                f"{self._num_rows} rows and a queue of {self._max_queued} can ever hold",
                "n",
            )

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue the sequences of one request, all or none."""
        sequences = list(sequences)
        self.check_size(len(sequences))
        waiting = len(self._waiting) + len(sequences) - len(self._free_rows)
        if waiting > self._max_queued:
            self._stats.rejected += len(sequences)
            raise OverloadedError(
                f"{len(self._running)} sequences run and {len(self._waiting)} wait; "
                f"{len(sequences)} more exceed max_queued {self._max_queued}: try again later"
            )
        self._waiting.extend(sequences)

    def remove(self, ids: Iterable[int]) -> None:
        """Forget sequences, finished or given up; unknown ids are ignored."""
        gone = set(ids)
        for id in gone & self._running.keys():
            self._release(self._running[id])
        waiting = [s for s in self._waiting if s.id in gone]
        for sequence in waiting:
            self._let_go(sequence)
        if waiting:
            self._waiting = deque(s for s in self._waiting if s.id not in gone)

    def plan(self) -> Plan:
        """Admit what fits, then give every decoding row its token and prompts what is left."""
        admitted = []
        while self._waiting and self._free_rows:
            sequence = self._waiting.popleft()
            admitted.append(sequence)
            sequence.row = heapq.heappop(self._free_rows)
            self._running[sequence.id] = sequence
        sequences = list(self._running.values())
        # Prompts always get a share, else a full batch of long blocks would starve them.
        decoding = sum(s.num_pending == 1 for s in sequences)
        budget = max(self._max_num_batched_tokens - decoding, self._max_num_batched_tokens // 4, 1)
        planned: list[Sequence] = []
        num_ids: list[int] = []
        for sequence in sequences:
            chunk = 1 if sequence.num_pending == 1 else min(sequence.num_pending, budget)
            if chunk == 0:
                continue
            if sequence.num_pending > 1:
                budget -= chunk
            planned.append(sequence)
            num_ids.append(chunk)
        return Plan(planned, num_ids, admitted)

    def wanting(self, plan: Plan, configured: int) -> list[Sequence]:
        """Decoding sequences of the plan without a usable proposal that have room for one."""
        for sequence in plan.decoding:
            self._salvage(sequence)
        return [
            s
            for s in plan.decoding
            if s.id in self._running and s.proposal is None and s.draft_length(configured) > 0
        ]

    def batch(self, plan: Plan) -> Batch:
        """Turn the plan into rows, using up held proposals; sequences gone since are left out."""
        batch = Batch(Rows(), [], [])
        rows = batch.rows
        for sequence, num_ids in zip(plan.sequences, plan.num_ids, strict=True):
            if sequence.id not in self._running or sequence.row is None:
                continue
            decides = num_ids == sequence.num_pending
            block = NO_BLOCK
            if decides:
                self._salvage(sequence)
                block = sequence.take_block()
            start = sequence.num_cached
            rows.row.append(sequence.row)
            rows.start.append(start)
            rows.ids.append(sequence.committed[start : start + num_ids] + block.ids)
            rows.num_drafted.append(len(block.ids))
            rows.decides.append(decides)
            rows.position.append(sequence.position)
            rows.sampling.append(sequence.sampling)
            rows.law.append(block.law)
            rows.num_logprobs.append(sequence.num_logprobs)
            batch.sequences.append(sequence)
            batch.blocks.append(block)
        return batch

    def commit(self, batch: Batch, outcomes: Outcomes) -> list[tuple[Sequence, Delta]]:
        """Commit every outcome; the rows of finished sequences are free afterwards."""
        stats = self._stats
        rounds = stats.rounds[batch.kind]
        rounds.num_rounds += 1
        rounds.num_rows += len(batch.sequences)
        rounds.verify_seconds += outcomes.seconds
        deltas = []
        for i, (sequence, block) in enumerate(zip(batch.sequences, batch.blocks, strict=True)):
            if sequence.id not in self._running:
                self._drop(block.draft, "ended")  # given up while the pass ran
                continue
            if not batch.rows.decides[i]:
                sequence.num_cached += len(batch.rows.ids[i])
                continue
            accepted = outcomes.accepted[i]
            if block.draft is not None:
                stats.drafts[block.draft].record(block.method, len(block.ids), accepted)
            delta = sequence.commit(block, accepted, outcomes.next_id[i], outcomes.logprobs[i])
            stats.record(len(block.ids), accepted, len(delta.ids))
            if delta.finish_reason is not None:
                stats.finished[delta.finish_reason] += 1
                stats.prompt_length.observe(sequence.num_prompt_ids)
                stats.output_length.observe(sequence.position)
                self._release(sequence)
            deltas.append((sequence, delta))
        return deltas

    def abandon(self, batch: Batch) -> None:
        """The pass gave no outcomes: what it would have verified is drafted anew."""
        for block in batch.blocks:
            self._drop(block.draft, "pass_lost")

    def forget_cache(self) -> None:
        """The target lost its cache: run the committed ids of every sequence again."""
        for sequence in self._running.values():
            sequence.num_cached = 0

    def _salvage(self, sequence: Sequence) -> None:
        held = sequence.proposal
        if held is None:
            return
        dropped = sequence.salvage()
        if dropped is not None:
            self._drop(held.draft, dropped)
        elif held.base < len(sequence.committed):
            self._stats.drafts[held.draft].salvaged += 1

    def _let_go(self, sequence: Sequence) -> None:
        """A sequence ends: so does the proposal that it holds."""
        if sequence.proposal is not None:
            self._drop(sequence.proposal.draft, "ended")
            sequence.proposal = None

    def _drop(self, draft: str | None, reason: str) -> None:
        if draft is not None:
            self._stats.drafts[draft].dropped[reason] += 1

    def _release(self, sequence: Sequence) -> None:
        del self._running[sequence.id]
        self._let_go(sequence)
        if sequence.row is not None:
            heapq.heappush(self._free_rows, sequence.row)
            sequence.row = None
        if len(self._running) + len(self._free_rows) != self._num_rows:
            raise AssertionError("rows leaked: running and free rows do not add up")

"""The serving loop without Ray: real scheduler, ledgers, drafters and models in one process.

For tests that compare ids over many configurations. `Kill` takes a draft away in mid-stream.
"""

import time
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace

from outrider.actors.decide import Verifier
from outrider.actors.draft import Drafter
from outrider.actors.ledger import Ledger
from outrider.actors.lookup import PromptLookup
from outrider.actors.messages import Method, Outcomes, Rows, Sampling
from outrider.actors.method_choice import MethodChoice
from outrider.actors.model import Model
from outrider.actors.requests import Delta
from outrider.actors.scheduler import Scheduler
from outrider.actors.sequence import Proposal, Sequence, StopRules
from outrider.actors.stats import DraftStats, Stats
from outrider.actors.text import TextStream

from .identities import check_identities

GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True)
class Job:
    """One answer to make."""

    prompt: Ids[int]
    max_tokens: int
    sampling: Sampling = GREEDY
    end_ids: frozenset[int] = frozenset()
    num_speculative_tokens: int | None = None


@dataclass
class EngineDraft:
    """A draft of the engine; `killed_after` rounds it is gone for good."""

    name: str
    num_tokens: int
    source: Drafter | PromptLookup
    method: Method = "same"
    choice: MethodChoice | None = None  # goes before `method`
    killed_after: int | None = None
    ledger: Ledger | None = None


@dataclass
class Engine:
    """Runs jobs, or sequences, to their end; what they gave comes back in their order.

    The target is lost, with its cache and its log, before round `target_lost_after`.
    """

    target: Model
    drafts: list[EngineDraft] = field(default_factory=list)
    with_law: bool = False
    max_num_batched_tokens: int = 512
    target_lost_after: int | None = None
    stats: Stats = field(default_factory=Stats)
    sequences: list[Sequence] = field(default_factory=list)  # of the last run
    verifier: Verifier = field(init=False)

    def run(self, jobs: Ids[Job], num_rows: int = 8) -> list[list[int]]:
        """Serve all jobs at once and return their output ids."""
        sequences = [self._sequence(i, job) for i, job in enumerate(jobs)]
        self.serve(sequences, num_rows)
        return [s.committed[s.num_prompt_ids :] for s in sequences]

    def serve(self, sequences: Ids[Sequence], num_rows: int = 8) -> list[list[Delta]]:
        """Serve all sequences at once and return the deltas of each."""
        self.verifier = Verifier(self.target)
        self.stats = Stats(drafts={draft.name: DraftStats() for draft in self.drafts})
        scheduler = Scheduler(
            num_rows=num_rows,
            max_queued=len(sequences),
            max_num_batched_tokens=self.max_num_batched_tokens,
            stats=self.stats,
        )
        for draft in self.drafts:
            draft.ledger = Ledger(
                draft.name,
                draft.num_tokens,
                self.target.vocabulary.size,
                self.stats.drafts[draft.name],
                with_law=self.with_law,
            )
        self.sequences = list(sequences)
        deltas: dict[int, list[Delta]] = {sequence.id: [] for sequence in sequences}
        alive = {sequence.id: sequence for sequence in sequences}
        scheduler.submit(sequences)
        while scheduler.has_work:
            if self.stats.num_rounds == self.target_lost_after:
                self._lose_target(scheduler)
            plan = scheduler.plan()
            for draft in self.drafts:
                if draft.killed_after is not None and self.stats.num_rounds >= draft.killed_after:
                    continue
                wanting = scheduler.wanting(plan, draft.num_tokens)
                if wanting:
                    self._propose(draft, wanting, alive)
            batch = scheduler.batch(plan)
            for sequence, delta in scheduler.commit(batch, self.decide(batch.rows)):
                deltas[sequence.id].append(delta)
                if delta.finish_reason is not None:
                    del alive[sequence.id]
                    self._forget(sequence.id)
        check_identities(self.stats)
        return [deltas[sequence.id] for sequence in sequences]

    def decide(self, rows: Rows) -> Outcomes:
        """One pass of the target."""
        return self.verifier.decide(rows)

    def _lose_target(self, scheduler: Scheduler) -> None:
        self.target.cache.lengths = [0] * len(self.target.cache.lengths)
        self.verifier = Verifier(self.target)
        scheduler.forget_cache()

    def _sequence(self, id: int, job: Job) -> Sequence:
        return Sequence(
            id,
            id,
            job.prompt,
            job.sampling,
            StopRules(job.max_tokens, job.end_ids),
            TextStream(lambda ids: "", job.prompt),
            num_speculative_tokens=job.num_speculative_tokens,
        )

    def _propose(
        self, draft: EngineDraft, wanting: list[Sequence], alive: dict[int, Sequence]
    ) -> None:
        if isinstance(draft.source, PromptLookup):
            for s in wanting:
                length = s.draft_length(draft.num_tokens)
                ids = draft.source.propose(s.id, s.committed, length)
                if ids:
                    base = len(s.committed)
                    s.proposal = Proposal(draft.name, base, ids, method="prompt_lookup")
                    self.stats.drafts[draft.name].proposals += 1
            return
        assert draft.ledger is not None
        method = draft.method
        if draft.choice is not None:
            method = draft.choice.choose(self.stats.drafts[draft.name].methods)
        contexts = draft.ledger.contexts(wanting, method)
        begin = time.perf_counter()
        proposals = draft.source.propose(contexts)
        seconds = time.perf_counter() - begin
        draft.ledger.receive(replace(proposals, seconds=seconds), alive)

    def _forget(self, id: int) -> None:
        for draft in self.drafts:
            if isinstance(draft.source, PromptLookup):
                draft.source.forget([id])
            else:
                assert draft.ledger is not None
                draft.source.free(draft.ledger.forget([id]))

"""The coordinator: one loop that plans, drafts, verifies and commits, round after round.

A thin shell: the scheduler decides who takes part, sequences decide what an answer is, workers
compute. The same class runs as a plain Ray actor and as a Serve deployment. It promises that a
stream given up leaves no row and no draft's copy behind, that the loss of drafts costs only speed,
and that the loss of the target costs a rebuild: running streams go on from their committed ids.
"""

import asyncio
import contextlib
import copy
import functools
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from typing import Any

from ray.actor import ActorHandle
from ray.exceptions import RayTaskError

from outrider.actors.draft import DraftWorker
from outrider.actors.drafting import Draft, LookupDraft, PooledDraft
from outrider.actors.intake import Intake
from outrider.actors.latencies import Latencies
from outrider.actors.messages import LoadReport, Outcomes
from outrider.actors.requests import Delta, GenerateRequest, ModelCard
from outrider.actors.scheduler import Batch, Plan, Scheduler
from outrider.actors.sequence import Sequence
from outrider.actors.stats import DraftStats, Levels, Sink, Snapshot, Stats
from outrider.actors.streams import Streams
from outrider.actors.target import TargetWorker
from outrider.actors.text import Detokenize
from outrider.actors.vocabulary import load_tokenizer
from outrider.cluster.config import DraftModelSpec, PromptLookupSpec, Settings
from outrider.cluster.errors import (
    OutriderError,
    UnavailableError,
    WorkerLostError,
)
from outrider.cluster.group import TargetGroup, rank_options
from outrider.cluster.logs import log_to_terminal, reporter
from outrider.cluster.models import resolve
from outrider.cluster.pool import draft_options
from outrider.cluster.remote import make_actor

logger = logging.getLogger(__name__)

_REBUILD_ATTEMPTS = 3
_MOST_LOSSES = 2  # of the target, in passes with the same sequence
_WATCH_S = 2.0
_WRITE_S = 1.0  # between two snapshots for the sinks

MakeDecode = Callable[[Settings], Detokenize]
MakeSinks = Callable[[Settings], list[Sink]]


def decode_with_tokenizer(settings: Settings) -> Detokenize:
    """The target's tokenizer as a function from ids to text."""
    report = reporter("coordinator")
    files = resolve(settings.target.model, settings.target.revision, report)
    tokenizer: Any = load_tokenizer(files, settings.target.tokenizer, report)
    if tokenizer.is_fast:  # the Rust tokenizer itself decodes four times as fast
        decode: Detokenize = tokenizer.backend_tokenizer.decode
        return decode
    return functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)


def no_sinks(_: Settings) -> list[Sink]:
    """The counts stay where they are."""
    return []


class Coordinator:
    """Serves one model; `start` first, then `generate` from any number of callers."""

    _report: LoadReport
    _intake: Intake

    def __init__(
        self,
        settings: Settings,
        *,
        target_class: type = TargetWorker,
        draft_class: type = DraftWorker,
        make_decode: MakeDecode = decode_with_tokenizer,
        make_sinks: MakeSinks = no_sinks,
    ) -> None:
        # A GPU that Ray did not give to this process must not be touched by it (Ray >= 2.56 shows
        # all GPUs to actors that asked for none).
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        log_to_terminal()
        self._settings = settings
        self._draft_class = draft_class
        self._make_decode = make_decode
        self.stats = Stats(drafts={draft.name: DraftStats() for draft in settings.drafts})
        self._latencies = Latencies(self.stats)
        self._sinks = make_sinks(settings)
        self._telling = threading.Lock()
        target = settings.target
        self._target = TargetGroup(
            lambda rank: make_actor(
                target_class, rank_options(target, rank), target, rank, settings.timeouts.load_s
            ),
            target.tensor_parallel_size,
            load_timeout_s=settings.timeouts.load_s,
            call_timeout_s=settings.timeouts.round_s,
        )
        self._drafts = [self._make_draft(spec) for spec in settings.drafts]
        self.scheduler = Scheduler(
            num_rows=target.max_num_seqs,
            max_queued=target.max_queued,
            max_num_batched_tokens=target.max_num_batched_tokens,
            stats=self.stats,
        )
        self._streams = Streams()
        self._work = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._is_ready = False  # the target is loaded and not known to be lost
        self._created = int(time.time())

    async def start(self) -> None:
        """Make and load every worker, and begin to serve. ConfigError says what cannot work."""
        makers: list[Coroutine[Any, Any, Any]] = [
            asyncio.to_thread(self._make_decode, self._settings),
            self._target.start(),
            *(draft.start() for draft in self._drafts),
        ]
        starts = [asyncio.create_task(maker) for maker in makers]
        try:
            decode, self._report, *_ = await asyncio.gather(*starts)
            for draft in self._drafts:
                await draft.pair(self._report)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            self.shutdown()
            raise
        self._intake = Intake(self._report, decode, self._settings.seed)
        self._is_ready = True
        self._watch = asyncio.create_task(self._watch_target())
        if self._sinks:
            self._writer = asyncio.create_task(self._write())
        self._loop = asyncio.create_task(self._run())
        self._loop.add_done_callback(self._on_loop_end)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[Delta], None]:
        """Serve one request: items hold the new ids and text of one or more of its sequences.

        Raises RequestError, OverloadedError or UnavailableError; closing the generator gives the
        request up.
        """
        self._check_running()
        self.scheduler.check_size(len(request.prompts) * request.n)
        sequences = self._intake.sequences(request)
        self.scheduler.submit(sequences)
        items = self._streams.open(sequences)
        self._latencies.arrive([s.id for s in sequences], time.monotonic())
        self.stats.prompt_tokens += sum(s.num_prompt_ids for s in sequences)
        self._work.set()
        try:
            async for item in items:
                yield item
        finally:
            given_up = self._streams.living(sequences)
            if given_up:
                self.stats.finished["abort"] += len(given_up)
                self._forget(given_up)

    async def describe(self) -> ModelCard:
        """What is served."""
        self._check_running()
        return ModelCard(
            self._settings.model_name,
            self._report.max_model_len,
            self._report.num_ids,
            self._created,
        )

    async def check_health(self) -> None:
        """Raise UnavailableError when only another coordinator can help (asked by Serve)."""
        self._check_running()

    async def check_ready(self) -> None:
        """Raise UnavailableError unless requests are being served now."""
        self._check_running()
        if not self._is_ready:
            raise UnavailableError("the target was lost and is being rebuilt: try again later")

    async def usage(self) -> Mapping[str, int]:
        """What is held now: sequences waiting and running, rows, draft copies accounted for."""
        return {
            "waiting": self.scheduler.num_waiting,
            "running": self.scheduler.num_running,
            "free_rows": self.scheduler.num_free_rows,
            "streams": len(self._streams),
            "draft_copies": sum([await draft.num_copies() for draft in self._drafts]),
        }

    async def settings(self) -> Settings:
        """What it was made from."""
        return self._settings

    async def snapshot(self) -> Stats:
        """A copy of the counters now."""
        return copy.deepcopy(self.stats)

    async def measure(self) -> Snapshot:
        """The counters now, and what is held. UnavailableError before there is anything."""
        if self._loop is None:
            raise UnavailableError("the coordinator has not started")
        return self._measure()

    def _measure(self) -> Snapshot:
        scheduler = self.scheduler
        num_rows = scheduler.num_running + scheduler.num_free_rows
        levels = Levels(
            waiting=scheduler.num_waiting,
            max_waiting=self._settings.target.max_queued,
            running=scheduler.num_running,
            rows=num_rows,
            cached_tokens=scheduler.num_cached_tokens,
            cache_tokens=num_rows * self._report.max_model_len,
            pools={draft.name: draft.pool for draft in self._drafts},
            is_ready=self._is_ready,
        )
        return Snapshot(copy.deepcopy(self.stats), levels)

    def shutdown(self) -> None:
        """End the loop and every worker."""
        for task in (self._watch, self._writer, self._loop):
            if task is not None:
                task.cancel()
        for draft in self._drafts:
            draft.kill()
        self._target.kill()
        if self._loop is not None:
            with contextlib.suppress(Exception):  # it is not what ends the coordinator
                self._tell(self._measure())

    async def _run(self) -> None:
        """Plan, draft, verify, commit; waiting for drafts no longer than their deadlines."""
        while True:
            await self._work.wait()
            if not self._is_ready:
                await self._rebuild()
            if not self.scheduler.has_work:
                self._work.clear()
                continue
            begin = time.monotonic()
            plan = self.scheduler.plan()
            self._latencies.admit([s.id for s in plan.admitted], begin)
            await self._propose(plan)
            batch = self.scheduler.batch(plan)
            proposed = time.monotonic()
            outcomes = await self._verify(batch)
            if outcomes is not None:
                self._publish(self.scheduler.commit(batch, outcomes))
                rounds = self.stats.rounds[batch.kind]
                rounds.draft_wait_seconds += proposed - begin
                rounds.seconds += time.monotonic() - begin

    async def _propose(self, plan: Plan) -> None:
        """Ask the drafts in their order; each only for the sequences still without a proposal."""
        for draft in self._drafts:
            wanting = self.scheduler.wanting(plan, draft.num_speculative_tokens)
            if wanting:
                await draft.propose(wanting, self._streams.alive)

    async def _verify(self, batch: Batch) -> Outcomes | None:
        """One pass of the target; None when it was lost, after it is rebuilt."""
        if not batch.sequences:
            return None
        try:
            outcomes: Outcomes = await self._target.call("verify", batch.rows)
            return outcomes
        except WorkerLostError as error:
            self.scheduler.abandon(batch)
            logger.warning("%s; it is rebuilt, running streams go on", error)
            self._fail_repeated(batch.sequences, error)
        except RayTaskError as error:
            self.scheduler.abandon(batch)
            # The pass itself failed: its sequences end, else they would fail again for ever.
            logger.exception("a pass failed; its %d sequences end", len(batch.sequences))
            self._fail(batch.sequences, UnavailableError(f"the target failed: {error.cause!r}"))
            if self._settings.target.tensor_parallel_size == 1:
                return None  # with more ranks, the others may still wait inside a collective
        self._is_ready = False
        return None

    def _fail_repeated(self, sequences: list[Sequence], error: WorkerLostError) -> None:
        """End what was in the pass each time the target was lost: it may be the reason."""
        for sequence in sequences:
            sequence.num_losses += 1
        again = [s for s in sequences if s.num_losses >= _MOST_LOSSES]
        self._fail(again, UnavailableError(f"the target was lost {_MOST_LOSSES} times: {error}"))

    async def _watch_target(self) -> None:
        """Notice the loss of a target that nobody uses."""
        while True:
            await asyncio.sleep(_WATCH_S)
            before = self.stats.rebuilds
            try:
                if self._is_ready:
                    await self._target.call("ping")
            except (WorkerLostError, RayTaskError) as error:
                if self._is_ready and before == self.stats.rebuilds:
                    logger.warning("%s; it is rebuilt", error)
                    self._is_ready = False
                    self._work.set()

    async def _write(self) -> None:
        """Hand the counts to the sinks now and then; what goes wrong there stays there."""
        told = ""
        while True:
            await asyncio.sleep(_WRITE_S)
            failure = ""
            try:
                await asyncio.to_thread(self._tell, self._measure())
            except Exception as error:
                failure = repr(error)
                if failure != told:
                    logger.warning("metrics were not written, serving goes on: %s", failure)
            told = failure

    def _tell(self, snapshot: Snapshot) -> None:
        """Hand a snapshot to every sink."""
        with self._telling:
            for sink in self._sinks:
                sink.write(snapshot)

    async def _rebuild(self) -> None:
        """Make the target anew; every running sequence is prefilled again by the next rounds."""
        self.stats.rebuilds += 1
        self.scheduler.forget_cache()
        self._target.kill()
        for attempt in range(1, _REBUILD_ATTEMPTS + 1):
            try:
                self._report = await self._target.start()
                self._is_ready = True
                return
            except OutriderError as error:
                logger.warning("target rebuild %d failed: %s", attempt, error)
                if attempt == _REBUILD_ATTEMPTS:
                    raise UnavailableError(f"the target cannot be rebuilt: {error}") from None

    def _publish(self, deltas: list[tuple[Sequence, Delta]]) -> None:
        """Hand out the deltas of a round; forget the finished."""
        now = time.monotonic()
        self._streams.send(deltas)
        for sequence, delta in deltas:
            is_last = delta.finish_reason is not None
            self._latencies.emit(sequence.id, len(delta.ids), now, is_last=is_last)
        self._forget([sequence for sequence, delta in deltas if delta.finish_reason is not None])

    def _fail(self, sequences: Iterable[Sequence], error: Exception) -> None:
        """End sequences with an error; the other answers of the same request end with them."""
        ended = self._streams.fail(sequences, error)
        self.stats.finished["error"] += len(ended)
        self._forget(ended)

    def _forget(self, sequences: list[Sequence]) -> None:
        """Free everything that belongs to sequences, wherever it is."""
        ids = [sequence.id for sequence in sequences]
        self.scheduler.remove(ids)
        self._latencies.forget(ids)
        self._streams.forget(ids)
        for draft in self._drafts:
            draft.forget(ids)

    def _on_loop_end(self, loop: asyncio.Task[None]) -> None:
        self._is_ready = False
        error: BaseException | None = None if loop.cancelled() else loop.exception()
        if error is not None:
            logger.error("the serving loop ended", exc_info=error)
        reason = error if isinstance(error, OutriderError) else "the serving loop ended"
        self._fail(list(self._streams.alive.values()), UnavailableError(str(reason)))

    def _check_running(self) -> None:
        if self._loop is None:
            raise UnavailableError("the coordinator has not started")
        if self._loop.done():
            raise UnavailableError("the serving loop has ended: restart the coordinator")

    def _make_draft(self, spec: DraftModelSpec | PromptLookupSpec) -> Draft:
        settings = self._settings
        stats = self.stats.drafts[spec.name]
        if isinstance(spec, PromptLookupSpec):
            return LookupDraft(spec, stats)

        def make(index: int) -> ActorHandle[Any]:
            return make_actor(
                self._draft_class,
                draft_options(spec),
                spec,
                index,
                settings.target.max_num_seqs,
                settings.decoding.draft_top_k,
            )

        with_law = settings.decoding.verification == "ratio"
        return PooledDraft(spec, make, stats, settings.timeouts, with_law=with_law)

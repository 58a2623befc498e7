"""The coordinator on a real Ray with real (tiny) models: same ids whatever runs, nothing left."""

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from outrider.actors.coordinator import Coordinator
from outrider.actors.messages import LoadReport, Outcomes, Rows, Sampling
from outrider.actors.model import Model
from outrider.actors.philox import key64
from outrider.actors.requests import GenerateRequest
from outrider.actors.stats import DraftStats, Pool, Snapshot, Stats
from outrider.actors.target import TargetWorker
from outrider.cluster.config import Settings, TargetSpec
from outrider.cluster.errors import (
    ConfigError,
    OverloadedError,
    RequestError,
    UnavailableError,
)
from outrider.cluster.remote import make_actor

from .conftest import Folders
from .engine import Engine, Job
from .identities import check_identities
from .serving import (
    LOOKUP,
    Answer,
    collect,
    make_settings,
    neural,
    send,
    serving,
    stream,
    wait_for,
    worker_pids,
)

pytestmark = pytest.mark.usefixtures("ray_session")


def requests(num_speculative_tokens: int | None = None) -> list[GenerateRequest]:
    """A mix of greedy and sampled requests with prompts of ragged lengths."""
    laws: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1},
        {"temperature": 0.5, "seed": -2, "top_p": 0.9},
        {"temperature": 1.5, "seed": 2**63 + 5, "top_k": 12},
        {"temperature": 1.0, "seed": 4, "n": 3},
        {"temperature": 0.0, "ignore_eos": True},
    ]
    return [
        GenerateRequest(
            str(i),
            [[3 + (7 * i + 5 * j) % 140 for j in range(length)]],
            max_tokens=30,
            num_speculative_tokens=num_speculative_tokens,
            **law,
        )
        for i, (law, length) in enumerate(
            itertools.product(laws, (1, 17)),
        )
    ]


def ids_of(answers: list[list[Answer]]) -> list[list[list[int]]]:
    return [[answer.ids for answer in request] for request in answers]


async def serve_all(coordinator: Any, asked: list[GenerateRequest]) -> list[list[list[int]]]:
    return ids_of(await asyncio.gather(*(collect(coordinator, r) for r in asked)))


@pytest.fixture(scope="module")
def plain(folders: Folders) -> list[list[list[int]]]:
    """What plain decoding says, one answer at a time, without Ray."""
    model = Model.load(TargetSpec(model=folders.target, dtype="float64"), rows=1)

    def answer(request: GenerateRequest, choice: int) -> list[int]:
        law = (request.temperature, request.top_k, request.top_p)
        job = Job(
            request.prompts[0],
            request.max_tokens or 0,
            Sampling(*law, key64(request.seed or 0), choice),
            frozenset() if request.ignore_eos else frozenset(model.end_ids),
        )
        return Engine(model).run([job], num_rows=1)[0]

    return [[answer(r, choice) for choice in range(r.n)] for r in requests()]


@pytest.fixture(scope="module")
def shared(ray_session: None, folders: Folders) -> Iterator[Any]:
    """A coordinator with prompt lookup and two replicas of a noisy draft, small passes."""
    settings = make_settings(
        folders.target,
        LOOKUP,
        neural("noisy", folders.noisy, replicas=2),
        target_changes={"max_num_batched_tokens": 24},
        timeouts={"draft_s": 3},
    )
    coordinator = make_actor(Coordinator, {"num_cpus": 0}, settings)
    ray.get(coordinator.start.remote())
    yield coordinator
    ray.kill(coordinator)


async def test_ids_are_those_of_plain_decoding_whatever_is_drafted(
    shared: Any, plain: list[list[list[int]]]
) -> None:
    assert await serve_all(shared, requests()) == plain
    assert await serve_all(shared, requests(2)[::-1]) == plain[::-1]
    assert await serve_all(shared, requests(9)) == plain
    assert await serve_all(shared, requests(0)) == plain
    drafts = (await shared.snapshot.remote()).drafts
    counts = drafts["noisy"].counts
    assert drafts["lookup"].fallbacks["empty"] > 0, "most of this text repeats nothing"
    assert 0.1 < counts.num_accepted_tokens / counts.num_draft_tokens < 0.9, "some of both"
    assert (await wait_for_idle(shared))["free_rows"] == 8


async def wait_for_idle(coordinator: Any) -> dict[str, int]:
    async def idle() -> dict[str, int] | None:
        usage: dict[str, int] = await coordinator.usage.remote()
        held = {name: count for name, count in usage.items() if name != "free_rows"}
        return None if any(held.values()) else usage

    result: dict[str, int] = await wait_for(idle, "an idle coordinator")
    return result


async def check_counts(coordinator: Any) -> Stats:
    """What an idle coordinator has counted adds up."""
    await wait_for_idle(coordinator)
    snapshot: Snapshot = await coordinator.measure.remote()
    stats, levels = snapshot.stats, snapshot.levels
    check_identities(stats)
    assert sum(stats.end_to_end_s.counts) == stats.finished["stop"] + stats.finished["length"]
    assert sum(stats.first_token_s.counts) >= sum(stats.end_to_end_s.counts)
    assert sum(stats.queue_s.counts) >= sum(stats.first_token_s.counts)
    assert stats.round_seconds > stats.verify_seconds > 0
    assert stats.round_seconds > stats.draft_wait_seconds
    assert (levels.waiting, levels.running, levels.cached_tokens) == (0, 0, 0)
    assert (levels.rows, levels.cache_tokens) == (8, 8 * 128)
    return stats


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_go_on_with_the_same_ids_when_every_draft_dies_or_hangs(
    fault: signal.Signals, shared: Any, plain: list[list[list[int]]]
) -> None:
    async def counted() -> DraftStats:
        stats: Stats = await shared.snapshot.remote()
        return stats.drafts["noisy"]

    before = await counted()
    pids = worker_pids("DraftWorker")
    assert len(pids) == 2
    running = asyncio.create_task(serve_all(shared, requests()))

    async def has_drafted() -> bool:
        return (await counted()).counts.num_drafts >= before.counts.num_drafts + 3

    await wait_for(has_drafted, "a few proposals")
    send(fault, pids)
    assert await running == plain

    async def is_replaced() -> bool:
        # Work makes the loss known; the replacements come by themselves.
        assert await serve_all(shared, requests()) == plain
        is_new = len(worker_pids("DraftWorker")) == 2 and not set(worker_pids("DraftWorker")) & set(
            pids
        )
        return is_new and (await counted()).deaths == before.deaths + 2

    await wait_for(is_replaced, "two other drafts")
    after = await counted()

    async def drafts_again() -> bool:
        await serve_all(shared, requests()[:4])
        return (await counted()).counts.num_drafts > after.counts.num_drafts

    await wait_for(drafts_again, "proposals of the new drafts")
    ended = (await check_counts(shared)).drafts["noisy"]
    assert ended.quarantines == before.quarantines + 2
    pools = (await shared.measure.remote()).levels.pools
    assert (pools["noisy"], pools["lookup"]) == (Pool(2, 2), Pool(1, 1))


async def test_streams_go_on_with_the_same_ids_when_the_target_dies(
    shared: Any, plain: list[list[list[int]]]
) -> None:
    before = (await shared.snapshot.remote()).emitted_tokens
    running = asyncio.create_task(serve_all(shared, requests()))

    async def has_emitted() -> bool:
        return bool((await shared.snapshot.remote()).emitted_tokens > before + 30)

    await wait_for(has_emitted, "some tokens")
    send(signal.SIGKILL, worker_pids("TargetWorker"))
    assert await running == plain
    await shared.check_ready.remote()
    assert (await check_counts(shared)).rebuilds >= 1


async def test_the_loss_of_an_idle_target_is_noticed_and_mended(
    shared: Any, plain: list[list[list[int]]]
) -> None:
    send(signal.SIGKILL, worker_pids("TargetWorker"))

    async def is_ready() -> bool:
        snapshot: Snapshot = await shared.measure.remote()
        return snapshot.levels.is_ready

    async def is_refusing() -> bool:
        try:
            await shared.check_ready.remote()
        except UnavailableError:
            return True
        return False

    await wait_for(is_refusing, "the loss to be noticed")
    assert not await is_ready()  # loading another takes seconds
    await shared.check_health.remote()  # nothing that Serve should restart the coordinator for
    await wait_for(is_ready, "another target")
    await shared.check_ready.remote()
    assert await serve_all(shared, requests()[:4]) == plain[:4]


class PoisonedTarget(TargetWorker):
    """A target that dies of one token."""

    @ray.method(concurrency_group="compute")
    async def verify(self, rows: Rows) -> Outcomes | None:
        if any(77 in ids for ids in rows.ids):
            os._exit(1)
        return await super().verify(rows)


async def test_a_request_that_kills_the_target_twice_ends_and_the_others_go_on(
    folders: Folders, plain: list[list[list[int]]]
) -> None:
    async with serving(make_settings(folders.target), target_class=PoisonedTarget) as coordinator:
        with pytest.raises(UnavailableError, match="the target was lost 2 times"):
            await collect(coordinator, GenerateRequest("0", [[77]], max_tokens=5))
        innocent = [i for i, r in enumerate(requests()) if 77 not in r.prompts[0]]
        served = await collect(coordinator, requests()[innocent[0]])
        assert ids_of([served]) == [plain[innocent[0]]]


def _no_tokenizer(_: Settings) -> Any:
    raise ConfigError("no tokenizer today")


async def test_a_start_that_fails_leaves_no_worker_behind(folders: Folders) -> None:
    before = set(worker_pids("TargetWorker") + worker_pids("DraftWorker"))
    settings = make_settings(folders.target, neural("noisy", folders.noisy))
    coordinator = make_actor(Coordinator, {"num_cpus": 0}, settings, make_decode=_no_tokenizer)
    with pytest.raises(ConfigError, match="no tokenizer today"):
        await coordinator.start.remote()
    await wait_for(
        lambda: set(worker_pids("TargetWorker") + worker_pids("DraftWorker")) <= before,
        "the workers to end",
    )
    ray.kill(coordinator)


async def test_streams_given_up_leave_no_sequence_row_or_copy(shared: Any) -> None:
    before = (await shared.snapshot.remote()).finished["abort"]

    async def leave_early(number: int) -> None:
        request = GenerateRequest(
            str(number), [[3 + number % 100, 5, 7]], max_tokens=120, ignore_eos=True
        )
        async for _ in stream(shared, request):
            break

    await asyncio.gather(*(leave_early(number) for number in range(60)))
    assert (await wait_for_idle(shared))["free_rows"] == 8
    assert (await shared.snapshot.remote()).finished["abort"] == before + 60
    await check_counts(shared)


class BrokenSink:
    """Fails whenever it is written to, after it has told so."""

    def __init__(self, settings: Settings) -> None:
        self._file = Path(settings.model_name)

    def write(self, snapshot: Snapshot) -> None:
        """Tell what was counted, and fail."""
        self._file.write_text(str(snapshot.stats.emitted_tokens))
        raise OSError("no agent")


class ErrorSink(BrokenSink):
    """Tells how many answers ended by an error."""

    def write(self, snapshot: Snapshot) -> None:
        """Tell it."""
        self._file.write_text(str(snapshot.stats.finished["error"]))


async def test_sinks_get_the_counts_while_it_serves_and_cannot_break_it(
    folders: Folders, tmp_path: Path
) -> None:
    settings = make_settings(folders.target).model_copy(
        update={"model_name": str(tmp_path / "told")}
    )
    async with serving(settings, make_sinks=lambda s: [BrokenSink(s)]) as coordinator:
        for _ in range(2):
            (answer,) = await collect(coordinator, requests()[0])
            emitted = str((await coordinator.snapshot.remote()).emitted_tokens)
            await wait_for(
                lambda: (tmp_path / "told").exists() and (tmp_path / "told").read_text() == emitted,  # noqa: B023  # awaited here
                "the sink to hear of it",
            )
        assert int(emitted) == 2 * len(answer.ids)
        await collect(coordinator, requests()[0])
        await coordinator.shutdown.remote()
        assert int((tmp_path / "told").read_text()) == 3 * len(answer.ids), "the last second, too"


async def test_what_ends_the_coordinator_is_counted_and_still_told(
    folders: Folders, tmp_path: Path
) -> None:
    class OnceOnly(TargetWorker):
        """A target that dies in its first pass, and cannot be loaded again."""

        @ray.method(concurrency_group="compute")
        async def load(self) -> LoadReport:
            (tmp_path / "loaded").touch(exist_ok=False)
            return await super().load()

        @ray.method(concurrency_group="compute")
        async def verify(self, rows: Rows) -> Outcomes | None:
            os._exit(1)

    settings = make_settings(folders.target).model_copy(
        update={"model_name": str(tmp_path / "told")}
    )
    async with serving(
        settings, target_class=OnceOnly, make_sinks=lambda s: [ErrorSink(s)]
    ) as coordinator:
        with pytest.raises(UnavailableError, match="the target cannot be rebuilt"):
            await collect(coordinator, GenerateRequest("0", [[5], [6]], max_tokens=9))
        with pytest.raises(UnavailableError):
            await coordinator.check_health.remote()
        snapshot: Snapshot = await coordinator.measure.remote()
        assert snapshot.stats.finished == {"error": 2}
        assert (snapshot.stats.rebuilds, snapshot.levels.is_ready) == (1, False)
        await wait_for(
            lambda: (tmp_path / "told").exists() and (tmp_path / "told").read_text() == "2",
            "the sink to hear of it",
        )


async def test_a_full_queue_refuses_before_the_first_token_and_loses_nothing(
    folders: Folders,
) -> None:
    settings = make_settings(folders.target, target_changes={"max_num_seqs": 1, "max_queued": 2})
    async with serving(settings) as coordinator:
        long = GenerateRequest("0", [[5]], n=3, temperature=1.0, max_tokens=60, ignore_eos=True)
        running = asyncio.create_task(collect(coordinator, long))

        async def is_full() -> bool:
            return bool((await coordinator.usage.remote())["waiting"] == 2)

        await wait_for(is_full, "a full queue")
        with pytest.raises(OverloadedError, match="max_queued"):
            await collect(coordinator, GenerateRequest("1", [[5]], max_tokens=1))
        assert [len(answer.ids) for answer in await running] == [60, 60, 60]
        with pytest.raises(RequestError, match="4 answers at once"):
            await collect(coordinator, GenerateRequest("2", [[5]], n=4))


async def test_prompts_that_cannot_be_served_are_refused_with_both_numbers(shared: Any) -> None:
    with pytest.raises(RequestError, match=r"128 tokens.*has 128"):
        await collect(shared, GenerateRequest("0", [[5] * 128]))
    with pytest.raises(RequestError, match="below 151"):
        await collect(shared, GenerateRequest("1", [[155]]))
    request = GenerateRequest("2", [[5] * 120], temperature=0, ignore_eos=True)
    (answer,) = await collect(shared, request)
    assert len(answer.ids) == 8
    assert answer.last is not None and answer.last.finish_reason == "length"


async def test_a_draft_that_cannot_be_translated_is_refused_at_start(folders: Folders) -> None:
    others = set(worker_pids("TargetWorker"))
    settings = make_settings(folders.target, neural("other", folders.foreign, vocabulary="string"))
    with pytest.raises(ConfigError, match="draft other: vocabulary: string cannot serve the pair"):
        async with serving(settings):
            pass
    await wait_for(lambda: set(worker_pids("TargetWorker")) == others, "no target of its own left")


async def test_a_model_that_cannot_be_loaded_ends_in_one_sentence(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        async with serving(make_settings(str(tmp_path / "nowhere"))):
            pass


async def test_the_ratio_rule_accepts_everything_of_a_draft_that_is_the_target(
    folders: Folders,
) -> None:
    settings = make_settings(
        folders.target,
        neural("self", folders.target),
        decoding={"verification": "ratio", "draft_top_k": 16},
    )
    others = set(worker_pids("DraftWorker") + worker_pids("TargetWorker"))
    async with serving(settings) as coordinator:
        asked = [
            GenerateRequest(
                str(i), [[3 + i, 9]], temperature=1.0, top_k=16, max_tokens=40, ignore_eos=True
            )
            for i in range(12)
        ]
        answers = await asyncio.gather(*(collect(coordinator, r) for r in asked))
        assert len({tuple(a.ids) for (a,) in answers}) == 12
        counts = (await coordinator.snapshot.remote()).drafts["self"].counts
        assert counts.num_accepted_tokens == counts.num_draft_tokens > 200
        own = set(worker_pids("DraftWorker") + worker_pids("TargetWorker")) - others
        assert len(own) == 2
    await wait_for(
        lambda: not own & set(worker_pids("DraftWorker") + worker_pids("TargetWorker")),
        "the coordinator's workers to end with it",
    )


async def test_two_ranks_give_the_ids_of_one_even_when_one_is_lost(
    folders: Folders, plain: list[list[list[int]]]
) -> None:
    settings = make_settings(
        folders.target,
        neural("self", folders.target, 6),
        target_changes={"tensor_parallel_size": 2},
        timeouts={"round_s": 20},
    )
    async with serving(settings) as coordinator:
        pids = worker_pids("TargetWorker")
        asked = requests()
        assert await serve_all(coordinator, asked) == plain
        counts = (await coordinator.snapshot.remote()).drafts["self"].counts
        assert counts.num_accepted_tokens == counts.num_draft_tokens > 0
        running = asyncio.create_task(serve_all(coordinator, asked))

        async def is_busy() -> bool:
            return bool((await coordinator.usage.remote())["running"] > 0)

        await wait_for(is_busy, "running sequences")
        send(signal.SIGKILL, [pid for pid in worker_pids("TargetWorker") if pid in pids][:1])
        assert await running == plain, "one rank lost: the group is rebuilt"


async def test_choice_0_of_many_is_the_answer_of_one_and_seeds_come_back(shared: Any) -> None:
    one = GenerateRequest("0", [[5, 6]], seed=11, max_tokens=20)
    many = GenerateRequest("1", [[7], [5, 6]], n=3, seed=11, max_tokens=20)
    (alone,) = await collect(shared, one)
    answers = await collect(shared, many)
    assert answers[3].ids == alone.ids
    assert len({tuple(a.ids) for a in answers}) == 6
    unseeded = await collect(shared, GenerateRequest("2", [[5, 6], [5, 6]], max_tokens=20))
    assert unseeded[0].ids != unseeded[1].ids
    last = unseeded[1].last
    assert last is not None
    (again,) = await collect(shared, GenerateRequest("3", [[5, 6]], seed=last.seed, max_tokens=20))
    assert again.ids == unseeded[1].ids

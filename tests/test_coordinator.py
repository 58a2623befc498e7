"""The coordinator on a real Ray with real (tiny) models: same ids whatever runs, nothing left."""

import asyncio
import itertools
import signal
from typing import Any

import pytest
import ray

from outrider.actors.requests import GenerateRequest
from outrider.cluster.errors import (
    ConfigError,
    OverloadedError,
    RequestError,
)

from .conftest import Folders
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
def plain(ray_session: None, folders: Folders) -> list[list[list[int]]]:
    """What plain decoding says, one request at a time."""

    async def run() -> list[list[list[int]]]:
        async with serving(make_settings(folders.target)) as coordinator:
            return ids_of([await collect(coordinator, request) for request in requests()])

    return asyncio.run(run())


@pytest.mark.parametrize("drafts", ["none", "lookup", "self", "noisy", "both"])
async def test_ids_are_those_of_plain_decoding_whatever_drafts_run(
    drafts: str, folders: Folders, plain: list[list[list[int]]]
) -> None:
    specs = {
        "none": [],
        "lookup": [LOOKUP],
        "self": [neural("self", folders.target, 6)],
        "noisy": [neural("noisy", folders.noisy, 3, replicas=2)],
        "both": [LOOKUP, neural("noisy", folders.noisy)],
    }[drafts]
    settings = make_settings(folders.target, *specs, target_changes={"max_num_batched_tokens": 24})
    async with serving(settings) as coordinator:
        assert await serve_all(coordinator, requests()) == plain
        assert await serve_all(coordinator, requests(2)[::-1]) == plain[::-1]
        assert await serve_all(coordinator, requests(0)) == plain
        stats = await coordinator.snapshot.remote()
        counts = {name: draft.counts for name, draft in stats.drafts.items()}
        if drafts == "self":
            assert counts["self"].num_accepted_tokens == counts["self"].num_draft_tokens > 0
        if drafts == "noisy":
            drafted, accepted = (
                counts["noisy"].num_draft_tokens,
                counts["noisy"].num_accepted_tokens,
            )
            assert 0.2 * drafted < accepted < 0.9 * drafted
        usage = await wait_for_idle(coordinator)
        assert usage["free_rows"] == 8


async def wait_for_idle(coordinator: Any) -> dict[str, int]:
    async def idle() -> dict[str, int] | None:
        usage: dict[str, int] = await coordinator.usage.remote()
        held = {name: count for name, count in usage.items() if name != "free_rows"}
        return None if any(held.values()) else usage

    result: dict[str, int] = await wait_for(idle, "an idle coordinator")
    return result


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_go_on_with_the_same_ids_when_the_draft_dies_or_hangs(
    fault: signal.Signals, folders: Folders, plain: list[list[list[int]]]
) -> None:
    settings = make_settings(
        folders.target, neural("noisy", folders.noisy), timeouts={"draft_s": 3}
    )
    async with serving(settings) as coordinator:
        pids = worker_pids("DraftWorker")
        assert len(pids) == 1
        running = asyncio.create_task(serve_all(coordinator, requests()))

        async def has_drafted() -> bool:
            stats = await coordinator.snapshot.remote()
            return bool(stats.drafts["noisy"].counts.num_drafts >= 3)

        await wait_for(has_drafted, "a few proposals")
        send(fault, pids)
        assert await running == plain

        async def is_replaced() -> bool:
            stats = await coordinator.snapshot.remote()
            return bool(stats.drafts["noisy"].deaths == 1 and worker_pids("DraftWorker") != pids)

        # Work makes the loss of a stopped draft known; then a new one takes its place.
        for _ in range(3):
            assert await serve_all(coordinator, requests()) == plain
        await wait_for(is_replaced, "another draft")

        async def drafts_again() -> bool:
            before = (await coordinator.snapshot.remote()).drafts["noisy"].counts.num_drafts
            await serve_all(coordinator, requests()[:2])
            after = (await coordinator.snapshot.remote()).drafts["noisy"].counts.num_drafts
            return bool(after > before)

        await wait_for(drafts_again, "proposals of the new draft")


async def test_streams_go_on_with_the_same_ids_when_the_target_dies(
    folders: Folders, plain: list[list[list[int]]]
) -> None:
    settings = make_settings(folders.target, neural("noisy", folders.noisy), LOOKUP)
    async with serving(settings) as coordinator:
        running = asyncio.create_task(serve_all(coordinator, requests()))

        async def has_emitted() -> bool:
            return bool((await coordinator.snapshot.remote()).emitted_tokens > 30)

        await wait_for(has_emitted, "some tokens")
        send(signal.SIGKILL, worker_pids("TargetWorker"))
        assert await running == plain
        await coordinator.check_health.remote()


async def test_streams_given_up_leave_no_sequence_row_or_copy(folders: Folders) -> None:
    settings = make_settings(folders.target, neural("noisy", folders.noisy), LOOKUP)
    async with serving(settings) as coordinator:

        async def leave_early(number: int) -> None:
            request = GenerateRequest(
                str(number),
                [[3 + number % 100, 5, 7]],
                temperature=1.0,
                max_tokens=120,
                ignore_eos=True,
            )
            async for _ in stream(coordinator, request):
                break

        await asyncio.gather(*(leave_early(number) for number in range(60)))
        usage = await wait_for_idle(coordinator)
        assert usage["free_rows"] == 8
        stats = await coordinator.snapshot.remote()
        assert stats.finished["abort"] == 60


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


async def test_prompts_that_cannot_be_served_are_refused_with_both_numbers(
    folders: Folders,
) -> None:
    async with serving(make_settings(folders.target)) as coordinator:
        with pytest.raises(RequestError, match=r"128 tokens.*has 128"):
            await collect(coordinator, GenerateRequest("0", [[5] * 128]))
        with pytest.raises(RequestError, match="below 151"):
            await collect(coordinator, GenerateRequest("1", [[155]]))
        (answer,) = await collect(
            coordinator, GenerateRequest("2", [[5] * 120], temperature=0, ignore_eos=True)
        )
        assert len(answer.ids) == 8
        assert answer.last is not None and answer.last.finish_reason == "length"


async def test_a_draft_of_another_vocabulary_is_refused_at_start(folders: Folders) -> None:
    settings = make_settings(folders.target, neural("other", folders.foreign))
    with pytest.raises(ConfigError, match="draft other: the vocabularies differ in 11 of 151 ids"):
        async with serving(settings):
            pass
    await wait_for(lambda: not worker_pids("TargetWorker"), "no target left")


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


async def test_two_ranks_give_the_ids_of_one(
    folders: Folders, plain: list[list[list[int]]]
) -> None:
    settings = make_settings(
        folders.target,
        LOOKUP,
        target_changes={"tensor_parallel_size": 2},
        timeouts={"round_s": 20},
    )
    async with serving(settings) as coordinator:
        asked = requests()
        assert await serve_all(coordinator, asked) == plain
        running = asyncio.create_task(serve_all(coordinator, asked))

        async def has_more() -> bool:
            return bool((await coordinator.usage.remote())["running"] > 0)

        await wait_for(has_more, "running sequences")
        send(signal.SIGKILL, worker_pids("TargetWorker")[:1])
        assert await running == plain, "one rank lost: the group is rebuilt"


async def test_choice_0_of_many_is_the_answer_of_one_and_seeds_come_back(
    folders: Folders,
) -> None:
    async with serving(make_settings(folders.target, LOOKUP)) as coordinator:
        one = GenerateRequest("0", [[5, 6]], temperature=1.0, seed=11, max_tokens=20)
        many = GenerateRequest("1", [[7], [5, 6]], n=3, temperature=1.0, seed=11, max_tokens=20)
        (alone,) = await collect(coordinator, one)
        answers = await collect(coordinator, many)
        assert answers[3].ids == alone.ids
        assert len({tuple(a.ids) for a in answers}) == 6
        unseeded = await collect(
            coordinator, GenerateRequest("2", [[5, 6], [5, 6]], temperature=1.0, max_tokens=20)
        )
        assert unseeded[0].ids != unseeded[1].ids
        last = unseeded[1].last
        assert last is not None
        (again,) = await collect(
            coordinator,
            GenerateRequest("3", [[5, 6]], temperature=1.0, seed=last.seed, max_tokens=20),
        )
        assert again.ids == unseeded[1].ids


async def test_a_coordinator_that_ends_takes_its_workers_with_it(folders: Folders) -> None:
    async with serving(make_settings(folders.target, neural("noisy", folders.noisy))):
        assert worker_pids("DraftWorker") and worker_pids("TargetWorker")
    await wait_for(
        lambda: not worker_pids("DraftWorker") and not worker_pids("TargetWorker"), "no worker"
    )
    assert ray.is_initialized()

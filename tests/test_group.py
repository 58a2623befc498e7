"""A target group starts, answers and dies as one, and says in a sentence why."""

from typing import Any

import pytest
from ray.exceptions import RayTaskError

from outrider.cluster.errors import ConfigError, WorkerLostError
from outrider.cluster.group import TargetGroup
from outrider.cluster.remote import make_actor

from .serving import wait_for, worker_pids
from .workers import OPTIONS, ScriptedWorker

pytestmark = pytest.mark.usefixtures("ray_session")


def make_group(
    *loads: str, call_timeout_s: float = 30, load_timeout_s: float = 60, **options: Any
) -> TargetGroup:
    return TargetGroup(
        lambda rank: make_actor(ScriptedWorker, {**OPTIONS, **options}, loads[rank]),
        1,  # ranks that need no rendezvous
        load_timeout_s=load_timeout_s,
        call_timeout_s=call_timeout_s,
    )


async def nothing_is_left() -> None:
    await wait_for(lambda: not worker_pids("ScriptedWorker"), "no worker")


@pytest.mark.parametrize(
    ("load", "error", "sentence"),
    [
        ("config", ConfigError, "^the folder is empty: fill it$"),
        ("import", WorkerLostError, "failed to start: ImportError: no module named gptq$"),
        ("timeout", WorkerLostError, "failed to start: TimeoutError: the hub did not answer$"),
        ("die", WorkerLostError, "the target failed to start: "),
    ],
)
async def test_what_goes_wrong_at_the_start_is_one_sentence(
    load: str, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        await make_group(load).start()
    await nothing_is_left()


async def test_a_rank_that_no_node_can_hold_ends_within_the_limit() -> None:
    group = make_group("fine", load_timeout_s=2, label_selector={"pool": "nowhere"})
    with pytest.raises(ConfigError, match="not placed and loaded within 2 s"):
        await group.start()


async def test_a_call_tells_a_lost_rank_from_an_error_of_the_method() -> None:
    group = make_group("fine", call_timeout_s=2)
    assert await group.start() == "done"
    assert await group.call("work", "fine") == "done"
    with pytest.raises(RayTaskError, match="gptq"):
        await group.call("work", "import")
    with pytest.raises(RayTaskError, match="the hub did not answer"):
        await group.call("work", "timeout")
    with pytest.raises(WorkerLostError, match="did not answer work within 2 s"):
        await group.call("work", "hang")
    assert await group.call("ping"), "a stuck pass does not block control calls"
    group.kill()
    await nothing_is_left()


async def test_a_rank_that_dies_in_a_call_is_lost_and_can_be_started_again() -> None:
    group = make_group("fine")
    await group.start()
    with pytest.raises(WorkerLostError, match="a target rank is lost"):
        await group.call("work", "die")
    group.kill()
    assert await group.start() == "done"
    assert await group.call("work", "fine") == "done"
    group.kill()
    await nothing_is_left()

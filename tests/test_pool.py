"""Members of a draft pool leave when they are lost, once, and come back by themselves."""

import asyncio
from typing import Any

import pytest

from outrider.cluster.errors import ConfigError, WorkerLostError
from outrider.cluster.pool import DraftPool
from outrider.cluster.remote import make_actor

from .serving import wait_for, worker_pids
from .workers import OPTIONS, ScriptedWorker

pytestmark = pytest.mark.usefixtures("ray_session")


class Watched:
    """A pool of one member, and how often it was lost."""

    def __init__(self, load: str = "fine", silence_s: float = 30, **options: Any) -> None:
        self.losses = 0
        self.deaths = 0
        self.pool = DraftPool(
            "draft small",
            lambda index: make_actor(ScriptedWorker, {**OPTIONS, **options}, load),
            1,
            load_timeout_s=60,
            silence_s=silence_s,
            on_lost=self._count_loss,
            on_dead=self._count_death,
        )
        self.member = self.pool.members[0]

    def _count_loss(self, index: int) -> None:
        self.losses += 1

    def _count_death(self, index: int) -> None:
        self.deaths += 1

    async def end(self) -> None:
        self.pool.kill()
        await wait_for(lambda: not worker_pids("ScriptedWorker"), "no worker")


@pytest.mark.parametrize("how", ["die", "import", "timeout", "hang"])
async def test_calls_in_flight_lose_a_member_once_and_it_is_replaced(how: str) -> None:
    watched = Watched(silence_s=3)
    assert await watched.pool.start() == ["done"]
    before = await watched.member.call("ping")
    calls = [watched.member.call("work", how) for _ in range(3)]
    results = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(result, WorkerLostError) for result in results), results
    await wait_for(lambda: watched.member.is_living, "another life")
    assert watched.losses == watched.deaths == 1
    assert await watched.member.call("ping") != before
    assert await watched.member.call("work", "fine") == "done"
    await watched.end()


async def test_a_question_that_fails_loses_nobody() -> None:
    watched = Watched()
    await watched.pool.start()
    with pytest.raises(WorkerLostError, match="gptq"):
        await watched.member.ask("work", "import")
    assert watched.member.is_living and watched.losses == watched.deaths == 0
    await watched.end()


async def test_what_goes_wrong_at_the_start_is_one_sentence() -> None:
    watched = Watched("config")
    with pytest.raises(ConfigError, match=r"^the folder is empty: fill it$"):
        await watched.pool.start()
    await watched.end()
    watched = Watched("timeout")
    with pytest.raises(WorkerLostError, match="draft small failed to start: TimeoutError: the hub"):
        await watched.pool.start()
    await watched.end()

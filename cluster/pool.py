"""Interchangeable draft actors: called with a limit, quarantined when lost, probed, replaced.

A member that stops answering leaves the pool at once and comes back by itself, after a ping when
it was only out of reach, as a new actor otherwise; requests never wait for that. Each return is a
new life: its copies of sequences are gone. Knows no torch and no tokens.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError

from outrider.cluster.config import DraftModelSpec
from outrider.cluster.errors import ConfigError, OutriderError, WorkerLostError
from outrider.cluster.remote import to_outrider_error

logger = logging.getLogger(__name__)

_PING_S = 2.0
_PINGS = 3
_LONGEST_PAUSE_S = 60.0


def draft_options(spec: DraftModelSpec) -> dict[str, Any]:
    """Ray options of one draft actor: placed by its labels, outside any placement group."""
    return {
        "num_cpus": spec.num_cpus,
        "num_gpus": spec.num_gpus,
        "max_restarts": 0,
        "concurrency_groups": {"compute": 1, "control": 4},
        "label_selector": spec.labels,
        "scheduling_strategy": "DEFAULT",
    }


class PoolMember:
    """One place in the pool; the actor behind it may change."""

    def __init__(self, pool: "DraftPool", index: int) -> None:
        self._pool = pool
        self._handle: ActorHandle[Any] | None = None
        self._recovery: asyncio.Task[None] | None = None
        self._life = 0
        self.index = index
        self.is_living = False

    async def start(self) -> Any:
        """Make the actor and load it; returns its report."""
        self._handle = self._pool.make(self.index)
        load: Any = self._handle.load.remote(*self._pool.load_args)
        report: Any = await asyncio.wait_for(load, self._pool.load_timeout_s)
        self.is_living = True
        return report

    async def call(self, method: str, *args: Any) -> Any:
        """Call `method`; any failure or a silence of `silence_s` loses the member."""
        life = self._life
        try:
            return await self.ask(method, *args)
        except WorkerLostError as error:
            if life == self._life:  # else it was lost to this life, and is back already
                self._lose(error)
            raise

    async def ask(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        """Call `method`; a failure says nothing about the member. None = at most `silence_s`."""
        name = f"{self._pool.name} {self.index}"
        limit_s = timeout_s or self._pool.silence_s
        if self._handle is None or not self.is_living:
            raise WorkerLostError(f"{name} is not living")
        try:
            async with asyncio.timeout(limit_s):
                return await getattr(self._handle, method).remote(*args)
        except RayError as error:  # before TimeoutError: a method's own comes as both
            raise WorkerLostError(str(to_outrider_error(error, f"{name} is lost"))) from error
        except TimeoutError as error:
            raise WorkerLostError(f"{name} was silent for {limit_s:g} s") from error

    def kill(self) -> None:
        """End the actor and its recovery."""
        self.is_living = False
        if self._recovery is not None:
            self._recovery.cancel()
        if self._handle is not None:
            ray.kill(self._handle)
            self._handle = None

    def _lose(self, error: WorkerLostError) -> None:
        logger.warning("%s", error)
        self._life += 1
        self.is_living = False
        self._pool.on_lost(self.index)
        self._recovery = asyncio.create_task(self._recover(error.__cause__))

    async def _recover(self, cause: BaseException | None) -> None:
        if isinstance(cause, ActorUnavailableError) and await self._is_back():
            self.is_living = True
            logger.info("%s %d is back", self._pool.name, self.index)
            return
        self._pool.on_dead(self.index)
        pause_s = 1.0
        while True:
            if self._handle is not None:
                ray.kill(self._handle)
                self._handle = None
            try:
                await self.start()
                logger.info("%s %d is replaced", self._pool.name, self.index)
                return
            except (TimeoutError, RayError, OutriderError) as failure:
                logger.warning(
                    "%s %d: no replacement yet (%r)", self._pool.name, self.index, failure
                )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _is_back(self) -> bool:
        assert self._handle is not None, "only a member with an actor is probed"
        for _ in range(_PINGS):
            try:
                async with asyncio.timeout(_PING_S):
                    await self._handle.reset.remote()
                return True
            except (TimeoutError, ActorUnavailableError):
                await asyncio.sleep(_PING_S)
            except RayError:
                return False
        return False


class DraftPool:
    """The members that serve one draft; classes have `load` and `reset`, made by `make(index)`."""

    def __init__(
        self,
        name: str,
        make: Callable[[int], ActorHandle[Any]],
        size: int,
        *,
        load_timeout_s: float,
        silence_s: float,
        on_lost: Callable[[int], None],
        on_dead: Callable[[int], None],
    ) -> None:
        self.name = name
        self.make = make
        self.load_timeout_s = load_timeout_s
        self.silence_s = silence_s
        self.on_lost = on_lost  # told the index of a member that left the pool
        self.on_dead = on_dead  # told it again if its actor is given up, and another made
        self.load_args: tuple[Any, ...] = ()  # for `load` of members that are made from now on
        self.members = [PoolMember(self, index) for index in range(size)]

    async def start(self) -> list[Any]:
        """Load every member; returns their reports. On any error nothing is left."""
        try:
            return await asyncio.gather(*(member.start() for member in self.members))
        except RayError as error:  # before TimeoutError: a method's own comes as both
            self.kill()
            raise to_outrider_error(error, f"{self.name} failed to start") from None
        except TimeoutError:
            self.kill()
            raise ConfigError(
                f"{self.name}: {len(self.members)} actor(s) were not placed and loaded within "
                f"{self.load_timeout_s:g} s: check what they ask for (num_cpus, num_gpus, labels) "
                "or raise timeouts.load_s"
            ) from None
        except BaseException:
            self.kill()
            raise

    def kill(self) -> None:
        """End every member now."""
        for member in self.members:
            member.kill()

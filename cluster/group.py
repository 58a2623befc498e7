"""The target's ranks as one unit: created, joined, loaded, called and killed together.

Every rank gets every call, in the same order; rank 0's answer counts. The loss of one rank is the
loss of the group, since the others wait for it inside a collective. Knows no torch and no tokens.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outrider.cluster.config import TargetSpec
from outrider.cluster.errors import ConfigError, WorkerLostError
from outrider.cluster.placement import bundle_order
from outrider.cluster.remote import to_outrider_error

_JOIN_ATTEMPTS = 3  # a rendezvous port is chosen, then bound: another process may be quicker


def rank_options(spec: TargetSpec, rank: int) -> dict[str, Any]:
    """Ray options of one target rank.

    Inside a placement group (a Serve replica has its own) each rank takes its bundle, ranks
    contiguous by node; else Ray places it by its labels.
    """
    options: dict[str, Any] = {
        "num_cpus": spec.num_cpus,
        "num_gpus": spec.num_gpus,
        "max_restarts": 0,
        "concurrency_groups": {"compute": 1, "control": 4},
    }
    group = ray.util.get_current_placement_group()
    if group is None or group.bundle_count < spec.tensor_parallel_size:
        return {**options, "label_selector": spec.labels}
    nodes = ray.util.placement_group_table(group)["bundles_to_node_id"]
    bundle = bundle_order(nodes)[rank]
    return {**options, "scheduling_strategy": PlacementGroupSchedulingStrategy(group, bundle)}


class TargetGroup:
    """N rank actors made by `make(rank)`; their classes have `address`, `join` and `load`."""

    def __init__(
        self,
        make: Callable[[int], ActorHandle[Any]],
        size: int,
        *,
        load_timeout_s: float,
        call_timeout_s: float,
    ) -> None:
        self._make = make
        self._size = size
        self._load_timeout_s = load_timeout_s
        self._call_timeout_s = call_timeout_s
        self._ranks: list[ActorHandle[Any]] = []

    async def start(self) -> Any:
        """Create and load every rank; returns rank 0's report. On any error nothing is left."""
        try:
            async with asyncio.timeout(self._load_timeout_s):
                for attempt in range(1, _JOIN_ATTEMPTS + 1):
                    self._ranks = [self._make(rank) for rank in range(self._size)]
                    try:
                        await self._join()
                        break
                    except RayTaskError:
                        self.kill()
                        if attempt == _JOIN_ATTEMPTS:
                            raise
                reports: list[Any] = await asyncio.gather(
                    *(rank.load.remote() for rank in self._ranks)
                )
                return reports[0]
        except RayError as error:  # before TimeoutError: a method's own comes as both
            self.kill()
            raise to_outrider_error(error, "the target failed to start") from None
        except TimeoutError:
            self.kill()
            raise ConfigError(
                f"the target's {self._size} rank(s) were not placed and loaded within "
                f"{self._load_timeout_s:g} s: check what they ask for (num_cpus, num_gpus, "
                "labels) or raise timeouts.load_s"
            ) from None
        except BaseException:
            self.kill()
            raise

    async def call(self, method: str, *args: Any) -> Any:
        """Call `method` of every rank; rank 0's answer, or WorkerLostError if any rank is lost.

        An exception raised by the method itself comes through as it is, as a RayTaskError.
        """
        calls = [getattr(rank, method).remote(*args) for rank in self._ranks]
        try:
            async with asyncio.timeout(self._call_timeout_s):
                # The first error ends the wait: the other ranks may never answer.
                return (await asyncio.gather(*calls))[0]
        except RayTaskError:
            raise
        except RayError as error:
            raise to_outrider_error(error, "a target rank is lost") from None
        except TimeoutError:
            raise WorkerLostError(
                f"the target did not answer {method} within {self._call_timeout_s:g} s"
            ) from None

    def kill(self) -> None:
        """End every rank now."""
        ranks, self._ranks = self._ranks, []
        for rank in ranks:
            ray.kill(rank)

    async def _join(self) -> None:
        if self._size == 1:
            return
        address = await self._ranks[0].address.remote()
        await asyncio.gather(*(rank.join.remote(address) for rank in self._ranks))

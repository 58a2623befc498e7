"""Actors without a model, for tests of groups and pools: they do as their script says."""

import asyncio
import os
import time

import ray

from outrider.cluster.errors import ConfigError


class ScriptedWorker:
    """`load` and `work` behave as told: "fine", "config", "import", "timeout", "die", "hang"."""

    def __init__(self, load: str = "fine") -> None:
        self._load = load

    @ray.method(concurrency_group="compute")
    async def load(self) -> str:
        return self._do(self._load)

    @ray.method(concurrency_group="compute")
    async def work(self, how: str) -> str:
        return self._do(how)

    @ray.method(concurrency_group="compute")
    async def reset(self) -> None:
        await asyncio.sleep(0)

    @ray.method(concurrency_group="control")
    async def ping(self) -> int:
        return os.getpid()

    def _do(self, how: str) -> str:
        if how == "config":
            raise ConfigError("the folder is empty: fill it")
        if how == "import":
            raise ImportError("no module named gptq")
        if how == "timeout":
            raise TimeoutError("the hub did not answer")
        if how == "die":
            os._exit(1)
        if how == "hang":
            time.sleep(60)  # blocks the compute group, as a stuck forward would
        return "done"


OPTIONS = {"num_cpus": 0, "max_restarts": 0, "concurrency_groups": {"compute": 1, "control": 2}}

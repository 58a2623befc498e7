"""One rank of the target: runs packed rows and decides what of each block is kept.

A thin shell around `Verifier`; rows and positions come from the coordinator. Every rank runs every
pass; only rank 0 decides.
"""

import os
import socket
import time
from dataclasses import replace
from datetime import timedelta

import ray
import torch
import torch.distributed as dist

from outrider.actors.decide import Verifier
from outrider.actors.messages import LoadReport, Outcomes, Rows
from outrider.actors.model import Model
from outrider.cluster.config import TargetSpec
from outrider.cluster.logs import log_to_terminal, reporter


class TargetWorker:
    """A target rank; `compute` methods run one at a time, `control` ones beside them."""

    def __init__(self, spec: TargetSpec, rank: int, collective_timeout_s: float) -> None:
        log_to_terminal()
        self._spec = spec
        self._rank = rank
        self._collective_timeout_s = collective_timeout_s
        self._verifier: Verifier | None = None

    @ray.method(concurrency_group="control")
    async def address(self) -> str:
        """Where rank 0 will listen for the others."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{host}:{probe.getsockname()[1]}"

    @ray.method(concurrency_group="compute")
    async def join(self, address: str) -> None:
        """Join the group's own torch.distributed world; all ranks call this together."""
        os.environ["LOCAL_RANK"] = "0"  # Ray shows each actor exactly one GPU
        dist.init_process_group(
            "nccl" if self._spec.num_gpus else "gloo",
            init_method=address,
            rank=self._rank,
            world_size=self._spec.tensor_parallel_size,
            timeout=timedelta(seconds=self._collective_timeout_s),
        )

    @ray.method(concurrency_group="compute")
    async def load(self) -> LoadReport:
        """Resolve, load and check the model; ConfigError says what cannot work."""
        torch.set_num_threads(self._spec.threads)
        spec = self._spec
        model = Model.load(
            spec,
            rows=spec.max_num_seqs,
            tp_size=spec.tensor_parallel_size,
            report=reporter(f"target rank {self._rank}"),
        )
        self._verifier = Verifier(model)
        return model.describe()

    @ray.method(concurrency_group="compute")
    async def verify(self, rows: Rows) -> Outcomes | None:
        """Run one pass over `rows` and decide every block; None on ranks other than 0."""
        assert self._verifier is not None, "load comes first"
        begin = time.perf_counter()
        if self._rank != 0:
            self._verifier.forward(rows)
            return None
        outcomes = self._verifier.decide(rows)
        return replace(outcomes, seconds=time.perf_counter() - begin)

    @ray.method(concurrency_group="control")
    async def ping(self) -> None:
        """Answer, even while a pass runs."""

"""`outrider bench loop`: what the orchestration costs, with simulated workers.

The real coordinator, as a Ray actor, serves simulated workers that answer after times from a
latency table and accept with a given probability. Measured tokens/s stand over the closed form
B E / (t_v(B (g + 1)) + g t_d(B)) with E = (1 - a^(g+1)) / (1 - a) (Leviathan et al. 2023, eq. 1),
for B sequences, g drafted tokens and acceptance a: 1 would mean that rounds cost nothing beside
the workers. It also holds the luck of the coins, the prefill and the end of a batch; the overhead
is the plain measure: the round's time less what the workers themselves measured.
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ray
from rich.console import Console
from rich.table import Table

from outrider.actors.coordinator import Coordinator
from outrider.actors.requests import Delta, GenerateRequest
from outrider.actors.stats import Stats
from outrider.cluster.config import DraftModelSpec, MetricsSpec, Settings, TargetSpec
from outrider.cluster.remote import make_actor
from outrider.deploy._simulated import Latency, Simulation, worker_classes
from outrider.deploy.ray_metrics import make_sinks

# Llama-3-70B on four A100 (GEMM and norm time by tokens, from Vidur's published profiles).
_TARGET_MS = "1:24.9,8:25.8,32:26.2,64:26.9,96:31.8,128:33.5,192:45.2,256:51.0,512:89.9"
_DRAFT_MS = "1:4.5,128:4.5"  # a 0.5B model on an L4 is bandwidth-bound up to ~128 rows
_PROMPT = [1, 2, 3]


@dataclass(frozen=True)
class Measurement:
    """One run: `sequences` answers at once."""

    sequences: int
    streams: int  # requests they came in
    rounds: int
    tokens: int
    seconds: float
    worker_seconds: float  # what target and draft measured themselves
    closed_form: float  # tokens/s

    @property
    def tokens_per_s(self) -> float:
        """Measured tokens/s."""
        return self.tokens / self.seconds

    @property
    def overhead_ms(self) -> float:
        """Milliseconds of a round beside the workers' own time."""
        return 1e3 * (self.seconds - self.worker_seconds) / self.rounds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--sequences", type=_counts, default="1,8,32", help="batch sizes")
    parser.add_argument("--tokens", type=_count, default=400, help="tokens per sequence")
    parser.add_argument("--num-speculative-tokens", type=_count, default=4, metavar="N")
    parser.add_argument("--acceptance", type=_share, default=0.8, help="per drafted token, 0 to 1")
    parser.add_argument(
        "--target-ms", type=_latency, default=_TARGET_MS, help="TOKENS:MS,... of one pass"
    )
    parser.add_argument(
        "--draft-ms", type=_latency, default=_DRAFT_MS, help="ROWS:MS,... of one drafted token"
    )
    parser.add_argument(
        "--streams", action="store_true", help="one request per sequence instead of one for all"
    )
    parser.add_argument(
        "--metrics",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="hand the counts to Ray's metrics, as a server does",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")


def run(options: argparse.Namespace) -> int:
    """Measure every batch size and print the table."""
    simulation = Simulation(options.target_ms, options.draft_ms, options.acceptance)
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # nobody else reaches this private Ray
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        results = [asyncio.run(_measure(simulation, n, options)) for n in options.sequences]
    finally:
        ray.shutdown()
    _print(results, options)
    if options.json:
        rows = [
            {**asdict(r), "tokens_per_s": r.tokens_per_s, "overhead_ms": r.overhead_ms}
            for r in results
        ]
        options.json.write_text(json.dumps({"simulated": True, "results": rows}, indent=1) + "\n")
    return 0


async def _measure(
    simulation: Simulation, sequences: int, options: argparse.Namespace
) -> Measurement:
    gamma = options.num_speculative_tokens
    target_class, draft_class = worker_classes(simulation)
    coordinator = make_actor(
        Coordinator,
        {"num_cpus": 0},
        _settings(sequences, gamma, options.metrics),
        target_class=target_class,
        draft_class=draft_class,
        make_decode=_no_text,
        make_sinks=make_sinks,
    )
    await coordinator.start.remote()
    await _serve(coordinator, sequences, 4 * (gamma + 1), options.streams)  # warm-up
    before: Stats = await coordinator.snapshot.remote()
    begin = time.perf_counter()
    await _serve(coordinator, sequences, options.tokens, options.streams)
    seconds = time.perf_counter() - begin
    after: Stats = await coordinator.snapshot.remote()
    ray.kill(coordinator)
    return Measurement(
        sequences,
        sequences if options.streams else 1,
        after.num_rounds - before.num_rounds,
        after.emitted_tokens - before.emitted_tokens,
        seconds,
        _worker_seconds(after) - _worker_seconds(before),
        _closed_form(simulation, sequences, gamma),
    )


async def _serve(coordinator: Any, sequences: int, tokens: int, streams: bool) -> None:
    """Have `sequences` answers of `tokens` tokens made at once."""

    async def consume(num_prompts: int) -> None:
        request = GenerateRequest(
            "bench", [_PROMPT] * num_prompts, temperature=0.0, max_tokens=tokens
        )
        stream: AsyncGenerator[Any, None] = coordinator.generate.options(
            num_returns="streaming"
        ).remote(request)
        async for item in stream:
            _: list[Delta] = await item

    shares = [1] * sequences if streams else [sequences]
    await asyncio.gather(*(consume(share) for share in shares))


def _settings(sequences: int, gamma: int, metrics: bool) -> Settings:
    return Settings(
        model_name="simulated",
        target=TargetSpec(model="simulated", num_cpus=0, max_num_seqs=sequences),
        metrics=MetricsSpec(ray=metrics),
        drafts=(
            DraftModelSpec(
                name="simulated",
                method="draft_model",
                model="simulated",
                num_cpus=0,
                num_speculative_tokens=gamma,
            ),
        ),
    )


def _no_text(_: Settings) -> Any:
    return _empty


def _empty(ids: list[int], *, skip_special_tokens: bool) -> str:
    return ""


def _worker_seconds(stats: Stats) -> float:
    return stats.verify_seconds + sum(draft.seconds for draft in stats.drafts.values())


def _closed_form(simulation: Simulation, sequences: int, gamma: int) -> float:
    a = simulation.acceptance
    per_round = gamma + 1.0 if a == 1 else (1 - a ** (gamma + 1)) / (1 - a)
    seconds = simulation.target(sequences * (gamma + 1)) + gamma * simulation.draft(sequences)
    return sequences * per_round / seconds


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def _counts(text: str) -> list[int]:
    return [_count(part) for part in text.split(",")]


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 1")
    return share


def _latency(text: str) -> Latency:
    try:
        points = sorted(
            (_count(n), float(ms) / 1e3) for n, ms in (p.split(":") for p in text.split(","))
        )
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NUMBER:MILLISECONDS,...") from None
    return Latency(tuple(n for n, _ in points), tuple(seconds for _, seconds in points))


def _print(results: list[Measurement], options: argparse.Namespace) -> None:
    table = Table(
        title=f"simulated workers: {options.num_speculative_tokens} drafted tokens, "
        f"acceptance {options.acceptance:g}"
    )
    for column in (
        "sequences",
        "requests",
        "rounds",
        "tokens/s",
        "closed form",
        "ratio",
        "overhead ms/round",
    ):
        table.add_column(column, justify="right")
    for r in results:
        table.add_row(
            str(r.sequences),
            str(r.streams),
            str(r.rounds),
            f"{r.tokens_per_s:.1f}",
            f"{r.closed_form:.1f}",
            f"{r.tokens_per_s / r.closed_form:.3f}",
            f"{r.overhead_ms:.2f}",
        )
    Console().print(table)

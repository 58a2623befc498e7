"""Bench of a server: the same prompts with speculation off and on, at several concurrencies.

Turns alternate (off, on, on, off, ...), so that a machine that grows slower or faster favours
neither side. Requests carry seeds, so the outputs of both sides can be compared: by the coupled
rule they differ only where arithmetic is inexact.
"""

import argparse
import asyncio
import contextlib
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import httpx
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from outrider.cluster.errors import ConfigError, UnavailableError
from outrider.deploy.load import Prompt, Run, drive, http_client, read_prompts
from outrider.deploy.summary import Comparison, Spread, Summary, compare


@dataclass(frozen=True)
class Turn:
    """One pass over the prompts."""

    concurrency: int
    speculation: bool
    run: Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `outrider bench serve`."""
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("file", nargs="?", metavar="FILE", help="start a server from this file")
    server.add_argument("--url", help="drive the server that runs here, e.g. http://host:8000")
    add = parser.add_argument
    add(
        "--prompts",
        required=True,
        type=Path,
        metavar="JSONL",
        help='lines of {"turns": [...]} (the first is asked), {"prompt": ...} or {"messages": ...}',
    )
    add("--category", help="only prompts of this `category`")
    add("--num-prompts", type=_positive, default=8, metavar="N", help="the first N; default: 8")
    add("--concurrency", type=_positives, default=(1, 4, 8), metavar="N,N", help="default: 1,4,8")
    add("--max-tokens", type=_positive, default=96, metavar="N", help="default: 96")
    add("--temperature", type=float, default=0.0, metavar="T", help="default: 0, greedy")
    add("--seed", type=int, default=0, metavar="S", help="prompt i is asked with seed S + i")
    add("--repeats", type=_positive, default=2, metavar="N", help="turns of each side; default: 2")
    add("--warmup", type=_count, default=2, metavar="N", help="unmeasured requests of each side")
    add("--json", type=Path, metavar="FILE", help="write everything, request by request")


def run(options: argparse.Namespace) -> int:
    """Measure and report; 1 when any request failed."""
    prompts = read_prompts(options.prompts, options.category, options.num_prompts)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ConfigError(f"--json {options.json}: there is no such folder")
    console = Console()
    console.print(_slice(options, prompts), highlight=False)

    def show(model: str, turns: list[Turn]) -> None:
        """Print the table of the last concurrency, and keep all that was measured so far."""
        last = turns[-1].concurrency
        console.print(_table(_compare(turns, last)))
        if options.json is not None:
            done = [_compare(turns, c) for c in dict.fromkeys(t.concurrency for t in turns)]
            _write(options, model, turns, done)

    with _server(options) as url:
        turns = asyncio.run(_measure(url, options, prompts, show))
    errors = Counter(a.error for turn in turns for a in turn.run.answers if a.error is not None)
    for error, count in errors.most_common():
        print(f"{count} requests failed: {error}", file=sys.stderr)
    return 1 if errors else 0


def _compare(turns: Sequence[Turn], concurrency: int) -> Comparison:
    mine = [turn for turn in turns if turn.concurrency == concurrency]
    return compare(
        concurrency,
        off=[turn.run for turn in mine if not turn.speculation],
        on=[turn.run for turn in mine if turn.speculation],
    )


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[str]:
    if options.url is not None:
        yield options.url
        return
    from outrider.deploy.launch import serving  # Ray is slow to import

    with serving(options.file, port=0, progress=sys.stderr) as server:
        yield server.url


async def _measure(
    url: str,
    options: argparse.Namespace,
    prompts: Sequence[Prompt],
    show: Callable[[str, list[Turn]], None],
) -> list[Turn]:
    sides = [repeat % 2 == side for repeat in range(options.repeats) for side in (1, 0)]
    warmups = [prompts[i % len(prompts)] for i in range(options.warmup)]
    turns: list[Turn] = []
    num_turns = len(options.concurrency) * len(sides)
    async with http_client(url) as client:
        model = await _model_name(client)
        with _progress() as progress:
            task = progress.add_task("", total=2 * len(warmups) + num_turns * len(prompts))

            async def go(prompts: Sequence[Prompt], concurrency: int, speculation: bool) -> Run:
                side = "on" if speculation else "off"
                progress.update(task, description=f"{concurrency} at a time, speculation {side}")
                bodies = [_body(options, model, i, speculation) for i in range(len(prompts))]
                return await drive(
                    client, prompts, bodies, concurrency, lambda: progress.advance(task)
                )

            for speculation in (False, True):
                warm = await go(warmups, max(options.concurrency), speculation)
                for answer in warm.answers:
                    if answer.error is not None:
                        raise UnavailableError(f"a warm-up request failed: {answer.error}")
            for concurrency in options.concurrency:
                for speculation in sides:
                    run = await go(prompts, concurrency, speculation)
                    turns.append(Turn(concurrency, speculation, run))
                show(model, turns)
    return turns


def _body(
    options: argparse.Namespace, model: str, index: int, speculation: bool
) -> dict[str, object]:
    body: dict[str, object] = {
        "model": model,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed + index,
        "return_token_ids": True,
    }
    return body if speculation else {**body, "num_speculative_tokens": 0}


async def _model_name(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnavailableError(f"no model is served at {client.base_url}: {reason}") from None


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _slice(options: argparse.Namespace, prompts: Sequence[Prompt]) -> str:
    category = f" of category {options.category}" if options.category else ""
    return (
        f"first {len(prompts)} prompts{category} of {options.prompts.name} ({prompts[0].name} to "
        f"{prompts[-1].name}), at most {options.max_tokens} tokens, temperature "
        f"{options.temperature:g}, seed {options.seed}, {options.repeats} turns of each side"
    )


def _table(comparison: Comparison) -> Table:
    off, on = comparison.off, comparison.on
    table = Table(
        title=f"{comparison.concurrency} at a time", title_justify="left", box=box.SIMPLE_HEAD
    )
    table.add_column("speculation")
    for column in ("off", "on", "on / off"):
        table.add_column(column, justify="right")

    def add(name: str, before: float | None, after: float | None, unit: str = ".1f") -> None:
        ratio = after / before if before and after is not None else None
        table.add_row(name, _said(before, unit), _said(after, unit), _said(ratio, ".2f"))

    add("output tokens/s", off.output_tokens_per_s, on.output_tokens_per_s)
    for name, before, after in (
        ("TTFT", off.ttft_ms, on.ttft_ms),
        ("TPOT", off.tpot_ms, on.tpot_ms),
    ):
        for part in Spread.__dataclass_fields__:
            add(f"{name} {part} (ms)", getattr(before, part), getattr(after, part))
    table.add_section()
    positions = " ".join(f"{rate:.3f}" for rate in on.acceptance_by_position)
    table.add_row("acceptance rate", "", _said(on.acceptance_rate, ".3f"), "")
    table.add_row("acceptance length", "", _said(on.acceptance_length, ".2f"), "")
    table.add_row("acceptance by position", "", positions or "-", "")
    table.add_row("drafted tokens", "", str(on.num_draft_tokens), "")
    table.add_section()
    table.add_row("output tokens", str(off.output_tokens), str(on.output_tokens), "")
    table.add_row("failed requests", _of(off), _of(on), "")
    differing = f"{comparison.differing_outputs} of {comparison.compared_outputs}"
    table.add_row("differing outputs", "", differing, "")
    return table


def _of(summary: Summary) -> str:
    return f"{summary.failed} of {summary.requests}"


def _said(value: float | None, unit: str) -> str:
    return "-" if value is None else f"{value:{unit}}"


def _write(
    options: argparse.Namespace,
    model: str,
    turns: Sequence[Turn],
    comparisons: Sequence[Comparison],
) -> None:
    packages = ("outrider", "ray", "torch", "transformers")
    document = {
        "model": model,
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {
            "python": platform.python_version(),
            **{package: metadata.version(package) for package in packages},
        },
        "options": {key: value for key, value in vars(options).items() if not callable(value)},
        "comparisons": [asdict(comparison) for comparison in comparisons],
        "turns": [asdict(turn) for turn in turns],
    }
    options.json.write_text(json.dumps(document, indent=1, default=str) + "\n", encoding="utf-8")


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} is negative")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def _positives(text: str) -> tuple[int, ...]:
    return tuple(dict.fromkeys(_positive(part) for part in text.split(",")))

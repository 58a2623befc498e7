"""Load: asks an OpenAI-compatible server many prompts, so many at a time, and times every answer.

Every answer is one streamed chat completion. A request that fails is an answer with an `error`,
never an exception. Knows HTTP and clocks, not how the server was started nor what is reported.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from outrider.actors.requests import SpeculationCounts
from outrider.cluster.errors import ConfigError

READ_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Prompt:
    """One conversation to be continued."""

    name: str  # its `id` or `question_id` in the file, else "line N"
    messages: Sequence[Mapping[str, object]]


@dataclass
class Answer:
    """What came back for one prompt, and when; times count from the moment the request was sent."""

    prompt: str
    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # empty when the server does not tell them
    finish_reason: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    ttft_s: float | None = None  # to the first chunk with a token; None = there was none
    e2e_s: float = 0.0  # to the end of the stream
    counts: SpeculationCounts = field(default_factory=SpeculationCounts)
    error: str | None = None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per output token after the first, (e2e - ttft) / (n - 1); None below two."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Run:
    """The answers of one pass over the prompts, in their order, and how long all of it took."""

    seconds: float
    answers: Sequence[Answer]


def read_prompts(path: Path, category: str | None = None, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a JSONL file, of one category if named.

    A line is {"turns": [...]} as in Spec-Bench (the first turn is asked), {"prompt": "..."} or
    {"messages": [...]}. ConfigError names the line that is none of these.
    """
    try:
        lines = path.expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the prompts in {path}: {error}") from None
    prompts = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            entry = _parse_line(line, f"{path}, line {number}")
            if category is None or entry.get("category") == category:
                name = entry.get("id", entry.get("question_id", f"line {number}"))
                prompts.append(Prompt(str(name), _messages(entry, f"{path}, line {number}")))
    if not prompts:
        wanted = "no prompts" if category is None else f"no prompts of category {category!r}"
        raise ConfigError(f"{path} holds {wanted}")
    return prompts[:limit]


def http_client(url: str) -> httpx.AsyncClient:
    """A client of the API at `url`, with or without its scheme and its `/v1`."""
    url = url if "://" in url else f"http://{url}"
    return httpx.AsyncClient(
        base_url=url.rstrip("/").removesuffix("/v1") + "/v1/",
        timeout=httpx.Timeout(READ_TIMEOUT_S, connect=10),
        limits=httpx.Limits(max_connections=None),
    )


async def drive(
    client: httpx.AsyncClient,
    prompts: Sequence[Prompt],
    bodies: Iterable[Mapping[str, object]],
    concurrency: int,
    on_answer: Callable[[], object],
) -> Run:
    """Ask every prompt with its body, `concurrency` at a time; `on_answer` is called after each."""
    waiting = enumerate(zip(prompts, bodies, strict=True))
    answers: dict[int, Answer] = {}

    async def keep_asking() -> None:
        for index, (prompt, body) in waiting:
            answers[index] = await ask(client, prompt, body)
            on_answer()

    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(prompts))):
            group.create_task(keep_asking())
    seconds = time.perf_counter() - started
    return Run(seconds, [answers[index] for index in range(len(prompts))])


async def ask(client: httpx.AsyncClient, prompt: Prompt, body: Mapping[str, object]) -> Answer:
    """Stream one chat completion to its end."""
    answer = Answer(prompt.name)
    request = {
        **body,
        "messages": list(prompt.messages),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    try:
        async with client.stream("POST", "chat/completions", json=request) as response:
            if response.status_code == 200:
                await _listen(response, answer, started)
            else:
                await response.aread()
                answer.error = f"HTTP {response.status_code}: {_reason(response.text)}"
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.e2e_s = time.perf_counter() - started
    return answer


async def _listen(response: httpx.Response, answer: Answer, started: float) -> None:
    has_usage = False
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            if not has_usage:
                answer.error = "the stream told no usage"
            return
        chunk = json.loads(data)
        if error := chunk.get("error"):
            answer.error = str(error.get("message", error))
            return
        for choice in chunk["choices"]:
            _take(answer, choice, started)
        if usage := chunk.get("usage"):
            has_usage = True
            answer.prompt_tokens = usage["prompt_tokens"]
            answer.output_tokens = usage["completion_tokens"]
        if counts := (chunk.get("metrics") or {}).get("speculative_decoding"):
            answer.counts = read_counts(counts)
    answer.error = "the stream ended without [DONE]"


def _take(answer: Answer, choice: Mapping[str, Any], started: float) -> None:
    text = choice["delta"].get("content") or ""
    ids = choice.get("token_ids") or []
    if answer.ttft_s is None and (text or ids):
        answer.ttft_s = time.perf_counter() - started
    answer.text += text
    answer.token_ids += ids
    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason


def read_counts(metrics: Mapping[str, Any]) -> SpeculationCounts:
    """The counts in a response's `metrics.speculative_decoding`, whose keys are vLLM's."""
    counts = SpeculationCounts()
    for length, blocks in metrics["acceptance_histogram_by_draft_length"].items():
        for accepted, number in enumerate(blocks):
            for _ in range(number):
                counts.record(int(length), accepted)
    return counts


def _parse_line(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise ConfigError(f"{where}: expected an object")
    return entry


def _messages(entry: Mapping[str, Any], where: str) -> list[Mapping[str, object]]:
    match entry:
        case {"messages": [_, *_] as messages}:
            return list(messages)
        case {"turns": [str(first), *_]}:
            return [{"role": "user", "content": first}]
        case {"prompt": str(prompt)}:
            return [{"role": "user", "content": prompt}]
    raise ConfigError(f'{where}: expected "turns", "prompt" or "messages"')


def _reason(body: str) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200]

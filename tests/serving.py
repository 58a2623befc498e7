"""Helpers for tests that serve through a real coordinator actor on Ray."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil
import ray

from outrider.actors.coordinator import Coordinator
from outrider.actors.requests import Delta, GenerateRequest
from outrider.cluster.config import parse_settings
from outrider.cluster.remote import make_actor

DEADLINE_S = 300.0  # against hangs: on a busy machine a new actor alone takes minutes


@dataclass
class Answer:
    """All that came of one sequence."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    last: Delta | None = None


def make_settings(target: str, *drafts: dict[str, Any], **changes: Any) -> Any:
    """Settings of a tiny float64 target and its drafts; `changes` by section."""
    return parse_settings(
        {
            "model_name": "tiny",
            "target": {
                "model": target,
                "dtype": "float64",
                "max_model_len": 128,
                "max_num_seqs": 8,
                "num_cpus": 0.5,
                **changes.pop("target_changes", {}),
            },
            "drafts": [
                {"dtype": "float64", "num_cpus": 0.5, **draft}
                if draft["method"] == "draft_model"
                else draft
                for draft in drafts
            ],
            **changes,
        }
    )


def neural(name: str, model: str, num_tokens: int = 4, **changes: Any) -> dict[str, Any]:
    """The settings of a neural draft."""
    return {
        "name": name,
        "method": "draft_model",
        "model": model,
        "num_speculative_tokens": num_tokens,
        **changes,
    }


LOOKUP = {"name": "lookup", "method": "prompt_lookup", "num_speculative_tokens": 3}


@asynccontextmanager
async def serving(settings: Any, **kwargs: Any) -> AsyncIterator[Any]:
    """A started coordinator, as a plain Ray actor; gone afterwards."""
    coordinator = make_actor(Coordinator, {"num_cpus": 0}, settings, **kwargs)
    try:
        await coordinator.start.remote()
        yield coordinator
    finally:
        ray.kill(coordinator)


async def stream(coordinator: Any, request: GenerateRequest) -> AsyncIterator[list[Delta]]:
    """The items of one request; closing gives it up."""
    generator = coordinator.generate.options(num_returns="streaming").remote(request)
    try:
        async for reference in generator:
            yield await reference
    finally:
        ray.cancel(generator)


async def collect(coordinator: Any, request: GenerateRequest) -> list[Answer]:
    """Serve a request to its end."""
    answers = [Answer() for _ in range(len(request.prompts) * request.n)]
    async for item in stream(coordinator, request):
        for delta in item:
            answer = answers[delta.index]
            assert answer.last is None, "a sequence went on after its end"
            answer.ids += delta.ids
            answer.text += delta.text
            if delta.finish_reason is not None:
                answer.last = delta
    assert all(answer.last is not None for answer in answers)
    return answers


async def wait_for(condition: Callable[[], Any], what: str) -> Any:
    """Poll until `condition` (which may be async) holds; fail after a generous deadline."""
    end = time.monotonic() + DEADLINE_S
    while True:
        result = condition()
        if asyncio.iscoroutine(result) or isinstance(result, ray.ObjectRef):
            result = await result
        if result:
            return result
        assert time.monotonic() < end, f"waited {DEADLINE_S:g} s for {what}"
        await asyncio.sleep(0.02)


def worker_pids(class_name: str) -> list[int]:
    """Processes of this Ray session's actors of one class, as `ps` shows them."""
    pids = []
    for process in psutil.Process().children(recursive=True):  # never those of another Ray
        with contextlib.suppress(psutil.NoSuchProcess):
            if " ".join(process.cmdline()).startswith(f"ray::{class_name}"):
                pids.append(process.pid)
    return pids


def send(signal_number: signal.Signals, pids: list[int]) -> None:
    """Send a signal to processes that this test session started."""
    for pid in pids:
        os.kill(pid, signal_number)

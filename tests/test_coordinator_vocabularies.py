"""A draft of another vocabulary behind the coordinator: same ids, and a new actor is paired too."""

import asyncio
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from outrider.actors.messages import Sampling
from outrider.actors.model import Model
from outrider.actors.requests import GenerateRequest
from outrider.actors.stats import MethodStats

from .engine import Engine, Job
from .serving import LOOKUP, collect, make_settings, neural, send, serving, wait_for, worker_pids
from .tiny import make_network
from .toys import make_tokenizer

pytestmark = pytest.mark.usefixtures("ray_session")

LAWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_p": 0.9},
]


def make_folder(folder: Path, kind: str, seed: int) -> str:
    tokenizer = make_tokenizer(kind, seed)
    network = make_network("llama", seed, vocab_size=len(tokenizer), max_position_embeddings=256)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


async def test_ids_are_plain_decodings_and_a_replaced_draft_goes_on(tmp_path: Path) -> None:
    target = make_folder(tmp_path / "target", "byte-level", 1)
    draft = make_folder(tmp_path / "draft", "sentence-piece", 2)
    rng = random.Random(0)
    prompts = [[rng.randrange(250) for _ in range(length)] for length in (3, 9, 20)]
    asked = [
        GenerateRequest(f"{i}", prompts, max_tokens=40, ignore_eos=True, n=2, **law)
        for i, law in enumerate(LAWS)
    ]
    model = Model(
        make_network("llama", 1, vocab_size=len(make_tokenizer("byte-level", 1))),
        make_tokenizer("byte-level", 1),
        rows=8,
        max_model_len=128,
    )
    laws = [[Sampling(**law, choice=choice) for choice in range(2)] for law in LAWS]
    jobs = [
        Job(prompt, 40, sampling) for choices in laws for prompt in prompts for sampling in choices
    ]
    expected = Engine(model).run(jobs)
    settings = make_settings(target, LOOKUP, neural("other", draft))
    async with serving(settings) as coordinator:

        async def serve() -> list[list[int]]:
            answers = await asyncio.gather(*(collect(coordinator, request) for request in asked))
            return [answer.ids for request in answers for answer in request]

        async def methods() -> dict[str, MethodStats]:
            stats = await coordinator.snapshot.remote()
            found: dict[str, MethodStats] = stats.drafts["other"].methods
            return found

        assert await serve() == expected
        used = {method for method, of in (await methods()).items() if of.num_calls}
        assert used == {"string", "token"}
        send(signal.SIGKILL, worker_pids("DraftWorker"))
        drafted = sum(of.num_draft_tokens for of in (await methods()).values())

        async def drafts_again() -> bool:
            assert await serve() == expected
            return sum(of.num_draft_tokens for of in (await methods()).values()) > drafted

        await wait_for(drafts_again, "proposals of the replaced draft")

"""Every request option, alone and mixed in one batch: drafts change neither ids, text nor logprobs.

The whole path without Ray, float64: requests, sequences, scheduler, drafts, target, deltas.
"""

import functools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from outrider.actors.draft import Drafter
from outrider.actors.intake import Intake
from outrider.actors.lookup import PromptLookup
from outrider.actors.model import Model
from outrider.actors.requests import Delta, GenerateRequest
from outrider.cluster.config import DraftModelSpec, TargetSpec

from .conftest import Folders
from .engine import Engine, EngineDraft
from .tiny import TOKENS

torch.set_num_threads(1)

ROWS = 8
MAX_TOKENS = 10
ALONE: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.2},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.1},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "logit_bias": {"logit_bias": tuple((id, 6.0) for id in range(20, 26))},
    "bad_words": {"bad_words": tuple((id,) for id in range(3, TOKENS, 3))},
    "bad_words of two": {
        "logit_bias": tuple((id, 8.0) for id in (20, 21)),
        "bad_words": ((20, 21), (21, 20, 20)),
    },
    "allowed_token_ids": {"allowed_token_ids": tuple(range(2, 40))},
    "min_tokens": {"min_tokens": 6, "logit_bias": ((2, 40.0),)},
    "min_tokens before a stop string": {"min_tokens": 5, "stop": ("w1", "w2", "w3", "w4")},
    "min_tokens before a stop id": {"min_tokens": 4, "stop_token_ids": tuple(range(3, 100))},
    "include_stop_str_in_output": {"include_stop_str_in_output": True, "stop": ("1", "w2")},
    "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": ((0, 9.0), (1, 9.0))},
    "logprobs": {"logprobs": 4},
}


@pytest.fixture(scope="module")
def target(folders: Folders) -> Model:
    return Model.load(TargetSpec(model=folders.target, dtype="float64"), rows=ROWS)


@pytest.fixture(scope="module")
def drafters(folders: Folders) -> dict[str, Drafter]:
    return {
        name: Drafter(
            Model.load(
                DraftModelSpec(method="draft_model", model=folder, dtype="float64"), rows=ROWS
            ),
            ROWS,
            8,
        )
        for name, folder in (("self", folders.target), ("noisy", folders.noisy))
    }


def serve(
    target: Model, requests: list[GenerateRequest], drafts: list[EngineDraft], **how: Any
) -> tuple[list[list[Delta]], Engine]:
    """Serve all requests, one prompt each, at once."""
    tokenizer: Any = target.tokenizer
    intake = Intake(target.describe(), tokenizer.backend_tokenizer.decode)
    engine = Engine(target, drafts, **how)
    sequences = [sequence for request in requests for sequence in intake.sequences(request)]
    return engine.serve(sequences, ROWS), engine


def answer(deltas: list[Delta]) -> tuple[Any, ...]:
    ids = [id for delta in deltas for id in delta.ids]
    last = deltas[-1]
    return ids, "".join(delta.text for delta in deltas), last.finish_reason, last.stop_reason


def check_equal(
    got: list[list[Delta]], want: list[list[Delta]], requests: list[GenerateRequest]
) -> None:
    for mine, plain, request in zip(got, want, requests, strict=True):
        assert answer(mine) == answer(plain), request
        if request.logprobs is None:
            assert all(delta.logprobs is None for delta in mine)
            continue
        for delta in mine:
            assert delta.logprobs is not None
            assert len(delta.logprobs) == len(delta.ids)
        told = [[t for d in deltas for t in d.logprobs or []] for deltas in (mine, plain)]
        for a, b in zip(*told, strict=True):
            assert [id for id, _ in a.top] == [id for id, _ in b.top]
            np.testing.assert_allclose(
                [a.logprob, *(p for _, p in a.top)],
                [b.logprob, *(p for _, p in b.top)],
                atol=1e-9,
            )


def check_drafts_change_nothing(
    target: Model, drafters: dict[str, Drafter], requests: list[GenerateRequest]
) -> list[list[Delta]]:
    run = functools.partial(serve, target, requests)
    want, _ = run([])
    check_equal(run([EngineDraft("lookup", 5, PromptLookup(1, 4))])[0], want, requests)
    check_equal(run([EngineDraft("self", 4, drafters["self"])])[0], want, requests)
    noisy = EngineDraft("noisy", 3, drafters["noisy"])
    got, engine = run([noisy], target_lost_after=5, max_num_batched_tokens=24)
    check_equal(got, want, requests)
    assert engine.stats.drafts["noisy"].counts.num_accepted_tokens > 0
    return want


def make_request(seed: int, temperature: float, options: dict[str, Any]) -> GenerateRequest:
    prompt = [3 + seed % 140, 7, 8, 7, 8, 3 + (5 * seed) % 90]
    return GenerateRequest(
        str(seed),
        [prompt],
        temperature=temperature,
        seed=seed,
        **{"max_tokens": MAX_TOKENS, **options},
    )


def test_every_option_alone(target: Model, drafters: dict[str, Drafter]) -> None:
    requests = [
        make_request(seed, temperature, options)
        for options in ALONE.values()
        for seed, temperature in ((1, 0.0), (2, 1.0), (3, 0.7))
    ]
    without = [make_request(int(r.request_id), r.temperature, {}) for r in requests]
    plain = check_drafts_change_nothing(target, drafters, requests)
    neutral, _ = serve(target, without, [])
    for i, name in enumerate(ALONE):  # each option does something to one of its answers
        part = slice(3 * i, 3 * i + 3)
        if name != "logprobs":
            assert [*map(answer, plain[part])] != [*map(answer, neutral[part])], name


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    """Some of all options, with other numbers."""

    def ids(most: int) -> tuple[int, ...]:
        return tuple(map(int, rng.choice(TOKENS, rng.integers(1, most), replace=False)))

    options: dict[str, Any] = {
        "top_k": int(rng.integers(1, 60)),
        "top_p": float(rng.uniform(0.3, 1)),
        "min_p": float(rng.uniform(0, 0.3)),
        "presence_penalty": float(rng.uniform(-2, 2)),
        "frequency_penalty": float(rng.uniform(-2, 2)),
        "repetition_penalty": float(rng.uniform(0.5, 2)),
        "logit_bias": tuple((id, float(rng.normal(0, 8))) for id in ids(12)),
        "bad_words": tuple((id,) for id in ids(40)) + tuple(ids(4) for _ in range(20)),
        "allowed_token_ids": (2, *ids(60)),
        "min_tokens": int(rng.integers(1, MAX_TOKENS)),
        "stop": tuple(f"w{id}" for id in ids(4)),
        "stop_token_ids": ids(20),
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": int(rng.integers(0, 6)),
        "num_speculative_tokens": int(rng.integers(0, 6)),
    }
    return {name: value for name, value in options.items() if rng.random() < 0.4}


def test_three_hundred_combinations_over_mixed_batches(
    target: Model, drafters: dict[str, Drafter]
) -> None:
    rng = np.random.default_rng(5)
    requests = [
        make_request(seed, float(rng.choice([0.0, 0.7, 1.0, 1e-3])), random_options(rng))
        for seed in range(300)
    ]
    check_drafts_change_nothing(target, drafters, requests)


def test_a_temperature_near_zero_gives_the_greedy_ids_under_every_option(
    target: Model, drafters: dict[str, Drafter]
) -> None:
    """Near ties, within some thousandths, may go either way; these prompts have none."""
    greedy = [make_request(30 + i, 0.0, options) for i, options in enumerate(ALONE.values())]
    want, _ = serve(target, greedy, [])
    cold = [replace(request, temperature=1e-3) for request in greedy]
    got, _ = serve(target, cold, [EngineDraft("noisy", 4, drafters["noisy"])])
    check_equal(got, want, greedy)


@pytest.mark.parametrize("min_tokens", range(1, 8))
def test_min_tokens_is_the_least_that_comes_wherever_blocks_end(
    target: Model, drafters: dict[str, Drafter], min_tokens: int
) -> None:
    options = {"min_tokens": min_tokens, "logit_bias": ((2, 90.0),)}
    requests = [
        make_request(seed, temperature, options) for seed in (1, 2) for temperature in (0, 1)
    ]
    for drafts in ([], [EngineDraft("self", 4, drafters["self"])]):
        deltas, _ = serve(target, requests, drafts)
        for each in deltas:
            ids = answer(each)[0]
            assert len(ids) == min_tokens + 1
            assert ids.index(2) == min_tokens


def test_an_end_that_is_all_that_may_come_comes_and_ends_nothing_too_early(target: Model) -> None:
    request = make_request(1, 1.0, {"allowed_token_ids": (2,), "min_tokens": 3})
    ((*deltas,),), _ = serve(target, [request], [])
    assert answer(deltas) == ([2, 2, 2], "", "stop", None)

"""Shaped logits are those of a definition in plain Python, row by row, whatever the batch."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.actors.messages import Sampling, Shaping
from outrider.actors.sampling import draw, draw_rows, draw_rows_torch, processed
from outrider.actors.shaping import shape_rows

torch.set_num_threads(1)

PROMPT = [1, 3, 3]
SIZE = 5
ALONE: dict[str, Shaping] = {
    "repetition": Shaping(repetition_penalty=1.5),
    "repetition below 1": Shaping(repetition_penalty=0.5),
    "presence": Shaping(presence_penalty=0.7),
    "negative presence": Shaping(presence_penalty=-1.2),
    "frequency": Shaping(frequency_penalty=0.4),
    "bias": Shaping(logit_bias=((0, 1.5), (4, -100.0))),
    "bad word": Shaping(bad_words=((2,),)),
    "bad words": Shaping(bad_words=((1, 2), (0, 1, 3), (2, 2))),
    "all bad": Shaping(bad_words=tuple((id,) for id in range(SIZE))),
    "allowed": Shaping(allowed_ids=(4, 1)),
    "min_tokens": Shaping(min_tokens=2, end_ids=(0, 3)),
    "min_tokens of all": Shaping(min_tokens=2, end_ids=tuple(range(SIZE))),
    "all at once": Shaping(
        1.3, 0.2, 0.3, ((2, 0.5),), ((3, 0),), (0, 1, 2, 4), min_tokens=1, end_ids=(4,)
    ),
    "allowed but banned": Shaping(allowed_ids=(0, 3), min_tokens=1, end_ids=(0, 3)),
    "ids beyond": Shaping(
        logit_bias=((99, 5.0), (-1, 5.0)), bad_words=((99,), (99, 0)), end_ids=(5,), min_tokens=9
    ),
    "none allowed": Shaping(allowed_ids=(7, 99)),
}


def define(row: list[float], shaping: Shaping, prompt: list[int], output: list[int]) -> list[float]:
    """The definition, one step after another."""
    ids = range(len(row))
    if any(row[id] > -math.inf for id in ids if id in shaping.allowed_ids):
        row = [row[id] if id in shaping.allowed_ids else -math.inf for id in ids]
    banned = {
        word[-1]
        for word in shaping.bad_words
        if output[len(output) - len(word) + 1 :] == list(word[:-1]) and len(word) <= len(output) + 1
    }
    if len(output) < shaping.min_tokens:
        banned |= set(shaping.end_ids)
    if any(row[id] > -math.inf for id in ids if id not in banned):
        row = [-math.inf if id in banned else row[id] for id in ids]
    row = [row[id] + dict(shaping.logit_bias).get(id, 0.0) for id in ids]
    penalty = shaping.repetition_penalty
    for id in set(prompt + output) & set(ids):
        row[id] = row[id] / penalty if row[id] > 0 else row[id] * penalty
    for id in set(output) & set(ids):
        row[id] -= shaping.frequency_penalty * output.count(id) + shaping.presence_penalty
    return row


def shape(row: Tensor, shaping: Shaping | None, output: list[int]) -> Tensor:
    return shape_rows(row[None], [Sampling(shaping=shaping)], [[*PROMPT, *output]], [len(output)])[
        0
    ]


@pytest.mark.parametrize("name", ALONE)
def test_every_option_is_its_definition_after_every_output(name: str) -> None:
    row = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.5], dtype=torch.float64)
    padded = row.clone()
    padded[4] = -math.inf
    for length in range(4):
        for output in map(list, itertools.product(range(SIZE), repeat=length)):
            for logits in (row, padded):
                want = define(logits.tolist(), ALONE[name], PROMPT, output)
                got = shape(logits, ALONE[name], output).tolist()
                np.testing.assert_allclose(got, want, rtol=1e-15)


def random_shaping(rng: np.random.Generator, size: int) -> Shaping:
    """Any options together."""

    def some(most: int) -> tuple[int, ...]:
        return tuple(map(int, rng.choice(size + 2, rng.integers(1, most), replace=False)))

    def maybe(value: Any, neutral: Any) -> Any:
        return value if rng.random() < 0.5 else neutral

    return Shaping(
        maybe(float(rng.uniform(0.5, 2)), 1.0),
        maybe(float(rng.uniform(-2, 2)), 0.0),
        maybe(float(rng.uniform(-2, 2)), 0.0),
        maybe(tuple((id, float(rng.normal(0, 3))) for id in some(5)), ()),
        maybe(tuple(some(4) for _ in range(4)), ()),
        maybe(some(size), ()),
        *maybe((int(rng.integers(1, 6)), some(4)), (0, ())),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_blocks_of_many_rows_are_shaped_as_each_position_alone(dtype: torch.dtype) -> None:
    """Random options over random blocks; rows without options stay as they are, to the bit."""
    rng = np.random.default_rng(1)
    for _ in range(150):
        samplings, texts, positions, outputs = [], [], [], []
        for _ in range(8):
            shaping = random_shaping(rng, 9) if rng.random() < 0.8 else None
            output = list(map(int, rng.integers(0, 9, 12)))
            first, num_drafted = int(rng.integers(0, 7)), int(rng.integers(0, 5))
            for position in range(first, first + num_drafted + 1):
                samplings.append(Sampling(shaping=shaping))
                texts.append(PROMPT + output[:position])
                positions.append(position)
                outputs.append(output[:position])
        logits = torch.from_numpy(rng.normal(0, 3, (len(texts), 9))).to(dtype)
        logits[rng.random(len(texts)) < 0.3, 5:] = -math.inf
        before = logits.clone()
        shaped = shape_rows(logits, samplings, texts, positions)
        assert torch.equal(logits, before)
        assert shaped.dtype == dtype
        for i, sampling in enumerate(samplings):
            alone = shape_rows(logits[i : i + 1], [sampling], [texts[i]], [positions[i]])[0]
            assert torch.equal(shaped[i], alone)
            if sampling.shaping is None:
                assert torch.equal(shaped[i], logits[i])
            else:
                want = define(logits[i].tolist(), sampling.shaping, PROMPT, outputs[i])
                np.testing.assert_allclose(shaped[i].tolist(), want, rtol=1e-6, atol=1e-6)


def test_nothing_to_shape_gives_back_the_very_tensor() -> None:
    logits = torch.zeros(2, 3)
    assert shape_rows(logits, [Sampling()] * 2, [[], []], [0, 0]) is logits
    assert shape_rows(logits[:0], [], [], []).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "shaping",
    [
        Shaping(repetition_penalty=1e-300),
        Shaping(repetition_penalty=1e300),
        Shaping(presence_penalty=1e300, frequency_penalty=1e300),
        Shaping(logit_bias=((0, 1e308), (1, -1e308), (2, 1e308))),
        Shaping(1e-300, -1e300, -1e300, ((0, 1e308), (2, -1e308))),
    ],
)
def test_no_finite_option_makes_a_law_that_cannot_be_drawn(
    shaping: Shaping, dtype: torch.dtype
) -> None:
    row = torch.tensor([3.0, -3.0, -math.inf, 0.0], dtype=dtype)
    shaped = shape(row, shaping, [0, 0, 1, 2])
    assert shaped[[0, 1, 3]].isfinite().all()
    assert shaped[2] == -math.inf
    for temperature in (0.0, 1e-3, 1.0):
        assert draw(shaped, Sampling(temperature), 0) != 2


def test_all_of_the_ways_to_draw_agree_on_shaped_rows() -> None:
    rng = np.random.default_rng(2)
    samplings = [
        Sampling(
            float(rng.choice([0.0, 1e-3, 0.7, 1.3])),
            int(rng.integers(0, 20)),
            float(rng.choice([1.0, 0.8])),
            seed=i,
            min_p=float(rng.choice([0.0, 0.05, 0.5])),
            shaping=random_shaping(rng, 50),
        )
        for i in range(200)
    ]
    texts = [list(map(int, rng.integers(0, 50, 20))) for _ in samplings]
    positions = [int(rng.integers(0, 20)) for _ in samplings]
    logits = torch.from_numpy(rng.normal(0, 3, (200, 50)).round(1))  # ties
    shaped = shape_rows(logits, samplings, texts, positions)
    drawn = draw_rows(shaped, samplings, positions)
    assert draw_rows_torch(shaped, samplings, positions) == drawn
    for row, sampling, id in zip(shaped, samplings, drawn, strict=True):
        if sampling.temperature == 1e-3 and (row == row.max()).sum() == 1:
            assert id == int(row.argmax())
        assert id in processed(row, sampling)[0]

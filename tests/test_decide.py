"""A pass decides as plain decoding would, with every option, and tells the unshaped law."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from outrider.actors.decide import Verifier, tell_logprobs
from outrider.actors.messages import Law, Outcomes, Rows, Sampling, Shaping, TokenLogprob
from outrider.actors.sampling import draw_with_law, processed
from outrider.actors.shaping import shape_rows

from .test_shaping import ALONE, random_shaping

torch.set_num_threads(1)

SIZE = 8
TABLE = torch.from_numpy(np.random.default_rng(0).normal(0, 1.5, (SIZE, SIZE, SIZE)))
PROMPT = [1, 3, 3, 2]


@dataclass
class TableModel:
    """Logits after an id are read off a table by it and the id before."""

    rows: dict[int, list[int]] = field(default_factory=dict)

    def forward(
        self, row: list[int], start: list[int], ids: list[list[int]], num_logits: list[int]
    ) -> Tensor:
        logits = []
        for r, first, new, count in zip(row, start, ids, num_logits, strict=True):
            text = self.rows[r] = self.rows.get(r, [])[:first] + new
            assert len(text) == first + len(new)
            logits += [TABLE[text[i - 1], text[i]] for i in range(len(text) - count, len(text))]
        return torch.stack(logits) if logits else TABLE[0, :0]


def one_pass(
    verifier: Verifier,
    committed: list[list[int]],
    drafted: list[list[int]],
    samplings: list[Sampling],
    num_cached: list[int],
    laws: list[Law | None] | None = None,
) -> Outcomes:
    """Run the committed ids that are not cached, and a block, of every row."""
    return verifier.decide(
        Rows(
            list(range(len(committed))),
            num_cached,
            [text[n:] + ids for text, n, ids in zip(committed, num_cached, drafted, strict=True)],
            [len(ids) for ids in drafted],
            [True] * len(committed),
            [len(text) - len(PROMPT) for text in committed],
            samplings,
            laws or [None] * len(committed),
            [3] * len(committed),
        )
    )


def run_plain(
    samplings: list[Sampling], length: int
) -> tuple[list[list[int]], list[list[TokenLogprob]]]:
    verifier = Verifier(TableModel())
    committed = [list(PROMPT) for _ in samplings]
    told: list[list[TokenLogprob]] = [[] for _ in samplings]
    for done in range(length):
        cached = [0 if done == 0 else len(text) - 1 for text in committed]
        outcomes = one_pass(verifier, committed, [[]] * len(samplings), samplings, cached)
        for i, text in enumerate(committed):
            text.append(outcomes.next_id[i])
            told[i] += outcomes.logprobs[i]
    return committed, told


def random_samplings(rng: np.random.Generator, number: int) -> list[Sampling]:
    return [
        Sampling(
            float(rng.choice([0.0, 0.7, 1.0])),
            seed=int(rng.integers(2**62)),
            min_p=float(rng.choice([0.0, 0.1])),
            shaping=random_shaping(rng, SIZE) if rng.random() < 0.9 else None,
        )
        for _ in range(number)
    ]


def test_blocks_give_the_ids_and_logprobs_of_plain_decoding_with_any_options() -> None:
    """Drafts are the plain ids, broken at random: so every place of a block is met."""
    rng = np.random.default_rng(1)
    kept = 0
    for _ in range(20):
        samplings = random_samplings(rng, 8)
        want, want_told = run_plain(samplings, 24)
        verifier = Verifier(TableModel())
        committed = [list(PROMPT) for _ in samplings]
        told: list[list[TokenLogprob]] = [[] for _ in samplings]
        cached = [0] * len(samplings)
        while min(map(len, committed)) < 20:
            drafted = []
            for text, plain in zip(committed, want, strict=True):
                ids = plain[len(text) :][: rng.integers(0, 6)]
                drafted.append(
                    [id if rng.random() < 0.8 else int(rng.integers(SIZE)) for id in ids]
                )
            outcomes = one_pass(verifier, committed, drafted, samplings, cached)
            for i, text in enumerate(committed):
                new = [*drafted[i][: outcomes.accepted[i]], outcomes.next_id[i]]
                text += new
                told[i] += outcomes.logprobs[i]
                cached[i] = len(text) - 1
                kept += outcomes.accepted[i]
        for i, plain in enumerate(want):
            length = min(len(plain), len(committed[i]))
            assert committed[i][:length] == plain[:length], samplings[i]
            told_ids = length - len(PROMPT)
            assert told[i][:told_ids] == want_told[i][:told_ids]
    assert kept > 1000


def test_prefill_in_chunks_and_a_lost_log_change_nothing() -> None:
    sampling = Sampling(shaping=Shaping(1.5, 0.5, 0.5, bad_words=((3, 2),)))
    (want,), _ = run_plain([sampling], 12)
    for done in range(1, 12):
        text = want[: len(PROMPT) + done]
        verifier = Verifier(TableModel())  # of a new target
        for start in range(len(text) - 1):
            chunk = Rows(
                [0], [start], [[text[start]]], [0], [False], [done], [sampling], [None], [0]
            )
            assert verifier.decide(chunk) == Outcomes([0], [-1], [[]])
        outcomes = one_pass(verifier, [text], [[]], [sampling], [len(text) - 1])
        assert outcomes.next_id == want[len(text) :][:1]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.9, shaping=Shaping(1.6, 0.5, 0.4)),
        Sampling(1.2, min_p=0.1, shaping=Shaping(logit_bias=((2, 1.0),), bad_words=((4,), (5, 1)))),
        Sampling(1.0, 6, 0.9, shaping=ALONE["all at once"]),
        Sampling(1.0, shaping=Shaping(allowed_ids=(0, 2, 5, 6), min_tokens=2, end_ids=(6,))),
    ],
)
def test_the_ratio_rule_emits_the_shaped_law(sampling: Sampling) -> None:
    """Chi-square of the first and second id over 2,500 seeds; false alarm 1e-6 each.

    Drafts are drawn from the unshaped logits: what the draft knows must not matter.
    """
    number = 2_500
    samplings = [sampling._replace(seed=i) for i in range(number)]
    drafted: list[list[int]] = []
    laws: list[Law | None] = []
    for own in samplings:
        ids: list[int] = []
        law = []
        for position in range(2):
            text = PROMPT + ids
            row = TABLE[text[-2], text[-1]].flip(0) * 0.3 + TABLE[text[-2], text[-1]] * 0.7
            id, *of_id = draw_with_law(row, own._replace(min_p=0.0), position, SIZE)
            ids.append(id)
            law.append(of_id)
        drafted.append(ids)
        laws.append(Law(np.stack([ids for ids, _ in law]), np.stack([p for _, p in law])))
    outcomes = one_pass(
        Verifier(TableModel()),
        [PROMPT] * number,
        drafted,
        samplings,
        [0] * number,
        laws,
    )
    emitted = [[*drafted[i][: outcomes.accepted[i]], outcomes.next_id[i]] for i in range(number)]
    firsts = [ids[0] for ids in emitted]
    assert_law(firsts, PROMPT, 0, sampling)
    common = max(set(firsts), key=lambda id: sum(len(e) > 1 and e[0] == id for e in emitted))
    seconds = [ids[1] for ids in emitted if len(ids) > 1 and ids[0] == common]
    assert len(seconds) > 100
    assert_law(seconds, [*PROMPT, common], 1, sampling)


def assert_law(ids: list[int], text: list[int], position: int, sampling: Sampling) -> None:
    row = shape_rows(TABLE[text[-2], text[-1]][None], [sampling], [text], [position])[0]
    support, probs = processed(row, sampling)
    counts = np.bincount(ids, minlength=SIZE)
    assert counts.sum() == counts[support].sum()
    if len(support) > 1:
        assert stats.chisquare(counts[support], probs * len(ids)).pvalue > 1e-6


def test_logprobs_are_of_the_unshaped_law_and_name_the_likeliest() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, -math.inf], [3.0, 3.0, 3.0, 3.0, 3.0]])
    first, second = tell_logprobs(logits, [0, 4], 3)
    total = math.log(1 + 2 * math.exp(2) + math.exp(1))
    assert first.logprob == pytest.approx(-total, abs=1e-12)
    assert [id for id, _ in first.top] == [1, 3, 2]
    assert [p for _, p in first.top] == pytest.approx([2 - total, 2 - total, 1 - total], abs=1e-12)
    assert second.logprob == pytest.approx(-math.log(5), abs=1e-12)
    assert [id for id, _ in second.top] == [0, 1, 2]
    assert tell_logprobs(logits, [0, 4], 0)[0].top == ()
    assert [id for id, _ in tell_logprobs(logits, [0, 4], 99)[0].top] == [1, 3, 2, 0]


def test_only_rows_that_ask_are_told_anything() -> None:
    verifier = Verifier(TableModel())
    rows = Rows(
        [0, 1, 2], [0, 0, 0], [PROMPT, [*PROMPT, 5], PROMPT], [0, 1, 0], [True] * 3, [0] * 3,
        [Sampling(0.0, shaping=Shaping(allowed_ids=(6,)))] * 3, [None] * 3, [None, 0, 2],
    )  # fmt: skip
    outcomes = verifier.decide(rows)
    assert outcomes.next_id == [6, 6, 6]
    assert [len(told) for told in outcomes.logprobs] == [0, 1, 1]
    law = torch.log_softmax(TABLE[PROMPT[-2], PROMPT[-1]], -1)
    for told in outcomes.logprobs[1:]:
        assert told[0].logprob == pytest.approx(float(law[6]), abs=1e-12)
    assert outcomes.logprobs[1][0].top == ()
    assert outcomes.logprobs[2][0].top[0][0] == int(law.argmax())

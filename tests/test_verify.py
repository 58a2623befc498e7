"""The rules, exactly: equality with plain draws, and enumeration of the ratio rule's output law."""

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider.actors.messages import Law, Sampling
from outrider.actors.sampling import draw, draw_with_law
from outrider.actors.verify import (
    Block,
    Rule,
    coupled,
    coupled_at_once,
    greedy,
    judge,
    ratio,
    verify,
)

torch.set_num_threads(1)

VOCABULARY = 6
SAMPLINGS = [
    Sampling(1.0),
    Sampling(0.5, top_p=0.9),
    Sampling(1.4, top_k=3),
    Sampling(0.8, 4, 0.8, choice=1),
]


def random_batch(rng: np.random.Generator, with_law: bool = False) -> tuple[Tensor, list[Block]]:
    """Ragged blocks whose drafts are half right: drawn from noisy copies of the target's logits."""
    rows, blocks = [], []
    for _ in range(rng.integers(1, 6)):
        num_drafted, position = int(rng.integers(0, 9)), int(rng.integers(0, 100))
        sampling = SAMPLINGS[rng.integers(len(SAMPLINGS))]._replace(seed=int(rng.integers(2**63)))
        logits = torch.from_numpy(rng.normal(0, 2, (num_drafted + 1, VOCABULARY)))
        near = logits + torch.from_numpy(rng.normal(0, 0.7, logits.shape))
        if with_law:
            proposed = [
                draw_with_law(row, sampling, position + i, 4) for i, row in enumerate(near[:-1])
            ]
            drafted = [id for id, _, _ in proposed]
            law = Law(
                np.array([ids for _, ids, _ in proposed]),
                np.array([probs for _, _, probs in proposed]),
            )
        else:
            drafted = [draw(row, sampling, position + i) for i, row in enumerate(near[:-1])]
            law = None
        rows.append(logits)
        blocks.append(Block(drafted, position, sampling, law))
    return torch.cat(rows), blocks


def plain(logits: Tensor, blocks: list[Block]) -> tuple[list[int], list[int]]:
    """What plain decoding says: draw at every position, then compare."""
    accepted, next_ids = [], []
    rows = iter(logits)
    for drafted, position, sampling, _ in blocks:
        chosen = [draw(next(rows), sampling, position + i) for i in range(len(drafted) + 1)]
        agree = [a == b for a, b in zip(drafted, chosen, strict=False)] + [False]
        accepted.append(agree.index(False))
        next_ids.append(chosen[agree.index(False)])
    return accepted, next_ids


@pytest.mark.parametrize("rule", [coupled, coupled_at_once, verify])
def test_coupled_emits_plain_draws_whatever_was_drafted(rule: Rule) -> None:
    rng = np.random.default_rng(1)
    kept = 0
    for _ in range(60):
        logits, blocks = random_batch(rng)
        decided = rule(logits, blocks)
        assert decided == plain(logits, blocks)
        kept += sum(decided[0])
    assert kept > 100


def test_a_draft_that_is_the_target_is_accepted_whole() -> None:
    rng = np.random.default_rng(2)
    for _ in range(30):
        logits, blocks = random_batch(rng)
        rows = iter(logits)
        perfect = [
            block._replace(
                drafted=[
                    draw(next(rows), block.sampling, block.position + i)
                    for i in range(len(block.drafted) + 1)
                ][:-1]
            )
            for block in blocks
        ]
        assert verify(logits, perfect)[0] == [len(block.drafted) for block in blocks]


def test_greedy_keeps_the_prefix_that_argmax_repeats() -> None:
    logits = torch.eye(4).repeat(2, 1)  # row i says i % 4
    blocks = [
        Block([0, 1, 3], 0, Sampling(0.0)),
        Block([0], 9, Sampling(0.0)),
        Block([], 4, Sampling(0.0)),
    ]
    logits = torch.cat([logits[:4], logits[:2], logits[2:3]])
    assert greedy(logits, blocks) == ([2, 1, 0], [2, 1, 2])
    assert verify(logits, blocks) == greedy(logits, blocks)


def test_temperature_zero_is_greedy_even_with_a_law() -> None:
    law = Law(np.array([[0, 1]]), np.array([[0.5, 0.5]]))
    logits = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    assert verify(logits, [Block([0], 0, Sampling(0.0), law)]) == ([0], [1])
    assert verify(logits, [Block([1], 0, Sampling(0.0), law)]) == ([1], [0])


def test_as_the_temperature_falls_every_rule_becomes_greedy() -> None:
    rng = np.random.default_rng(3)
    for _ in range(20):
        logits, blocks = random_batch(rng, with_law=True)
        best = logits.amax(-1, keepdim=True)
        logits = torch.where(logits == best, logits + 1, logits)
        cold = [b._replace(sampling=b.sampling._replace(temperature=1e-6)) for b in blocks]
        expected = greedy(logits, blocks)
        assert coupled(logits, cold) == expected
        assert ratio(logits, cold) == expected


def test_what_lies_behind_the_first_mismatch_is_not_looked_at() -> None:
    logits = torch.tensor([[9.0, 0.0, 0.0], [math.nan] * 3, [9.0, 0.0, 0.0]])
    blocks = [Block([1], 0, Sampling(1e-3)), Block([], 0, Sampling(1e-3))]
    assert coupled(logits, blocks) == ([0, 0], [0, 0])


def test_every_row_of_logits_must_belong_to_a_block() -> None:
    with pytest.raises(AssertionError, match="4 rows of logits for 3 choices"):
        verify(torch.zeros(4, 3), [Block([1, 2], 0, Sampling())])


def independent_of_neighbours(rule: Rule) -> bool:
    rng = np.random.default_rng(4)
    for _ in range(20):
        logits, blocks = random_batch(rng, with_law=True)
        sizes = [len(block.drafted) + 1 for block in blocks]
        together = list(zip(*rule(logits, blocks), strict=True))
        pieces = list(zip(logits.split(sizes), blocks, strict=True))
        alone = [(a[0], n[0]) for a, n in (rule(rows, [block]) for rows, block in pieces)]
        backwards = rule(
            torch.cat([rows for rows, _ in pieces[::-1]]), [block for _, block in pieces[::-1]]
        )
        if together != alone or together[::-1] != list(zip(*backwards, strict=True)):
            return False
    return True


@pytest.mark.parametrize("rule", [greedy, coupled, coupled_at_once, ratio, verify])
def test_a_block_is_decided_as_if_alone(rule: Rule) -> None:
    assert independent_of_neighbours(rule)


def test_a_generator_shared_by_the_batch_is_caught() -> None:
    """Mutant: rows that draw nothing from a draft still advance one common generator."""
    shared = np.random.default_rng(0)

    def mutant(logits: Tensor, blocks: list[Block]) -> tuple[list[int], list[int]]:
        seeded = [
            block._replace(sampling=block.sampling._replace(seed=int(shared.integers(2**63))))
            for block in blocks
        ]
        return ratio(logits, seeded)

    assert not independent_of_neighbours(mutant)


def test_noise_keyed_by_the_place_in_the_block_is_caught() -> None:
    """Mutant: positions counted from the start of the block instead of the output."""
    rng = np.random.default_rng(5)
    batches = [random_batch(rng) for _ in range(20)]

    def mutant(logits: Tensor, blocks: list[Block]) -> tuple[list[int], list[int]]:
        return coupled(logits, [block._replace(position=0) for block in blocks])

    assert any(mutant(*batch) != plain(*batch) for batch in batches)


def test_a_mixed_batch_decides_each_block_by_its_own_rule() -> None:
    rng = np.random.default_rng(6)
    for _ in range(20):
        logits, blocks = random_batch(rng, with_law=True)
        mixed, expected, start = [], [], 0
        for block in blocks:
            kind = rng.integers(3)
            if kind == 0:
                block = block._replace(sampling=block.sampling._replace(temperature=0.0))
            if kind == 1:
                block = block._replace(law=None)
            rule = (greedy, coupled, ratio)[kind]
            stop = start + len(block.drafted) + 1
            accepted, next_ids = rule(logits[start:stop], [block])
            expected.append((accepted[0], next_ids[0]))
            mixed.append(block)
            start = stop
        assert list(zip(*verify(logits, mixed), strict=True)) == expected


# The ratio rule.


def test_ratio_accepts_always_when_the_draft_is_the_target_and_its_law_fits() -> None:
    logits = torch.from_numpy(np.random.default_rng(7).normal(0, 2, (5, 300)))
    for seed in range(100):
        sampling = Sampling(1.0, top_k=20, top_p=0.95, seed=seed)
        proposed = [draw_with_law(row, sampling, 10 + i, 32) for i, row in enumerate(logits[:-1])]
        ids, rows, probs = (list(column) for column in zip(*proposed, strict=True))
        block = Block(ids, 10, sampling, Law(np.array(rows), np.array(probs)))
        bonus = draw(logits[-1], sampling, 14)
        assert verify(logits, [block]) == ([4], [bonus])


def test_a_law_may_be_longer_padded_or_hold_an_id_twice() -> None:
    rng = np.random.default_rng(8)
    for _ in range(30):
        logits, blocks = random_batch(rng, with_law=True)
        rewritten = []
        for block in blocks:
            assert block.law is not None
            ids, probs = block.law
            if len(ids):
                ids = np.concatenate([ids, ids, np.full_like(ids, VOCABULARY + 50)], axis=1)
                probs = np.concatenate([probs / 2, probs / 2, np.zeros_like(probs)], axis=1)
                ids, probs = np.concatenate([ids, ids[:1]]), np.concatenate([probs, probs[:1]])
            rewritten.append(block._replace(law=Law(ids, probs)))
        assert ratio(logits, rewritten) == ratio(logits, blocks)


def test_an_id_that_the_draft_could_not_draw_is_rejected() -> None:
    law = Law(np.array([[0, 1]]), np.array([[1.0, 0.0]]))
    logits = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 0.0]])
    for drafted in (1, 2):
        for seed in range(50):
            accepted, _ = ratio(logits, [Block([drafted], 0, Sampling(seed=seed), law)])
            assert accepted == [0]


def test_an_id_that_the_target_cannot_draw_is_rejected_at_the_smallest_u() -> None:
    p, q = np.array([0.0, 1.0]), np.array([0.5, 0.5])
    correction = judge(p, q, 0, 2.0**-54)
    assert correction is not None
    assert correction.tolist() == [0.0, 0.5]


def test_a_residual_of_zero_falls_back_to_the_target() -> None:
    p, q = np.array([0.5, 0.5, 0.0]), np.array([0.5, 0.5, 0.0])
    assert judge(p, q, 2, 0.5) is p
    assert judge(p, q, 0, 1 - 2.0**-53) is None


# Exact enumeration. A table gives, after each prefix, the target's law p and the draft's law q in
# twelfths; `u` takes the middles of equal cells, so each acceptance is counted, not estimated.

Weights = tuple[int, ...]
Judge = Callable[[np.ndarray, np.ndarray, int, float], np.ndarray | None]
TWELFTHS = 12


class Table:
    """A toy language model and its draft; both depend on the whole prefix."""

    def __init__(self, seed: int, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self._rng = np.random.default_rng(seed)
        self._laws: dict[tuple[int, ...], tuple[Weights, Weights]] = {}

    def laws(self, prefix: tuple[int, ...]) -> tuple[Weights, Weights]:
        if prefix not in self._laws:
            self._laws[prefix] = self._random(), self._random()
        return self._laws[prefix]

    def _random(self) -> Weights:
        cuts = np.sort(self._rng.integers(0, TWELFTHS + 1, self.vocabulary - 1))
        return tuple(int(n) for n in np.diff([0, *cuts, TWELFTHS]))


def fractions(weights: np.ndarray) -> list[Fraction]:
    exact = [Fraction(float(weight)).limit_denominator(10**6) for weight in weights]
    return [weight / sum(exact) for weight in exact]


def one_position(
    judge: Judge, p: Weights, drawn: Weights, recorded: Weights
) -> Iterator[tuple[Fraction, int, bool]]:
    """Yield (probability, emitted id, accepted): drafted from `drawn`, judged as `recorded`."""
    p_law, q_law = np.array(p) / sum(p), np.array(recorded) / sum(recorded)
    for drafted, weight in enumerate(drawn):
        cells = max(1, recorded[drafted]) * TWELFTHS
        for cell in range(cells if weight else 0):
            share = Fraction(weight, sum(drawn) * cells)
            correction = judge(p_law, q_law, drafted, (cell + 0.5) / cells)
            if correction is None:
                yield share, drafted, True
            else:
                for id, part in enumerate(fractions(correction)):
                    yield share * part, id, False


Draft = Callable[[Weights], tuple[Weights, Weights]]  # q -> (drawn from, recorded)


def honest(q: Weights) -> tuple[Weights, Weights]:
    return q, q


def emitted_law(
    table: Table, num_drafted: int, judge: Judge, draft: Draft
) -> dict[tuple[int, ...], Fraction]:
    """The exact law of the first num_drafted + 1 tokens; after a rejection, plain decoding."""
    law: dict[tuple[int, ...], Fraction] = {(): Fraction(1)}
    running: dict[tuple[int, ...], Fraction] = {(): Fraction(1)}  # all accepted so far
    stopped: dict[tuple[int, ...], Fraction] = {}
    for step in range(num_drafted + 1):
        following: dict[tuple[int, ...], Fraction] = {}
        after: dict[tuple[int, ...], Fraction] = {}
        for prefix, weight in running.items():
            p, q = table.laws(prefix)
            if step == num_drafted:
                outcomes = [(Fraction(n, TWELFTHS), id, False) for id, n in enumerate(p)]
            else:
                outcomes = list(one_position(judge, p, *draft(q)))
            for share, id, accepted in outcomes:
                to = following if accepted else after
                to[(*prefix, id)] = to.get((*prefix, id), Fraction(0)) + weight * share
        for prefix, weight in stopped.items():
            for id, n in enumerate(table.laws(prefix)[0]):
                key = (*prefix, id)
                after[key] = after.get(key, Fraction(0)) + weight * Fraction(n, TWELFTHS)
        running, stopped = following, after
    law = stopped
    return {ids: weight for ids, weight in law.items() if weight}


def target_law(table: Table, length: int) -> dict[tuple[int, ...], Fraction]:
    law = {}
    for ids in itertools.product(range(table.vocabulary), repeat=length):
        weight = Fraction(1)
        for i, id in enumerate(ids):
            weight *= Fraction(table.laws(ids[:i])[0][id], TWELFTHS)
        if weight:
            law[ids] = weight
    return law


def is_exact(judge: Judge, draft: Draft = honest) -> bool:
    for vocabulary, num_drafted, seed in itertools.product((2, 3, 4), (1, 2, 3), range(2)):
        if vocabulary == 4 and num_drafted == 3 and seed:
            continue  # the largest case once
        table = Table(seed, vocabulary)
        if emitted_law(table, num_drafted, judge, draft) != target_law(table, num_drafted + 1):
            return False
    return True


def test_the_ratio_rule_emits_exactly_the_targets_law() -> None:
    assert is_exact(judge)


def resample_from_p(p: np.ndarray, q: np.ndarray, drafted: int, u: float) -> np.ndarray | None:
    return None if judge(p, q, drafted, u) is None else p


def match_argmax(p: np.ndarray, q: np.ndarray, drafted: int, u: float) -> np.ndarray | None:
    return None if drafted == p.argmax() else p


def residual_swapped(p: np.ndarray, q: np.ndarray, drafted: int, u: float) -> np.ndarray | None:
    correction = judge(p, q, drafted, u)
    return None if correction is None else judge(q, p, drafted, 1.0)


def accept_everything_likely(
    p: np.ndarray, q: np.ndarray, drafted: int, u: float
) -> np.ndarray | None:
    """Typical acceptance: ignores q."""
    return None if p[drafted] >= 0.25 else p


def greedy_draft(q: Weights) -> tuple[Weights, Weights]:
    return tuple(int(id == np.argmax(q)) for id in range(len(q))), q


def draws_from_top_2(q: Weights) -> tuple[Weights, Weights]:
    kept = sorted(range(len(q)), key=lambda id: -q[id])[:2]
    return tuple(n if id in kept else 0 for id, n in enumerate(q)), q


def draws_colder(q: Weights) -> tuple[Weights, Weights]:
    return tuple(n * n for n in q), q


def records_rounded(q: Weights) -> tuple[Weights, Weights]:
    """Drawn in low precision, recorded in high: the law differs in the last digits only."""
    return tuple(n * 1000 + (1 if id == 0 and n else 0) for id, n in enumerate(q)), q


@pytest.mark.parametrize(
    "mutant", [resample_from_p, match_argmax, residual_swapped, accept_everything_likely]
)
def test_enumeration_catches_a_wrong_judgement(mutant: Judge) -> None:
    assert not is_exact(mutant)


@pytest.mark.parametrize("mutant", [greedy_draft, draws_from_top_2, draws_colder, records_rounded])
def test_enumeration_catches_a_law_that_was_not_drawn_from(mutant: Draft) -> None:
    assert not is_exact(judge, mutant)

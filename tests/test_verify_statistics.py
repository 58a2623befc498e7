"""The laws of what the rules emit, by chi-square; every known mistake in the ratio rule fails.

`Algorithm1` is the ratio rule again, for all samples at once and with one method per decision, so
that each mutant overrides one. The product's rule must give its ids, sample by sample. All samples
are seeded. False alarm of each check: 1e-6.
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats

from outrider.actors.messages import Law, Sampling
from outrider.actors.philox import Tag, uniform, words_torch
from outrider.actors.sampling import draw, draw_with_law, processed
from outrider.actors.verify import Block, ratio

torch.set_num_threads(1)

Ids = NDArray[np.int64]
Laws = NDArray[np.float64]  # [..., vocabulary]
Emitted = tuple[Ids, Ids, NDArray[np.bool_]]  # first ids, second ids, first drafted id accepted

NUM_SAMPLES = 50_000
FALSE_ALARM = 1e-6
VOCABULARY = 6
START = (0, 1)  # the two tokens before the first
SAMPLING = Sampling(0.9, top_k=5)
WIRE_K = 4  # ids of the draft's law that travel


class Toy:
    """A target and a draft whose next token depends on the last two."""

    def __init__(self) -> None:
        rng = np.random.default_rng(12)
        shape = (VOCABULARY, VOCABULARY, VOCABULARY)
        self.target = torch.from_numpy(rng.normal(0, 1.2, shape))
        self.draft = self.target + torch.from_numpy(rng.normal(0, 1.2, shape))
        self.p, self.q, self.q_full = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for context in np.ndindex(VOCABULARY, VOCABULARY):
            ids, probs = processed(self.target[context], SAMPLING)
            self.p[context][ids] = probs
            _, ids, probs = draw_with_law(self.draft[context], SAMPLING, 0, WIRE_K)
            self.q[context][ids] = probs
            self.q_full[context] = self.draft[context].div(SAMPLING.temperature).softmax(-1)


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


class Algorithm1:
    """Leviathan et al., Algorithm 1, over samples whose seeds are 0, 1, 2, ..."""

    def __init__(self, toy: Toy) -> None:
        self.toy = toy

    def emit(self, num_drafted: int) -> Emitted:
        """Emit two tokens per sample, in blocks of `num_drafted` (1 or 2)."""
        before = np.full(NUM_SAMPLES, START[0]), np.full(NUM_SAMPLES, START[1])
        first, accepted = self.step(before, 0)
        second, _ = self.step((before[1], first), 1)
        if num_drafted == 1:
            second = np.where(accepted, self.bonus((before[1], first), 1), second)
        return first, second, accepted

    def step(self, context: tuple[Ids, Ids], position: int) -> tuple[Ids, NDArray[np.bool_]]:
        p, q = self.toy.p[context], self.recorded(context)
        drafted = self.drafted(context, position)
        accepted = self.accepts(p, q, drafted, position)
        return np.where(accepted, drafted, self.corrected(p, q, position)), accepted

    def drafted(self, context: tuple[Ids, Ids], position: int) -> Ids:
        return self.race(self.toy.q[context], Tag.DRAFT_PRIVATE, position)

    def recorded(self, context: tuple[Ids, Ids]) -> Laws:
        return self.toy.q[context]

    def accepts(self, p: Laws, q: Laws, drafted: Ids, position: int) -> NDArray[np.bool_]:
        q_drafted, p_drafted = take(q, drafted), take(p, drafted)
        return (q_drafted > 0) & (self.test(drafted, position) * q_drafted < p_drafted)

    def test(self, drafted: Ids, position: int) -> NDArray[np.float64]:
        return uniforms(Tag.ACCEPT, position)[:, 0]

    def corrected(self, p: Laws, q: Laws, position: int) -> Ids:
        residual = np.maximum(p - q, 0)
        weights = np.where(residual.sum(-1, keepdims=True) > 0, residual, p)
        return self.race(weights, Tag.RESIDUAL, position)

    def bonus(self, context: tuple[Ids, Ids], position: int) -> Ids:
        return self.race(self.toy.p[context], Tag.GUMBEL, position)

    def race(self, weights: Laws, tag: Tag, position: int) -> Ids:
        with np.errstate(divide="ignore"):
            return np.argmax(np.log(weights) - np.log(-np.log(uniforms(tag, position))), -1)


def uniforms(tag: Tag, position: int) -> NDArray[np.float64]:
    seeds = range(NUM_SAMPLES)
    zeros, positions = [0] * NUM_SAMPLES, [position] * NUM_SAMPLES
    noise = words_torch(seeds, zeros, tag, positions, VOCABULARY, "cpu")
    return uniform(noise.numpy().view(np.uint64))


def take(law: Laws, ids: Ids) -> NDArray[np.float64]:
    return np.take_along_axis(law, ids[:, None], -1)[:, 0]


def emit_by_ratio(toy: Toy, num_drafted: int, num_samples: int) -> Emitted:
    """The same two tokens by the product: `draw_with_law` drafts, `ratio` decides."""
    emitted = []
    for seed in range(num_samples):
        sampling = SAMPLING._replace(seed=seed)
        ids = list(START)
        accepted = one_block(toy, ids, 0, num_drafted, sampling)
        if len(ids) < 4:
            one_block(toy, ids, 1, 1, sampling)
        emitted.append((ids[2], ids[3], accepted > 0))
    first, second, kept = zip(*emitted, strict=True)
    return np.array(first), np.array(second), np.array(kept)


def one_block(toy: Toy, ids: list[int], position: int, num_drafted: int, sampling: Sampling) -> int:
    ahead, laws = list(ids), []
    for i in range(num_drafted):
        row = toy.draft[ahead[-2], ahead[-1]]
        drawn, law_ids, probs = draw_with_law(row, sampling, position + i, WIRE_K)
        ahead.append(drawn)
        laws.append((law_ids, probs))
    ends = range(len(ids), len(ahead) + 1)
    logits = torch.stack([toy.target[ahead[end - 2], ahead[end - 1]] for end in ends])
    law = Law(np.array([ids for ids, _ in laws]), np.array([probs for _, probs in laws]))
    drafted = ahead[len(ids) :]
    (accepted,), (next_id,) = ratio(logits, [Block(drafted, position, sampling, law)])
    ids += [*drafted[:accepted], next_id]
    return accepted


def smallest_pvalue(toy: Toy, emitted: Emitted) -> float:
    """Test the first token, pairs, and the second given the first in strata by acceptance."""
    first, second, accepted = emitted
    p_first = toy.p[START]
    p_second = toy.p[START[1]]  # [first, second]
    pair_law = (p_first[:, None] * p_second).ravel()
    pvalues = [goodness(first, p_first), goodness(first * VOCABULARY + second, pair_law)]
    for stratum in (accepted, ~accepted):
        shares = np.bincount(first[stratum], minlength=VOCABULARY) / max(1, stratum.sum())
        cells = (first * VOCABULARY + second)[stratum]
        lost = np.count_nonzero(shares) - 1  # the first token's counts are given
        pvalues.append(goodness(cells, (shares[:, None] * p_second).ravel(), lost))
    return min(pvalues)


def goodness(ids: Ids, law: NDArray[np.float64], lost_degrees: int = 0) -> float:
    """Chi-square goodness of fit; cells of expectation below 5 are merged."""
    counts, expected = np.bincount(ids, minlength=len(law)), law * len(ids)
    if counts[law == 0].any():
        return 0.0
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(stats.chi2.sf(statistic, max(1, len(counts) - 1 - lost_degrees)))


@pytest.mark.parametrize("num_drafted", [1, 2])
def test_the_ratio_rule_emits_the_targets_law(toy: Toy, num_drafted: int) -> None:
    emitted = Algorithm1(toy).emit(num_drafted)
    assert smallest_pvalue(toy, emitted) > FALSE_ALARM
    assert 0.2 < emitted[2].mean() < 0.9  # both strata are populated


@pytest.mark.parametrize(("num_drafted", "num_samples"), [(1, 3000), (2, 3000)])
def test_the_product_emits_the_ids_of_algorithm_1(
    toy: Toy, num_drafted: int, num_samples: int
) -> None:
    emitted = emit_by_ratio(toy, num_drafted, num_samples)
    for ours, expected in zip(emitted, Algorithm1(toy).emit(num_drafted), strict=True):
        np.testing.assert_array_equal(ours, expected[:num_samples])


def test_ratio_accepts_as_often_as_the_laws_overlap(toy: Toy) -> None:
    """Acceptance of one drafted token is the sum of min(p, q); binomial, false alarm 1e-6."""
    _, _, accepted = Algorithm1(toy).emit(1)
    overlap = np.minimum(toy.p[START], toy.q[START]).sum()
    assert stats.binomtest(int(accepted.sum()), NUM_SAMPLES, overlap).pvalue > FALSE_ALARM


class ResamplesFromP(Algorithm1):
    def corrected(self, p: Laws, q: Laws, position: int) -> Ids:
        return self.race(p, Tag.RESIDUAL, position)


class DraftsGreedily(Algorithm1):
    def drafted(self, context: tuple[Ids, Ids], position: int) -> Ids:
        return self.toy.q[context].argmax(-1)


class RecordsTheFullLaw(Algorithm1):
    """Drafts from the top k, compares with the softmax over all ids."""

    def recorded(self, context: tuple[Ids, Ids]) -> Laws:
        return self.toy.q_full[context]


class AcceptsTheArgmax(Algorithm1):
    def accepts(self, p: Laws, q: Laws, drafted: Ids, position: int) -> NDArray[np.bool_]:
        return drafted == p.argmax(-1)

    def corrected(self, p: Laws, q: Laws, position: int) -> Ids:
        return self.race(p, Tag.RESIDUAL, position)


class RedraftsUntilAccepted(Algorithm1):
    """What is accepted in the end follows min(p, q), normalised."""

    def corrected(self, p: Laws, q: Laws, position: int) -> Ids:
        return self.race(np.minimum(p, q), Tag.RESIDUAL, position)


class DraftsColder(Algorithm1):
    """Drafts at temperature 0.7, records 1."""

    def drafted(self, context: tuple[Ids, Ids], position: int) -> Ids:
        return self.race(self.toy.q[context] ** (1 / 0.7), Tag.DRAFT_PRIVATE, position)


class SharesNoiseWithTheResidual(Algorithm1):
    def corrected(self, p: Laws, q: Laws, position: int) -> Ids:
        return self.race(np.maximum(p - q, 0), Tag.DRAFT_PRIVATE, position)


class SharesNoiseWithTheTest(Algorithm1):
    """Tests the drafted id with the very word that made it win the draft's race."""

    def test(self, drafted: Ids, position: int) -> NDArray[np.float64]:
        return take(uniforms(Tag.DRAFT_PRIVATE, position), drafted)


class DropsUnlikelyDrafts(Algorithm1):
    """Looks at the drafted id itself to decide whether it is verified."""

    def step(self, context: tuple[Ids, Ids], position: int) -> tuple[Ids, NDArray[np.bool_]]:
        emitted, accepted = super().step(context, position)
        drafted = self.drafted(context, position)
        dropped = take(self.recorded(context), drafted) < 0.3
        return np.where(dropped, self.bonus(context, position), emitted), accepted & ~dropped


class BonusByArgmax(Algorithm1):
    def bonus(self, context: tuple[Ids, Ids], position: int) -> Ids:
        return self.toy.p[context].argmax(-1)


class BonusUnprocessed(Algorithm1):
    def bonus(self, context: tuple[Ids, Ids], position: int) -> Ids:
        return self.race(self.toy.target[context].softmax(-1).numpy(), Tag.GUMBEL, position)


class BonusFromTheDraft(Algorithm1):
    def bonus(self, context: tuple[Ids, Ids], position: int) -> Ids:
        return self.race(self.toy.q[context], Tag.GUMBEL, position)


class BonusAfterTheOldContext(Algorithm1):
    """Judges the second position as if the first had not been emitted."""

    def bonus(self, context: tuple[Ids, Ids], position: int) -> Ids:
        return super().bonus((np.full_like(context[0], START[0]), context[0]), position)


@pytest.mark.parametrize(
    "mutant",
    [
        ResamplesFromP,
        DraftsGreedily,
        RecordsTheFullLaw,
        AcceptsTheArgmax,
        RedraftsUntilAccepted,
        DraftsColder,
        SharesNoiseWithTheResidual,
        SharesNoiseWithTheTest,
        DropsUnlikelyDrafts,
        BonusByArgmax,
        BonusUnprocessed,
        BonusFromTheDraft,
        BonusAfterTheOldContext,
    ],
)
def test_every_known_mistake_is_caught(toy: Toy, mutant: type[Algorithm1]) -> None:
    assert smallest_pvalue(toy, mutant(toy).emit(1)) < FALSE_ALARM


@pytest.mark.parametrize("distance", [0.3, 1.0, 2.0])
def test_coupled_draws_agree_as_often_as_the_formula_says(distance: float) -> None:
    """Daliri et al.: P[a = b] = sum_i 1 / sum_j max(p_j / p_i, q_j / q_i); binomial, 1e-6."""
    generator = torch.Generator().manual_seed(6)
    target = torch.randn(8, generator=generator, dtype=torch.float64)
    draft = target + distance * torch.randn(8, generator=generator, dtype=torch.float64)
    p, q = target.softmax(-1).numpy(), draft.softmax(-1).numpy()
    agree = float((1 / np.maximum(p / p[:, None], q / q[:, None]).sum(-1)).sum())
    distance_tv = 0.5 * np.abs(p - q).sum()
    assert (1 - distance_tv) / (1 + distance_tv) <= agree <= 1 - distance_tv

    num_draws = 2500
    same = sum(
        draw(target, Sampling(seed=seed), 0) == draw(draft, Sampling(seed=seed), 0)
        for seed in range(num_draws)
    )
    assert stats.binomtest(same, num_draws, agree).pvalue > FALSE_ALARM

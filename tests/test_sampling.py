"""One law, drawn the same by every path: pruned, full, on the host and in torch."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from outrider.actors.messages import Sampling
from outrider.actors.philox import Tag, uniform, words
from outrider.actors.sampling import (
    argmax_rows,
    draw,
    draw_rows,
    draw_rows_torch,
    draw_with_law,
    processed,
    race,
    race_logits,
)

torch.set_num_threads(1)

NO_LAW = [
    torch.tensor([0.0, math.nan, 1.0]),
    torch.tensor([-math.inf, -math.inf, -math.inf]),
    torch.tensor([0.0, math.inf, 1.0]),
]


def oracle_law(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """The law by its definition: one sort, plain sums. Skips examples at the edge of top-p."""
    best = max(logits)
    ranked = sorted(range(len(logits)), key=lambda id: (-logits[id], id))
    ranked = [id for id in ranked if logits[id] > -math.inf]
    if sampling.min_p:
        least = math.log(sampling.min_p)
        ranked = [id for id in ranked if (logits[id] - best) / sampling.temperature >= least]
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    mass = {id: math.exp((logits[id] - best) / sampling.temperature) for id in ranked}
    if sampling.top_p < 1:
        total, before, kept = math.fsum(mass.values()), 0.0, []
        for id in ranked:
            assume(abs(before - sampling.top_p * total) > 1e-12 * total)
            if before >= sampling.top_p * total:
                break
            kept.append(id)
            before += mass[id]
        mass = {id: mass[id] for id in kept}
    total = math.fsum(mass.values())
    return {id: mass[id] / total for id in sorted(mass)}


def full_race(row: np.ndarray, sampling: Sampling, position: int, tag: Tag = Tag.GUMBEL) -> int:
    """Every id of the law scored, in extended precision, without shift or prune."""
    ids = processed(torch.from_numpy(row), sampling)[0]
    noise = uniform(words(sampling.seed, sampling.choice, tag, position, len(row)))[ids]
    scores = row[ids].astype(np.longdouble) / np.longdouble(sampling.temperature)
    return int(ids[np.argmax(scores - np.log(-np.log(noise)).astype(np.longdouble))])


def shapes(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(size)
    peaked = rng.normal(0, 1.5, size)
    peaked[:5] += 15
    lone = np.full(size, -10.0)
    lone[size // 3] = 0
    return {
        "flat": np.zeros(size),
        "spread": rng.normal(0, 3, size),
        "peaked": peaked,
        "tied": rng.integers(0, 4, size).astype(float),
        "forbidden": np.where(rng.random(size) < 0.5, -math.inf, rng.normal(0, 2, size)),
        "lone": lone,
        "huge": rng.normal(0, 1, size) * 1e30,
    }


logit_lists = st.lists(
    st.one_of(st.floats(-20, 20, width=32), st.integers(-2, 2).map(float), st.just(-math.inf)),
    min_size=1,
    max_size=40,
).filter(lambda logits: max(logits) > -math.inf)
sampling_laws = st.builds(
    Sampling,
    temperature=st.sampled_from([0.05, 0.5, 1.0, 3.0, 100.0]),
    top_k=st.integers(0, 45),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
    shaping=st.none(),
)


@settings(max_examples=300, deadline=None)
@given(logit_lists, sampling_laws)
def test_processed_is_the_law_of_its_definition(logits: list[float], sampling: Sampling) -> None:
    expected = oracle_law(logits, sampling)
    ids, probs = processed(torch.tensor(logits, dtype=torch.float64), sampling)
    assert ids.tolist() == list(expected)
    np.testing.assert_allclose(probs, list(expected.values()), rtol=1e-12)
    assert probs.dtype == np.float64


def test_top_k_gives_ties_at_the_border_to_the_smallest_ids() -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0])
    assert processed(logits, Sampling(top_k=3))[0].tolist() == [0, 1, 3]
    assert processed(logits, Sampling(top_k=4))[0].tolist() == [0, 1, 2, 3]
    assert processed(logits, Sampling(top_k=9))[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("top_p", "kept"), [(1e-9, 1), (0.1, 1), (0.11, 2), (0.8, 8), (1.0, 10)])
def test_top_p_keeps_an_id_while_the_mass_before_it_is_below(top_p: float, kept: int) -> None:
    assert processed(torch.zeros(10), Sampling(top_p=top_p))[0].tolist() == list(range(kept))


def test_top_p_acts_on_what_top_k_left() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64).log()
    assert processed(logits, Sampling(top_p=0.65))[0].tolist() == [0, 1]
    assert processed(logits, Sampling(top_k=2, top_p=0.55))[0].tolist() == [0]


def test_min_p_keeps_what_is_likely_beside_the_likeliest_and_acts_first() -> None:
    logits = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64).log()
    assert processed(logits, Sampling(min_p=0.51))[0].tolist() == [0, 2]
    assert processed(logits, Sampling(min_p=0.49))[0].tolist() == [0, 2, 3]
    assert processed(logits, Sampling(min_p=1.0))[0].tolist() == [0]
    assert processed(torch.zeros(4), Sampling(min_p=1.0))[0].tolist() == [0, 1, 2, 3]
    # Of .4 and .3 alone, .4 is more than half of the mass: top-p sees what min-p left.
    assert processed(logits, Sampling(min_p=0.51, top_p=0.55))[0].tolist() == [0]
    assert processed(logits, Sampling(top_p=0.55))[0].tolist() == [0, 2]
    assert processed(logits, Sampling(0.5, min_p=0.51))[0].tolist() == [0, 2]
    assert processed(logits, Sampling(0.5, min_p=0.6))[0].tolist() == [0]  # (.3/.4)^2 < .6


def test_temperature_acts_before_top_p() -> None:
    logits = torch.tensor([0.6, 0.4], dtype=torch.float64).log()
    assert processed(logits, Sampling(temperature=1.0, top_p=0.6 + 1e-9))[0].tolist() == [0, 1]
    assert processed(logits, Sampling(temperature=0.1, top_p=0.6 + 1e-9))[0].tolist() == [0]


def test_top_p_of_a_flat_large_vocabulary_is_exact() -> None:
    assert len(processed(torch.zeros(100_000), Sampling(top_p=0.9))[0]) == 90_000


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("shape", shapes(1))
def test_the_pruned_race_has_the_winner_of_the_full_race(
    shape: str, dtype: type[np.floating]
) -> None:
    for size in (2, 5000):
        row = shapes(size)[shape].astype(dtype)
        if shape == "forbidden":
            row[0] = 0
        for temperature in (1e-6, 1e-3, 0.5, 1.0, 1.5, 100.0):
            for top_k, top_p in ((0, 1.0), (3, 1.0), (0, 0.9), (50, 0.5)):
                sampling = Sampling(temperature, top_k, top_p, seed=11, choice=2)
                for position in range(3):
                    drawn = draw(torch.from_numpy(row), sampling, position)
                    assert drawn == full_race(row, sampling, position), (sampling, position)
            sampling = Sampling(temperature, seed=11, min_p=0.1)
            assert draw(torch.from_numpy(row), sampling, 9) == full_race(row, sampling, 9)


def test_the_prune_gives_way_when_the_likely_ids_are_unlucky() -> None:
    """The maximum draws the lowest noise, and an id that was skipped scores just above it."""
    quiet_but_high = int(2**64 * math.exp(-math.exp(-5.99)))
    row = np.array([0.0, -9.001, -9.001])
    noise = np.array([0, 2**63, quiet_but_high], dtype=np.uint64)
    scores = row - np.log(-np.log(uniform(noise)))
    assert scores.argmax() == 2
    assert race_logits(row, 1.0, noise) == 2
    assert race_logits(row.astype(np.float32), 1.0, noise) == 2


def test_random_noise_never_separates_pruned_from_full() -> None:
    rng = np.random.default_rng(3)
    for _ in range(2000):
        row = rng.normal(0, rng.uniform(0, 8), 30).astype(np.float32)
        noise = rng.integers(0, 2**64, 30, dtype=np.uint64)
        noise[rng.integers(30)] = rng.integers(0, 2**40)
        temperature = 10 ** rng.uniform(-3, 1)
        scores = row.astype(np.float64) / temperature - np.log(-np.log(uniform(noise)))
        assert race_logits(row, temperature, noise) == scores.argmax()


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1e-3])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1)).double()
    logits += torch.where(logits == logits.amax(-1, keepdim=True), 1.0, 0.0)
    samplings = [Sampling(temperature, seed=i) for i in range(50)]
    assert draw_rows(logits, samplings, [0] * 50) == logits.argmax(-1).tolist()
    assert draw_rows(logits, [Sampling(0.0)] * 50, [0] * 50) == logits.argmax(-1).tolist()


def test_greedy_ties_go_to_the_smallest_id() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]])
    assert argmax_rows(logits) == [1, 0]
    assert draw(logits[0], Sampling(0.0, seed=3), 5) == 1


def test_draws_follow_the_law() -> None:
    """Chi-square of 6,000 draws over seeds and positions; false alarm 1e-6."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(5)) * 2
    sampling = Sampling(0.8, top_k=9, top_p=0.97)
    ids, probs = processed(logits, sampling)
    drawn = draw_rows(
        logits.expand(6_000, -1),
        [sampling._replace(seed=i // 10) for i in range(6_000)],
        [i % 10 for i in range(6_000)],
    )
    counts = np.bincount(drawn, minlength=12)
    assert counts.sum() == counts[ids].sum()
    assert stats.chisquare(counts[ids], probs * 6_000).pvalue > 1e-6


MIXED = [
    Sampling(0.0, seed=1),
    Sampling(1.0, seed=2),
    Sampling(1e-6, seed=3),
    Sampling(0.7, 5, 1.0, seed=4),
    Sampling(1.3, 0, 0.8, seed=2**64 - 1),
    Sampling(100.0, 40, 0.9, seed=6, choice=7),
    Sampling(0.0, 1, 0.5, seed=7),
    Sampling(1.0, seed=8, min_p=0.05),
    Sampling(1.4, 6, 0.9, seed=9, min_p=0.02),
    Sampling(0.0, seed=10, min_p=1.0),
    Sampling(0.3, 0, 0.6, seed=11, min_p=1.0),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_torch_path_equals_the_host_path(dtype: torch.dtype) -> None:
    logits = torch.randn(165, 777, generator=torch.Generator().manual_seed(2), dtype=dtype) * 3
    logits[::3] = logits[::3].round()  # ties
    logits[::4, :300] = -math.inf
    samplings, positions = MIXED * 15, list(range(165))
    for tag in Tag:
        expected = draw_rows(logits, samplings, positions, tag)
        assert draw_rows_torch(logits, samplings, positions, tag) == expected


def test_a_row_is_drawn_as_if_alone() -> None:
    logits = torch.randn(len(MIXED), 200, generator=torch.Generator().manual_seed(4))
    positions = list(range(len(MIXED)))
    alone = [draw(*address) for address in zip(logits, MIXED, positions, strict=True)]
    assert draw_rows(logits, MIXED, positions) == alone
    assert draw_rows(logits.flip(0), MIXED[::-1], positions[::-1]) == alone[::-1]


@pytest.mark.parametrize("drawer", [draw_rows, draw_rows_torch])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", NO_LAW)
def test_logits_without_a_finite_maximum_are_an_error(
    drawer: Callable[[Tensor, list[Sampling], list[int]], list[int]],
    temperature: float,
    row: Tensor,
) -> None:
    logits = torch.stack([torch.zeros(3), row])
    with pytest.raises(ValueError, match="not finite"):
        drawer(logits, [Sampling(temperature)] * 2, [0, 0])
    with pytest.raises(ValueError, match="not finite"):
        processed(row, Sampling(temperature))


def test_half_precision_is_refused() -> None:
    with pytest.raises(AssertionError, match="upcast"):
        draw(torch.zeros(3, dtype=torch.bfloat16), Sampling(), 0)


@pytest.mark.parametrize("sampling", [s for s in MIXED if s.temperature != 1e-6])
@pytest.mark.parametrize("k", [1, 4, 64, 500])
def test_a_draft_samples_from_the_law_it_ships(sampling: Sampling, k: int) -> None:
    logits = torch.randn(100, generator=torch.Generator().manual_seed(8)).double() * 2
    drawn, ids, probs = draw_with_law(logits, sampling, 3, k)
    assert len(ids) == len(probs) == min(k, 100)
    assert len(set(ids.tolist())) == len(ids)
    assert ids.min() >= 0
    assert ids.max() < 100
    assert probs.sum() == pytest.approx(1, abs=1e-15)

    p = dict(zip(*map(np.ndarray.tolist, processed(logits, sampling)), strict=True))
    likeliest = sorted(p, key=lambda id: (-p[id], id))[:k]
    assert sorted(ids[probs > 0].tolist()) == sorted(likeliest)
    kept = sum(p[id] for id in likeliest)
    for id, prob in zip(ids.tolist(), probs.tolist(), strict=True):
        assert prob == pytest.approx(p[id] / kept if id in likeliest else 0, abs=1e-14)

    law = ids[probs > 0], probs[probs > 0]
    assert drawn == race(*law, sampling, 3, Tag.DRAFT_PRIVATE)


def test_a_law_that_fits_is_the_processed_law_to_the_bit() -> None:
    logits = torch.randn(1000, generator=torch.Generator().manual_seed(9)).double()
    for sampling in (Sampling(1.1, top_k=20), Sampling(0.6, 30, 0.8)):
        ids, probs = processed(logits, sampling)
        _, law_ids, law_probs = draw_with_law(logits, sampling, 0, 32)
        np.testing.assert_array_equal(law_ids[: len(ids)], ids)
        np.testing.assert_array_equal(law_probs[: len(ids)], probs)


def test_a_draft_under_the_ratio_rule_does_not_use_the_targets_noise() -> None:
    logits = torch.zeros(50)
    private = [draw_with_law(logits, Sampling(seed=i), 0, 50)[0] for i in range(200)]
    shared = [draw(logits, Sampling(seed=i), 0) for i in range(200)]
    same = sum(a == b for a, b in zip(private, shared, strict=True))
    assert same < 30  # about 4 by chance; false alarm below 1e-15

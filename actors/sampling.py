"""One law for the next token, and draws from it: temperature, min-p, top-k, top-p, then a race.

A draw is a Gumbel race, argmax of logit/T - ln(-ln u), whose u depend on (seed, choice, position,
id) alone: whoever runs it on the same logits gets the same id. No probability is cut off for
speed: what the race skips cannot win. Probabilities, cumulative masses and scores are float64,
ties go to the smallest id, and -inf marks forbidden ids. On a GPU the same draw runs there, in
batches. Knows nothing of drafts, models or sequences.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.actors.messages import Sampling
from outrider.actors.philox import Tag, uniform, uniform_torch, words, words_torch

Ids = NDArray[np.int64]
Probs = NDArray[np.float64]
Logits = NDArray[np.floating]

# The exact prune. An id with (logit - max)/T <= -REACH and Gumbel noise < LOUD scores below
# LOUD - REACH; if the best id scored is above that, with a margin for rounding, no other can win.
_REACH = 9.0
_LOUD = 6.0
_LOUD_WORD = np.uint64(int(2**64 * math.exp(-math.exp(-_LOUD))))
_ENOUGH = _LOUD - _REACH + 0.1

_TOP_P_REACHES = (8.0, 12.0, math.inf)  # how far below the maximum top-p looks, in nats
_ROWS_ON_DEVICE = 32  # rows drawn at once on a GPU: bounds the float64 and int64 copies of logits


def draw(logits: Tensor, sampling: Sampling, position: int, tag: Tag = Tag.GUMBEL) -> int:
    """Draw one id from logits [V], float32 or float64; ValueError if no maximum is finite."""
    return draw_rows(logits[None], [sampling], [position], tag)[0]


def draw_rows(
    logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int], tag: Tag = Tag.GUMBEL
) -> list[int]:
    """Draw one id from each row of logits [P, V]; a row's draw does not depend on the others."""
    _check_dtype(logits)
    if all(sampling.temperature == 0 for sampling in samplings):
        return argmax_rows(logits)
    if logits.device.type != "cpu":
        return draw_rows_torch(logits, samplings, positions, tag)
    rows = zip(logits.numpy(force=True), samplings, positions, strict=True)
    return [_draw_on_host(row, sampling, position, tag) for row, sampling, position in rows]


def draw_rows_torch(
    logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int], tag: Tag = Tag.GUMBEL
) -> list[int]:
    """Draw as `draw_rows` does on the host, by whole rows and without copying logits to it."""
    drawn: list[int] = []
    for start in range(0, len(logits), _ROWS_ON_DEVICE):
        part = slice(start, start + _ROWS_ON_DEVICE)
        winners, tops = _race_on_device(logits[part], samplings[part], positions[part], tag)
        _check_tops(tops.numpy(force=True))
        drawn.extend(map(int, winners.tolist()))
    return drawn


def argmax_rows(logits: Tensor) -> list[int]:
    """Return the greedy id of each row of logits [P, V]."""
    _check_dtype(logits)
    if logits.device.type != "cpu":
        best = logits.argmax(-1)
        _check_tops(logits.gather(-1, best[:, None]).numpy(force=True))
        return list(map(int, best.tolist()))
    rows = logits.numpy(force=True)  # numpy's argmax is five times as fast as torch's here
    winners = rows.argmax(-1)
    _check_tops(rows[np.arange(len(rows)), winners])
    return list(map(int, winners))


def processed(logits: Tensor, sampling: Sampling) -> tuple[Ids, Probs]:
    """Return the law p of logits [V]: its ids, ascending, and their probabilities, float64."""
    return _law(logits, sampling, len(logits))


def draw_with_law(
    logits: Tensor, sampling: Sampling, position: int, k: int
) -> tuple[int, Ids, Probs]:
    """Draw a draft's id for the ratio rule, with the law q it was drawn from.

    q is `processed` cut to its `k` likeliest ids and renormalised; its arrays have min(k, V)
    entries, padded by other ids of probability 0. The noise is the draft's own, never the target's.
    """
    k = min(k, len(logits))
    ids, probs = _law(logits, sampling, k)
    drawn = race(ids, probs, sampling, position, Tag.DRAFT_PRIVATE)
    padding = np.delete(np.arange(k), ids[ids < k])[: k - len(ids)]
    return drawn, np.concatenate([ids, padding]), np.concatenate([probs, np.zeros(len(padding))])


def race(ids: Ids, weights: Probs, sampling: Sampling, position: int, tag: Tag) -> int:
    """Draw one of `ids` (ascending) with probability in proportion to its weight."""
    running = weights > 0
    ids, weights = ids[running], weights[running]
    noise = words(sampling.seed, sampling.choice, tag, position, int(ids[-1]) + 1)[ids]
    return int(ids[np.argmax(np.log(weights) + _gumbel(noise))])


def _draw_on_host(row: Logits, sampling: Sampling, position: int, tag: Tag) -> int:
    if sampling.temperature == 0:
        winner = int(row.argmax())
        _check_tops(row[winner])
        return winner
    _check_tops(row.max())
    noise = words(sampling.seed, sampling.choice, tag, position, len(row))
    if not _truncates(sampling, len(row)):
        return race_logits(row, sampling.temperature, noise)
    ids = _support(row, sampling)
    return int(ids[race_logits(row[ids], sampling.temperature, noise[ids])])


def race_logits(row: Logits, temperature: float, noise: NDArray[np.uint64]) -> int:
    """Return the index that wins the race over all of `row`, having scored few of them."""
    top = row.max()
    # Rounding the threshold to the row's dtype keeps every entry above it: rounding is monotone.
    with np.errstate(over="ignore"):
        threshold = (np.float64(top) - _REACH * temperature).astype(row.dtype)
    near = np.flatnonzero((row >= threshold) | (noise >= _LOUD_WORD))
    scores = _scaled(row[near], top, temperature) + _gumbel(noise[near])
    if scores.max() > _ENOUGH:
        return int(near[scores.argmax()])
    return int((_scaled(row, top, temperature) + _gumbel(noise)).argmax())


def _law(logits: Tensor, sampling: Sampling, k: int) -> tuple[Ids, Probs]:
    """Return the processed law, cut to its k likeliest ids and renormalised."""
    _check_dtype(logits)
    if sampling.temperature == 0:
        return np.array(argmax_rows(logits[None])), np.ones(1)
    row: Logits = logits.numpy(force=True)
    _check_tops(row.max())
    ids = _support(row, sampling)
    if len(ids) > k:
        ids = ids[_largest(row[ids], k)]
    ids = ids[row[ids] > -np.inf]
    mass = _mass(row[ids], sampling.temperature)
    return ids, mass / mass.sum()


def _support(row: Logits, sampling: Sampling) -> Ids:
    """Return the ids, ascending, that min-p, then top-k, then top-p leave."""
    ids = np.arange(len(row))
    if sampling.min_p > 0:
        scaled = _scaled(row, row.max(), sampling.temperature)
        ids = np.flatnonzero(scaled >= math.log(sampling.min_p))
    if 0 < sampling.top_k < len(ids):
        ids = ids[_largest(row[ids], sampling.top_k)]
    if sampling.top_p < 1:
        ids = ids[_nucleus(row[ids], sampling.temperature, sampling.top_p)]
    return ids


def _truncates(sampling: Sampling, vocabulary_size: int) -> bool:
    return sampling.min_p > 0 or 0 < sampling.top_k < vocabulary_size or sampling.top_p < 1


def _largest(values: Logits, k: int) -> Ids:
    """Return the indexes, ascending, of the k largest values; ties to the smallest index."""
    border = np.partition(values, len(values) - k)[len(values) - k]
    above = np.flatnonzero(values > border)
    tied = np.flatnonzero(values == border)[: k - len(above)]
    return np.sort(np.concatenate([above, tied]))


def _nucleus(values: Logits, temperature: float, top_p: float) -> Ids:
    """Return the indexes, ascending, of the fewest likeliest values whose mass reaches top_p."""
    mass = _mass(values, temperature)
    goal = top_p * mass.sum()
    for reach in _TOP_P_REACHES:  # sort as few as suffice
        falling = np.sort(mass[mass >= math.exp(-reach)])[::-1]
        reached = np.cumsum(falling)
        if reached[-1] >= goal:
            break
    # An id is kept while the mass before it is below the goal; the first always is.
    num_kept = 1 + int(np.searchsorted(reached, goal))
    return _largest(values, min(num_kept, len(values)))


def _mass(row: Logits, temperature: float) -> Probs:
    """Return the law's weights, float64; the largest is 1."""
    return np.exp(_scaled(row, row.max(), temperature))


def _scaled(row: Logits, top: np.floating, temperature: float) -> Probs:
    """Return (row - top) / temperature in float64: at most 0, so a tiny temperature is safe."""
    scaled = row.astype(np.float64)
    with np.errstate(over="ignore"):
        scaled -= top
        scaled /= temperature
    return scaled


def _gumbel(noise: NDArray[np.uint64]) -> Probs:
    return -np.log(-np.log(uniform(noise)))


def _race_on_device(
    logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int], tag: Tag
) -> tuple[Tensor, Tensor]:
    """Return the winner and the largest logit of each row, both [P]."""
    device = logits.device
    seeds, choices = [s.seed for s in samplings], [s.choice for s in samplings]
    noise = words_torch(seeds, choices, tag, positions, logits.shape[-1], device)
    gumbel = -(-uniform_torch(noise).log()).log()
    temperature = torch.tensor(
        [s.temperature for s in samplings], dtype=torch.float64, device=device
    )[:, None]
    tops = logits.amax(-1)
    greedy = temperature == 0
    scaled = (logits.double() - tops.double()[:, None]) / temperature.masked_fill(greedy, 1.0)
    scores = scaled + gumbel.masked_fill(greedy, 0.0)
    cut = [i for i, s in enumerate(samplings) if _truncates(s, logits.shape[-1])]
    if cut:
        outside = _outside_support(logits[cut], scaled[cut], [samplings[i] for i in cut])
        scores[cut] = scores[cut].masked_fill(outside, -math.inf)
    return scores.argmax(-1), tops


def _outside_support(logits: Tensor, scaled: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Return a mask [P, V], true where `_support` has no id."""
    vocabulary_size = logits.shape[-1]
    falling = logits.sort(dim=-1, descending=True, stable=True).indices
    top_k = [s.top_k or vocabulary_size for s in samplings]
    rank = torch.arange(vocabulary_size, device=logits.device)
    outside = rank >= torch.tensor(top_k, device=logits.device)[:, None]
    scaled = scaled.gather(-1, falling)
    least = [math.log(s.min_p) if s.min_p > 0 else -math.inf for s in samplings]
    outside |= scaled < torch.tensor(least, dtype=torch.float64, device=logits.device)[:, None]
    mass = scaled.exp().masked_fill(outside, 0.0)
    reached = mass.cumsum(-1)
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=logits.device)
    goal = (top_p * mass.sum(-1)).masked_fill(top_p >= 1, math.inf)[:, None]
    outside[:, 1:] |= reached[:, :-1] >= goal
    return torch.empty_like(outside).scatter_(-1, falling, outside)


def _check_dtype(logits: Tensor) -> None:
    assert logits.dtype in (torch.float32, torch.float64), f"logits must be upcast: {logits.dtype}"


def _check_tops(tops: NDArray[np.floating] | np.floating) -> None:
    if not np.isfinite(tops).all():
        raise ValueError(
            "no token can be drawn: the largest logit of a row is not finite "
            "(NaN or infinite logits, or every id forbidden); check the model's weights and dtype"
        )

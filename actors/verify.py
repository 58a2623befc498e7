"""The target's decision on drafted blocks: how many drafted ids stay, and its own id after them.

Three rules of one signature. *Greedy* and *coupled* choose the target's own id at every position
and keep drafted ids while they are equal, so the output is plain decoding's, whatever was drafted.
Draft and target of the coupled rule share the race's noise (Daliri et al., arXiv 2408.07978): that
is exact because what is emitted is always the target's draw. Under *ratio* (Leviathan et al.,
arXiv 2211.17192, Alg. 1) the drafted id itself is emitted, so its noise must be independent of the
test and of the correction: the draft draws with DRAFT_PRIVATE. A block never depends on others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.actors.messages import Law, Sampling
from outrider.actors.philox import Tag, uniform, word
from outrider.actors.sampling import argmax_rows, draw, draw_rows, processed, race

Probs = NDArray[np.float64]


class Block(NamedTuple):
    """Drafted ids of one sequence, to be judged with len(drafted) + 1 rows of logits."""

    drafted: list[int]
    position: int  # output position of the first choice
    sampling: Sampling
    law: Law | None = None  # what the drafted ids were drawn from; more rows than ids are ignored


Decisions = tuple[list[int], list[int]]  # by block: drafted ids accepted, and the next id
Rule = Callable[[Tensor, Sequence[Block]], Decisions]


def verify(logits: Tensor, blocks: Sequence[Block]) -> Decisions:
    """Decide each block of logits [sum(len(drafted) + 1), V] by the rule that its request needs."""
    accepted: list[int] = []
    next_ids: list[int] = []
    start = 0
    for rule, run in groupby(blocks, key=_rule_of):
        members = list(run)
        stop = start + sum(len(block.drafted) + 1 for block in members)
        lengths, ids = rule(logits[start:stop], members)
        accepted += lengths
        next_ids += ids
        start = stop
    assert start == len(logits), f"{len(logits)} rows of logits for {start} choices"
    return accepted, next_ids


def greedy(logits: Tensor, blocks: Sequence[Block]) -> Decisions:
    """Keep the longest prefix that the target's argmax repeats."""
    return _match_all(argmax_rows(logits), blocks)


def coupled(logits: Tensor, blocks: Sequence[Block]) -> Decisions:
    """Keep the longest prefix that the target's own seeded draws repeat."""
    if logits.device.type != "cpu":
        return coupled_at_once(logits, blocks)
    return _columns(
        _match(block.drafted, _draws(logits[rows], block)) for rows, block in _placed(blocks)
    )


def coupled_at_once(logits: Tensor, blocks: Sequence[Block]) -> Decisions:
    """Decide as `coupled` does, all positions in one batch: what suits a GPU."""
    samplings = [block.sampling for block in blocks for _ in range(len(block.drafted) + 1)]
    positions = [block.position + i for block in blocks for i in range(len(block.drafted) + 1)]
    return _match_all(draw_rows(logits, samplings, positions), blocks)


def ratio(logits: Tensor, blocks: Sequence[Block]) -> Decisions:
    """Keep drafted ids while u < p/q, then draw from the residual (p - q)+, or a bonus from p.

    Works on the host in float64. Promises the target's law, not plain decoding's ids.
    """
    return _columns(_judge_block(logits[rows], block) for rows, block in _placed(blocks))


def judge(p: Probs, q: Probs, drafted: int, u: float) -> Probs | None:
    """Accept `drafted`, drawn from q, by returning None; else return the correction's weights.

    p and q are dense [V]; u is uniform in (0, 1) and independent of everything else.
    """
    if q[drafted] > 0 and u * q[drafted] < p[drafted]:
        return None
    residual: Probs = np.maximum(p - q, 0.0)
    return residual if residual.sum() > 0 else p  # p equals q up to rounding


def _judge_block(rows: Tensor, block: Block) -> tuple[int, int]:
    sampling, vocabulary_size = block.sampling, rows.shape[-1]
    for i, drafted in enumerate(block.drafted):
        assert block.law is not None, "the ratio rule needs the law of every drafted id"
        position = block.position + i
        p = _dense(*processed(rows[i], sampling), vocabulary_size)
        q = _dense(block.law.ids[i], block.law.probs[i], vocabulary_size)
        test = word(sampling.seed, sampling.choice, Tag.ACCEPT, position, 0)
        u = float(uniform(np.array(test, dtype=np.uint64)))
        weights = judge(p, q, drafted, u)
        if weights is not None:
            ids = np.arange(vocabulary_size)
            return i, race(ids, weights, sampling, position, Tag.RESIDUAL)
    bonus = len(block.drafted)
    return bonus, draw(rows[bonus], sampling, block.position + bonus)


def _dense(ids: NDArray[np.int64], probs: Probs, vocabulary_size: int) -> Probs:
    """Spread a sparse law over [V]; padding, and ids the target lacks, carry nothing."""
    dense = np.zeros(vocabulary_size)
    held = (probs > 0) & (ids < vocabulary_size)
    np.add.at(dense, ids[held], probs[held])
    return dense


def _draws(rows: Tensor, block: Block) -> Iterator[int]:
    """Yield the target's own ids, each drawn when it is asked for."""
    for i, row in enumerate(rows):
        yield draw(row, block.sampling, block.position + i)


def _match_all(choices: list[int], blocks: Sequence[Block]) -> Decisions:
    return _columns(_match(block.drafted, choices[rows]) for rows, block in _placed(blocks))


def _match(drafted: list[int], choices: Iterable[int]) -> tuple[int, int]:
    """Return the length of the longest drafted prefix equal to the choices, and the next choice."""
    accepted = 0
    for choice in choices:
        if accepted == len(drafted) or choice != drafted[accepted]:
            return accepted, choice
        accepted += 1
    raise AssertionError(f"{len(drafted)} drafted ids need a choice after {accepted}")


def _rule_of(block: Block) -> Rule:
    if block.sampling.temperature == 0:
        return greedy
    return coupled if block.law is None else ratio


def _placed(blocks: Sequence[Block]) -> Iterator[tuple[slice, Block]]:
    """Yield each block with its rows of logits."""
    start = 0
    for block in blocks:
        stop = start + len(block.drafted) + 1
        yield slice(start, stop), block
        start = stop


def _columns(decisions: Iterable[tuple[int, int]]) -> Decisions:
    pairs = list(decisions)
    return [accepted for accepted, _ in pairs], [next_id for _, next_id in pairs]

"""One pass of the target, and what it says: forward, shape, verify, and tell logprobs.

The ids of every row are logged beside the KV cache, for options that depend on them: a cache of the
committed ids like that one, cut where a pass begins and rebuilt by the same prefill. Knows neither
Ray nor clocks.
"""

from collections import defaultdict
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.actors.messages import Outcomes, Rows, TokenLogprob
from outrider.actors.shaping import shape_rows
from outrider.actors.verify import Block, verify


class Forward(Protocol):
    """What is asked of a model: see `Model.forward`."""

    def forward(
        self, row: list[int], start: list[int], ids: list[list[int]], num_logits: list[int]
    ) -> Tensor:
        """Run ids on rows; logits after each of the last `num_logits` tokens of every block."""
        ...


class Verifier:
    """Runs passes on one model and decides their blocks."""

    def __init__(self, model: Forward) -> None:
        self._model = model
        self._logs: defaultdict[int, list[int]] = defaultdict(list)  # by row, the ids it holds

    def forward(self, rows: Rows) -> Tensor:
        """Run the pass alone: logits of each block's choices, in order."""
        num_logits = [
            drafted + 1 if decides else 0
            for drafted, decides in zip(rows.num_drafted, rows.decides, strict=True)
        ]
        return self._model.forward(rows.row, rows.start, rows.ids, num_logits)

    def decide(self, rows: Rows) -> Outcomes:
        """Run the pass and decide every block of it."""
        logits = self.forward(rows)
        for row, start, ids in zip(rows.row, rows.start, rows.ids, strict=True):
            assert start <= len(self._logs[row]), "the log of a row is as long as its cache"
            self._logs[row][start:] = ids
        deciding = [i for i, decides in enumerate(rows.decides) if decides]
        blocks = [
            Block(_drafted(rows, i), rows.position[i], rows.sampling[i], rows.law[i])
            for i in deciding
        ]
        shaped = self._shape(logits, rows, deciding)
        outcomes = Outcomes([0] * len(rows.row), [-1] * len(rows.row), [[] for _ in rows.row])
        first = 0  # row of logits
        for i, block, kept, own in zip(deciding, blocks, *verify(shaped, blocks), strict=True):
            outcomes.accepted[i], outcomes.next_id[i] = kept, own
            num_top = rows.num_logprobs[i]
            if num_top is not None:
                ids = [*block.drafted[:kept], own]
                outcomes.logprobs[i] = tell_logprobs(logits[first : first + len(ids)], ids, num_top)
            first += len(block.drafted) + 1
        return outcomes

    def _shape(self, logits: Tensor, rows: Rows, deciding: list[int]) -> Tensor:
        """Shape each choice's logits by the ids before it, drafted ones included."""
        samplings, texts, positions = [], [], []
        for i in deciding:
            sampling, log = rows.sampling[i], self._logs[rows.row[i]]
            num_committed = len(log) - rows.num_drafted[i]
            for known in range(num_committed, len(log) + 1):
                samplings.append(sampling)
                texts.append(log[:known] if sampling.shaping else [])
                positions.append(rows.position[i] + known - num_committed)
        return shape_rows(logits, samplings, texts, positions)


def tell_logprobs(logits: Tensor, ids: list[int], num_top: int) -> list[TokenLogprob]:
    """Return the log-probability of ids[i] under logits[i], and the `num_top` likeliest ids there.

    Natural logarithms, in float64; ties go to the smaller id, and forbidden ids are not told.
    """
    laws = torch.log_softmax(logits.double(), -1)
    own = laws.gather(-1, torch.tensor(ids, device=laws.device)[:, None])[:, 0].tolist()
    tops: list[list[tuple[int, float]]] = [[] for _ in ids]
    num_top = min(num_top, laws.shape[-1])
    if num_top > 0:
        least = laws.topk(num_top).values[:, -1:]  # which of equal ids topk takes is not said
        rows, candidates = torch.nonzero((laws >= least) & laws.isfinite(), as_tuple=True)
        found = rows, candidates, laws[rows, candidates]
        row, id_, logprob = (column.numpy(force=True) for column in found)
        for at in np.lexsort((id_, -logprob, row)):
            if len(top := tops[row[at]]) < num_top:
                top.append((int(id_[at]), float(logprob[at])))
    return [TokenLogprob(logprob, tuple(top)) for logprob, top in zip(own, tops, strict=True)]


def _drafted(rows: Rows, i: int) -> list[int]:
    return rows.ids[i][len(rows.ids[i]) - rows.num_drafted[i] :]

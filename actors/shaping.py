"""What requests do to the logits before temperature: masks, bans, bias and penalties.

A row's shaping is a pure function of the ids before its token, committed or drafted, so a block is
shaped position by position as plain decoding would be. In vLLM's order: allowed ids, bad words and
end ids before `min_tokens`, bias, repetition penalty, frequency and presence penalty. What would
leave nothing to draw is not applied: a mask without a possible id, or all bans of one position.
Forbidden logits (-inf) stay forbidden, finite ones stay finite. Ids that the logits do not have are
ignored. Nothing is drawn here: see `sampling`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.actors.messages import Sampling, Shaping

Ids = NDArray[np.int64]
Values = NDArray[np.float64]
Places = tuple[Tensor, Tensor]  # rows and ids of some logits

_FORBIDDEN = float("-inf")


class _Row(NamedTuple):
    """One row to shape."""

    place: int  # among the shaped ones
    shaping: Shaping
    text: list[int]  # prompt and output before the token to draw
    position: int  # output ids in it

    @property
    def num_prompt_ids(self) -> int:
        return len(self.text) - self.position


def shape_rows(
    logits: Tensor,
    samplings: Sequence[Sampling],
    texts: Sequence[list[int]],
    positions: Sequence[int],
) -> Tensor:
    """Return logits [P, V], float32 or float64, shaped as each row's request asks.

    texts[i] holds the prompt and the positions[i] output ids before the token of row i; it is not
    read where nothing is to be shaped. Where that is everywhere, `logits` itself comes back.
    """
    where = [i for i, sampling in enumerate(samplings) if sampling.shaping is not None]
    if not where:
        return logits
    rows = [
        _Row(place, shaping, texts[i], positions[i])
        for place, i in enumerate(where)
        if (shaping := samplings[i].shaping) is not None
    ]
    shaped = logits.clone()
    part = logits[where]
    part = _mask(part, rows)
    part = _ban(part, rows)
    _add_bias(part, rows)
    _penalise(part, rows)
    shaped[where] = part
    return shaped


def _mask(logits: Tensor, rows: list[_Row]) -> Tensor:
    masked = [row for row in rows if row.shaping.allowed_ids]
    if not masked:
        return logits
    arrays: dict[int, Ids] = {}  # by identity: the rows of one block share a long tuple
    for row in masked:
        if id(row.shaping) not in arrays:
            arrays[id(row.shaping)] = np.array(row.shaping.allowed_ids, np.int64)
    places, _ = _locate(logits, ((row.place, arrays[id(row.shaping)]) for row in masked))
    kept = logits.clone()
    kept[[row.place for row in masked]] = _FORBIDDEN
    kept[places] = logits[places]
    return _unless_empty(kept, logits)


def _ban(logits: Tensor, rows: list[_Row]) -> Tensor:
    banned = {row.place: ids for row in rows if (ids := list(_banned_ids(row)))}
    if not banned:
        return logits
    places, _ = _locate(logits, ((i, np.array(ids, np.int64)) for i, ids in banned.items()))
    kept = logits.clone()
    kept[places] = _FORBIDDEN
    return _unless_empty(kept, logits)


def _banned_ids(row: _Row) -> Iterator[int]:
    """Yield what would complete a bad word within the output, and ends that come too early."""
    for *beginning, last in row.shaping.bad_words:
        size = len(beginning)
        if size <= row.position and row.text[len(row.text) - size :] == beginning:
            yield last
    if row.position < row.shaping.min_tokens:
        yield from row.shaping.end_ids


def _unless_empty(kept: Tensor, before: Tensor) -> Tensor:
    """Take rows as they were before where nothing is left of them."""
    return torch.where(kept.amax(-1, keepdim=True) == _FORBIDDEN, before, kept)


def _add_bias(logits: Tensor, rows: list[_Row]) -> None:
    biases = [(row.place, dict(row.shaping.logit_bias)) for row in rows if row.shaping.logit_bias]
    if biases:
        places, (bias,) = _locate(logits, ((place, *_arrays(added)) for place, added in biases))
        _write(logits, places, logits[places].double() + bias)


def _penalise(logits: Tensor, rows: list[_Row]) -> None:
    """Divide or multiply what was seen, then subtract by how often the output holds it."""
    rows = [row for row in rows if _penalises(row.shaping)]
    if not rows:
        return
    cells = []
    for row, counts in zip(rows, _count_ids(rows), strict=True):
        shaping, (ids, times) = row.shaping, _arrays(counts)
        factor = np.full(len(times), shaping.repetition_penalty)
        less = shaping.frequency_penalty * times + shaping.presence_penalty * (times > 0)
        cells.append((row.place, ids, factor, less))
    places, (factors, lesses) = _locate(logits, cells)
    values = logits[places].double()
    values = torch.where(values > 0, values / factors, values * factors)
    _write(logits, places, values - lesses)


def _penalises(shaping: Shaping) -> bool:
    counted = shaping.frequency_penalty != 0 or shaping.presence_penalty != 0
    return counted or shaping.repetition_penalty != 1


def _count_ids(rows: list[_Row]) -> Iterator[dict[int, int]]:
    """Yield by row how often the output holds each id seen; 0 = only the prompt does.

    The rows of a block are counted one from the other; what is yielded is reused.
    """
    before: _Row | None = None
    counts: dict[int, int] = {}
    for row in rows:
        if before is not None and _is_next(row, before):
            last = row.text[-1]
            counts[last] = counts.get(last, 0) + 1
        else:
            counts = dict.fromkeys(row.text[: row.num_prompt_ids], 0)
            counts.update(Counter(row.text[row.num_prompt_ids :]))
        before = row
        yield counts


def _is_next(row: _Row, before: _Row) -> bool:
    return (
        row.num_prompt_ids == before.num_prompt_ids
        and row.position == before.position + 1
        and row.text[:-1] == before.text
    )


def _locate(
    logits: Tensor, cells: Iterable[tuple[int, Ids, *tuple[Values, ...]]]
) -> tuple[Places, list[Tensor]]:
    """Bring (row, ids, values, ...) of many rows to the device: the places, and each column."""
    rows, ids, *columns = zip(*cells, strict=True)
    row = np.repeat(np.array(rows, np.int64), [len(each) for each in ids])
    id_ = np.concatenate(ids)
    known = (id_ >= 0) & (id_ < logits.shape[-1])

    def bring(values: NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(values[known]).to(logits.device)

    return (bring(row), bring(id_)), [bring(np.concatenate(column)) for column in columns]


def _write(logits: Tensor, places: Places, values: Tensor) -> None:
    """Store float64 values, held within the type's range, except where an id is forbidden."""
    most = torch.finfo(logits.dtype).max
    before = logits[places]
    values = values.clamp(-most, most).to(logits.dtype)
    logits[places] = torch.where(before == _FORBIDDEN, before, values)


def _arrays(values: Mapping[int, float]) -> tuple[Ids, Values]:
    return (
        np.fromiter(values, np.int64, len(values)),
        np.fromiter(values.values(), np.float64, len(values)),
    )

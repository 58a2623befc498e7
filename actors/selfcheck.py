"""The check at load: a ragged cached pass must give the logits of a plain forward.

Some architectures run packed and are silently wrong; this is where they are refused. It rolls
back, scrambles rows, joins a prefill chunk to a round, and goes beyond a small sliding window.
Takes functions, so it knows neither the network nor the cache.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from outrider.cluster.errors import ConfigError

# Forward passes of several rows: (row, start, ids) -> logits of every token [tokens, vocabulary].
RunRows = Callable[[list[int], list[int], list[list[int]]], torch.Tensor]
RunPlainly = Callable[[list[int]], torch.Tensor]  # ids -> logits of every token, no cache

# The largest root-mean-square difference over one block of one row, relative to the deviation of
# the row's logits. Measured on models of 0.1 to 1.5 billion weights, right passes differ by 0 in
# float64, 6e-6 in float32, 1e-2 in float16 and 2e-2 to 9e-2 in bfloat16; a lost mask, a lost
# window or keys one slot off by 4e-1 and more. Some models take the softmax in float32 even in
# float64.
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}
_LONGEST = 640  # tokens per text: a larger window is only checked by its announced size


class _Round(NamedTuple):
    """One pass: per text its tokens [start, end), or a wrong block of that extent."""

    extents: list[tuple[int, int]]
    is_wrong: bool = False


def check_rows(
    run: RunRows,
    plain: RunPlainly,
    token_ids: Sequence[int],
    *,
    num_rows: int,
    max_model_len: int,
    windows: Sequence[int],
    dtype: torch.dtype,
) -> None:
    """ConfigError unless `run` agrees with `plain` on up to three ragged rows.

    `token_ids` are ids to build texts from. The rows are left with tokens in them.
    """
    beyond = [window + 12 for window in windows if window + 12 <= _LONGEST]
    length = min(max_model_len, max([24, *beyond]))
    rows = list(range(num_rows))[:3][::-1]
    texts = [_text(token_ids, seed, length) for seed in range(len(rows))]
    wrong = [_text(token_ids, seed + len(rows), length) for seed in range(len(rows))]
    expected = [plain(text) for text in texts]
    found: list[list[tuple[int, torch.Tensor]]] = [[] for _ in rows]
    for extents, is_wrong in _rounds(length):
        parts = [
            (text, (start, min(end, length)))
            for text, (start, end) in enumerate(extents[: len(rows)])
            if start < min(end, length)
        ]
        if not parts:
            continue
        source = wrong if is_wrong else texts
        logits = run(
            [rows[text] for text, _ in parts],
            [start for _, (start, _) in parts],
            [source[text][start:end] for text, (start, end) in parts],
        )
        if is_wrong:
            continue
        sizes = [end - start for _, (start, end) in parts]
        for (text, (start, _)), part in zip(parts, torch.split(logits, sizes), strict=True):
            found[text].append((start, part))
    error = max(map(_difference, found, expected))
    if not error <= TOLERANCE[dtype]:  # NaN is no agreement either
        raise ConfigError(
            f"packed passes differ from plain ones by {error:.2g} of the logits' deviation "
            f"(at most {TOLERANCE[dtype]:g} is rounding): this architecture cannot be served"
        )


def _rounds(length: int) -> list[_Round]:
    """Passes that, for each of three texts, cover all its tokens, with rollbacks between them.

    Extents that are empty in a short text are left out.
    """
    half, most = max(1, length // 2), max(1, length - 4)
    return [
        _Round([(0, most), (0, half), (0, 0)]),
        _Round([(most, length), (half, half + 1), (0, half)], is_wrong=True),
        _Round([(most, most + 1), (half, most), (0, 3)]),
        _Round([(most + 1, length), (most, most + 1), (3, most)]),
        _Round([(0, 0), (most + 1, length), (most, length)]),
    ]


def _text(token_ids: Sequence[int], seed: int, length: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(token_ids), (length,), generator=generator).tolist()
    return [token_ids[pick] for pick in picks]


def _difference(found: list[tuple[int, torch.Tensor]], expected: torch.Tensor) -> float:
    """The worst block's, as `TOLERANCE` defines it; NaN if anything is."""
    deviation = expected.std(dim=-1).square().mean().sqrt()
    differences = [
        (part - expected[start : start + len(part)]).square().mean().sqrt() / deviation
        for start, part in found
    ]
    return torch.stack(differences).max().item()

"""Random numbers without state: a Philox4x64-10 word for each (seed, choice, tag, position, id).

A word depends on its address alone, so a draw can be repeated anywhere: on a draft, on a target, in
another batch, after a crash. The words are those of numpy's C generator; `words_torch` computes
the same bits on any device. Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011). Knows nothing of tokens, laws or sequences.
"""

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_KEY_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW_32 = 0xFFFFFFFF
_ALL_64 = 0xFFFFFFFFFFFFFFFF
_MANTISSA_BITS = 53
_BELOW_ONE = 1.0 - 2.0**-_MANTISSA_BITS  # the largest float64 below 1


class Tag(IntEnum):
    """What a word decides. Two decisions never share one: a shared word would tie them together."""

    GUMBEL = 1  # the race for a token, the same on draft and target
    ACCEPT = 2  # the ratio rule's test of one drafted token (word of id 0)
    RESIDUAL = 3  # the ratio rule's correction after a rejection
    DRAFT_PRIVATE = 4  # a draft's own race under the ratio rule


def key64(seed: int) -> int:
    """Return any int as 64 bits of key: two's complement, modulo 2**64."""
    return seed & _ALL_64


def word(seed: int, choice: int, tag: Tag, position: int, id: int) -> int:
    """Return the 64-bit word at one address; `seed` and `choice` are in [0, 2**64)."""
    return int(_generator(seed, choice, tag, position, id // 4).random_raw(4)[id % 4])


def words(seed: int, choice: int, tag: Tag, position: int, count: int) -> NDArray[np.uint64]:
    """Return the words of ids 0..count-1 as uint64 [count]; about 6 ns each."""
    raw: NDArray[np.uint64] = _generator(seed, choice, tag, position, 0).random_raw(count)
    return raw


def words_torch(
    seeds: Sequence[int],
    choices: Sequence[int],
    tag: Tag,
    positions: Sequence[int],
    count: int,
    device: torch.device | str,
) -> Tensor:
    """Return `words` of each (seed, choice, position) as int64 bit patterns [len(seeds), count]."""

    def column(values: Sequence[int]) -> Tensor:
        return torch.tensor([_signed(value) for value in values], device=device)[:, None]

    blocks = 1 + torch.arange((count + 3) // 4, device=device)[None, :]
    zero = torch.zeros_like(blocks)
    counter = (blocks, column(positions), zero + int(tag), zero)
    lanes = philox4x64(counter, (column(seeds), column(choices)))
    return torch.stack(lanes, dim=-1).flatten(1)[:, :count]


def philox4x64(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the four words of each counter; all are int64 bit patterns that broadcast together."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _signed(_KEY_STEPS[0]), k1 + _signed(_KEY_STEPS[1])
    return c0, c1, c2, c3


def uniform(words: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return words as float64 in the open interval (0, 1): the middles of 2**53 equal cells."""
    cells = (words >> np.uint64(64 - _MANTISSA_BITS)).astype(np.float64)
    # The middles of cells in the upper half are ties that round to even; the last would become 1.
    return np.minimum((cells + 0.5) * 2.0**-_MANTISSA_BITS, _BELOW_ONE)


def uniform_torch(words: Tensor) -> Tensor:
    """Return int64 bit patterns as `uniform` does, bit for bit."""
    cells = _shift_right(words, 64 - _MANTISSA_BITS).double()
    return ((cells + 0.5) * 2.0**-_MANTISSA_BITS).clamp_(max=_BELOW_ONE)


def _generator(seed: int, choice: int, tag: Tag, position: int, block: int) -> np.random.Philox:
    # numpy counts up before its first block: its counter 0 yields the block at counter 1.
    return np.random.Philox(
        key=np.array([seed, choice], dtype=np.uint64),
        counter=np.array([block, position, tag, 0], dtype=np.uint64),
    )


def _multiply(constant: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 64 bits of constant * word, by 32-bit limbs."""
    constant_high, constant_low = constant >> 32, constant & _LOW_32
    high, low = _shift_right(word, 32), word & _LOW_32
    # No sum of these overflows 64 unsigned bits: (2**32 - 1)**2 + 2 * (2**32 - 1) = 2**64 - 1.
    middle = constant_low * high + _shift_right(constant_low * low, 32)
    cross = constant_high * low + (middle & _LOW_32)
    top = constant_high * high + _shift_right(middle, 32) + _shift_right(cross, 32)
    return top, word * _signed(constant)


def _shift_right(word: Tensor, bits: int) -> Tensor:
    """Shift as if unsigned: torch's `>>` on int64 copies the sign."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the bits of a uint64."""
    return value - (1 << 64) if value >> 63 else value

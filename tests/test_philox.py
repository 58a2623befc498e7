"""The words are Philox4x64-10, the same from numpy, torch and plain integers."""

import numpy as np
import pytest
import torch

from outrider.actors.philox import (
    Tag,
    key64,
    philox4x64,
    uniform,
    uniform_torch,
    word,
    words,
    words_torch,
)

ALL_64 = 2**64 - 1
ADDRESSES = [
    (0, 0, Tag.GUMBEL, 0),
    (1, 0, Tag.ACCEPT, 7),
    (ALL_64, 3, Tag.RESIDUAL, 123_456),
    (0x8000_0000_0000_0000, 1, Tag.DRAFT_PRIVATE, 2**33),
]

# Random123's kat_vectors: counter, key, words.
KNOWN_ANSWERS = [
    (
        [0, 0, 0, 0],
        [0, 0],
        [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B],
    ),
    (
        [ALL_64] * 4,
        [ALL_64] * 2,
        [0x87B092C3013FE90B, 0x438C3C67BE8D0224, 0x9CC7D7C69CD777B6, 0xA09CAEBF594F0BA0],
    ),
    (
        [0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89],
        [0x452821E638D01377, 0xBE5466CF34E90C6C],
        [0xA528F45403E61D95, 0x38C72DBD566E9788, 0xA5A1610E72FD18B5, 0x57BD43B5E52B7FE6],
    ),
]


def reference_block(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x64-10 in unbounded integers, as the paper writes it."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        product0, product1 = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (
            (product1 >> 64) ^ c1 ^ k0,
            product1 & ALL_64,
            (product0 >> 64) ^ c3 ^ k1,
            product0 & ALL_64,
        )
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & ALL_64, (k1 + 0xBB67AE8584CAA73B) & ALL_64
    return [c0, c1, c2, c3]


def bits(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.uint64).view(np.int64))


def unsigned(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy().view(np.uint64)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_torch_gives_the_known_answers(
    counter: list[int], key: list[int], expected: list[int]
) -> None:
    c, k = bits(counter), bits(key)
    lanes = philox4x64((c[0], c[1], c[2], c[3]), (k[0], k[1]))
    assert [int(unsigned(lane[None])[0]) for lane in lanes] == expected
    assert reference_block(counter, key) == expected


@pytest.mark.parametrize(("seed", "choice", "tag", "position"), ADDRESSES)
def test_words_are_those_of_the_specified_address(
    seed: int, choice: int, tag: Tag, position: int
) -> None:
    expected = [
        reference_block([1 + id // 4, position, tag, 0], [seed, choice])[id % 4] for id in range(11)
    ]
    assert words(seed, choice, tag, position, 11).tolist() == expected
    assert [word(seed, choice, tag, position, id) for id in range(11)] == expected


@pytest.mark.parametrize("count", [1, 4, 4099])
def test_torch_equals_numpy_bit_for_bit(count: int) -> None:
    for tag in Tag:
        seeds, choices, _, positions = map(list, zip(*ADDRESSES, strict=True))
        batch = unsigned(words_torch(seeds, choices, tag, positions, count, "cpu"))
        for row, seed, choice, position in zip(batch, seeds, choices, positions, strict=True):
            np.testing.assert_array_equal(row, words(seed, choice, tag, position, count))


def test_every_part_of_the_address_changes_the_words() -> None:
    base = words(5, 0, Tag.GUMBEL, 3, 8)
    for other in (
        words(6, 0, Tag.GUMBEL, 3, 8),
        words(5, 1, Tag.GUMBEL, 3, 8),
        words(5, 0, Tag.RESIDUAL, 3, 8),
        words(5, 0, Tag.GUMBEL, 4, 8),
    ):
        assert not np.intersect1d(base, other).size


def test_any_int_is_a_seed() -> None:
    assert key64(-1) == ALL_64
    assert key64(-(2**63)) == 2**63
    assert key64(2**64 + 5) == 5
    assert key64(-(2**64) - 1) == ALL_64
    assert key64(42) == 42


def test_uniforms_lie_strictly_inside_the_unit_interval() -> None:
    extremes = np.array([0, 1, 2**11, 2**63, ALL_64 - 2**11, ALL_64], dtype=np.uint64)
    values = uniform(extremes)
    assert values[0] == 2.0**-54
    assert values[3] == 0.5
    assert values[-1] == 1 - 2.0**-53
    assert np.isfinite(-np.log(-np.log(values))).all()


def test_uniforms_of_torch_equal_those_of_numpy() -> None:
    some = np.concatenate([words(1, 0, Tag.GUMBEL, 0, 1000), np.array([0, ALL_64], np.uint64)])
    as_torch = uniform_torch(torch.from_numpy(some.view(np.int64)))
    np.testing.assert_array_equal(as_torch.numpy(), uniform(some))


def test_uniforms_are_uniform() -> None:
    """Chi-square over 64 cells, 100,000 words; false alarm 1e-6: chi2(63) exceeds 133 so rarely."""
    counts = np.bincount((uniform(words(9, 0, Tag.GUMBEL, 1, 100_000)) * 64).astype(int))
    expected = 100_000 / 64
    assert ((counts - expected) ** 2 / expected).sum() < 133

import pytest
import torch

from outrider.actors.attention import Pass, running
from outrider.actors.cache import RowCache


def write(cache: RowCache, row: int, start: int, value: float, num_tokens: int = 1) -> None:
    states = torch.full((1, 2, num_tokens, 3), value)
    cache.begin([row], [start], [num_tokens])
    with running(Pass([row], [start], [num_tokens], padded=False)):
        cache.update(states, -states, 0)
    cache.finish([row], [num_tokens])


def test_nothing_is_allocated_before_the_first_pass() -> None:
    cache = RowCache(num_layers=2, num_rows=3, max_len=8)
    assert cache.allocated_bytes == 0
    write(cache, 0, 0, 1.0)
    assert cache.allocated_bytes == 2 * 3 * 2 * 8 * 3 * 4  # one layer so far


def test_a_token_lies_in_the_slot_of_its_position() -> None:
    cache = RowCache(1, 3, 8)
    write(cache, 1, 0, 1.0, num_tokens=4)
    write(cache, 1, 4, 5.0)
    keys = cache.row_layers[0].keys
    assert keys is not None
    assert keys[1, 0, :, 0].tolist() == [1, 1, 1, 1, 5, 0, 0, 0]
    assert not keys[[0, 2]].any()
    assert cache.lengths == [0, 5, 0]


def test_rollback_moves_nothing_and_the_next_write_takes_over() -> None:
    cache = RowCache(1, 1, 8)
    write(cache, 0, 0, 1.0, num_tokens=6)
    cache.cut(0, 2)
    assert cache.lengths == [2]
    write(cache, 0, 2, 9.0)
    keys = cache.row_layers[0].keys
    assert keys is not None
    assert keys[0, 0, :3, 0].tolist() == [1, 1, 9]


def test_a_row_cannot_be_cut_to_more_than_it_holds() -> None:
    with pytest.raises(IndexError, match="row 0 holds 0 tokens"):
        RowCache(1, 1, 8).cut(0, 1)


@pytest.mark.parametrize(("start", "count"), [(4, 1), (-1, 1), (3, 6)])
def test_a_gap_or_an_overflow_is_an_error_and_changes_nothing(start: int, count: int) -> None:
    cache = RowCache(1, 2, 8)
    write(cache, 0, 0, 1.0, num_tokens=5)
    write(cache, 1, 0, 1.0, num_tokens=3)
    with pytest.raises(IndexError, match="row 1"):
        cache.begin([0, 1], [2, start], [1, count])
    assert cache.lengths == [5, 3]

"""Streams: every delta reaches its request in one item per round, and every end ends it."""

import pytest

from outrider.actors.messages import Sampling
from outrider.actors.requests import Delta
from outrider.actors.sequence import Sequence, StopRules
from outrider.actors.streams import Streams
from outrider.actors.text import TextStream


def sequence(id: int, index: int = 0) -> Sequence:
    rules = StopRules(max_tokens=9)
    text = TextStream(lambda ids: "", [1], (), include_stop=False)
    return Sequence(id, index, [1], Sampling(seed=0), rules, text)


def delta(of: Sequence, *ids: int, last: bool = False) -> tuple[Sequence, Delta]:
    return of, Delta(of.index, list(ids), "", 0, finish_reason="length" if last else None)


async def test_a_round_is_one_item_of_each_stream_and_the_last_of_all_ends_it() -> None:
    streams = Streams()
    a, b, c = sequence(1), sequence(2, 1), sequence(3)
    pair, single = streams.open([a, b]), streams.open([c])
    streams.send([delta(a, 4), delta(c, 5, last=True), delta(b, 6, last=True)])
    streams.forget([2, 3])
    streams.send([delta(a, 7, 8, last=True)])
    streams.forget([1])
    assert [[(d.index, d.ids) for d in item] async for item in pair] == [
        [(0, [4]), (1, [6])],
        [(0, [7, 8])],
    ]
    assert [[d.ids for d in item] async for item in single] == [[[5]]]
    assert len(streams) == 0


async def test_an_error_ends_a_stream_with_all_its_sequences_and_no_other() -> None:
    streams = Streams()
    a, b, done, other = sequence(1), sequence(2, 1), sequence(3, 2), sequence(4)
    triple, single = streams.open([a, b, done]), streams.open([other])
    streams.send([delta(a, 4), delta(done, 9, last=True)])
    streams.forget([3])
    ended = streams.fail([b, a, done], ValueError("lost"))
    assert [s.id for s in ended] == [1, 2], "the finished one did not fail"
    streams.forget(s.id for s in ended)
    items = []
    with pytest.raises(ValueError, match="lost"):
        async for item in triple:
            items.append(item)
    assert [[d.ids for d in item] for item in items] == [[[4], [9]]]
    assert list(streams.alive) == [4]
    streams.send([delta(other, 2, last=True)])
    assert [[d.ids for d in item] async for item in single] == [[[2]]]


def test_what_was_given_up_is_not_ended_again() -> None:
    streams = Streams()
    a, b = sequence(1), sequence(2, 1)
    streams.open([a, b])
    streams.forget([1])
    assert streams.living([a, b]) == [b]
    streams.forget([1, 2, 99])
    assert streams.fail([a, b], ValueError()) == []
    assert len(streams) == 0

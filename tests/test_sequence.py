"""Sequences: where answers end, what counts, and what becomes of proposals that come late."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from outrider.actors.messages import Law, Sampling, TokenLogprob
from outrider.actors.requests import Delta
from outrider.actors.sequence import NO_BLOCK, Block, Proposal, Sequence, StopRules
from outrider.actors.text import TextStream

PROMPT = [7, 8, 9]
STOP_ID, END_ID = 5, 6


def decode(ids: list[int]) -> str:
    """Id 1 reads `b`, id 2 `c`, ...: a string per id."""
    return "".join(chr(97 + id) for id in ids)


def make(rules: StopRules, wanted: int | None = None) -> Sequence:
    return Sequence(
        1,
        0,
        PROMPT,
        Sampling(seed=3),
        rules,
        TextStream(decode, PROMPT, rules.stop, include_stop=rules.include_stop),
        seed=-1,
        num_speculative_tokens=wanted,
    )


@dataclass
class Answer:
    ids: list[int]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None


def plain(stream: list[int], rules: StopRules) -> Answer:
    """The answer by its definition: one id after another."""
    for count in range(1, len(stream) + 1):
        ids, id = stream[:count], stream[count - 1]
        shown = ids if rules.include_stop else ids[:-1]
        if count >= rules.min_tokens:
            if id in rules.stop_ids:
                return Answer(ids, decode(shown), "stop", id)
            if id in rules.end_ids:
                return Answer(ids, decode(shown), "stop", None)
            # Every id is one character: what this one completes ends the text so far.
            text = decode(ids)
            ends = [s for s in rules.stop if text.endswith(s)]
            if ends:
                stop = max(ends, key=len)
                return Answer(ids, text if rules.include_stop else text[: -len(stop)], "stop", stop)
        if count == rules.max_tokens:
            return Answer(ids, decode(ids), "length", None)
    return Answer(stream, decode(stream), None, None)


def commit_all(sequence: Sequence, stream: list[int], sizes: list[int]) -> list[Delta]:
    """Commit `stream` in blocks: `sizes[i]` drafted ids accepted, then one of the target's own."""
    deltas = []
    done = 0
    for size in sizes * len(stream):
        if sequence.finish_reason is not None or done + size + 1 > len(stream):
            break
        part = stream[done : done + size + 1]
        rejected = [99] * (size % 2)  # ids after the accepted ones must never appear
        deltas.append(sequence.commit(Block("d", part[:-1] + rejected), size, part[-1]))
        done += size + 1
    return deltas


rules = st.builds(
    StopRules,
    max_tokens=st.integers(1, 12),
    end_ids=st.sampled_from([frozenset[int](), frozenset({END_ID}), frozenset({END_ID, STOP_ID})]),
    stop_ids=st.sampled_from([frozenset[int](), frozenset({STOP_ID})]),
    stop=st.lists(st.text("bcde", min_size=1, max_size=3), max_size=2).map(tuple),
    min_tokens=st.integers(0, 8),
    include_stop=st.booleans(),
)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 1, 2, STOP_ID, END_ID]), min_size=1, max_size=14),
    rules,
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
)
def test_an_answer_is_the_same_however_its_ids_are_cut_into_blocks(
    stream: list[int], rules: StopRules, sizes: list[int]
) -> None:
    sequence = make(rules)
    deltas = commit_all(sequence, stream, sizes)
    ids = [id for delta in deltas for id in delta.ids]
    want = plain(stream if sequence.finish_reason else ids, rules)
    assert ids == want.ids
    assert sequence.committed == PROMPT + want.ids
    assert (sequence.finish_reason, sequence.stop_reason) == (want.finish_reason, want.stop_reason)
    text = "".join(delta.text for delta in deltas)
    assert text == want.text if want.finish_reason else want.text.startswith(text)
    for delta in deltas[:-1]:
        assert (delta.finish_reason, delta.speculation, delta.num_passes) == (None, None, 0)


ENDS = {
    "end id": (StopRules(99, end_ids=frozenset({END_ID})), [END_ID], None, 1),
    "stop id": (StopRules(99, stop_ids=frozenset({STOP_ID})), [STOP_ID], STOP_ID, 1),
    "stop id that is an end id too": (
        StopRules(99, end_ids=frozenset({STOP_ID}), stop_ids=frozenset({STOP_ID})),
        [STOP_ID],
        STOP_ID,
        1,
    ),
    "stop string": (StopRules(99, stop=("e",)), [4], "e", 1),
    "stop string over two ids": (StopRules(99, stop=("de",)), [3, 4], "de", 2),
}


@pytest.mark.parametrize("at", range(5))
@pytest.mark.parametrize("end", ENDS)
def test_the_end_is_found_at_every_place_of_a_block(end: str, at: int) -> None:
    rules, ending, stop_reason, hidden = ENDS[end]
    ids = [1] * at + ending
    block = ids + [2] * (8 - len(ids))
    sequence = make(rules)
    delta = sequence.commit(Block("d", block[:-1]), 7, block[-1])
    assert delta.ids == ids
    assert delta.text == decode(ids[: len(ids) - hidden])
    assert (delta.finish_reason, delta.stop_reason, delta.seed) == ("stop", stop_reason, -1)
    assert sequence.committed == PROMPT + ids
    # Counted as verified, before the cut.
    assert delta.speculation is sequence.counts
    assert (sequence.counts.num_draft_tokens, sequence.counts.num_accepted_tokens) == (7, 7)
    assert delta.num_passes == 1


@pytest.mark.parametrize("limit", range(1, 7))
def test_max_tokens_cuts_a_block_and_its_last_id_may_still_stop(limit: int) -> None:
    block = Block("d", [1, 2, 3, 4, 1])
    delta = make(StopRules(limit)).commit(block, 5, 2)
    assert delta.ids == [1, 2, 3, 4, 1, 2][:limit]
    assert (delta.text, delta.finish_reason) == (decode(delta.ids), "length")
    last = frozenset({delta.ids[-1]})
    if limit not in (5, 6):  # there the id stands earlier too
        stopped = make(StopRules(limit, stop_ids=last)).commit(block, 5, 2)
        assert (stopped.ids, stopped.finish_reason) == (delta.ids, "stop")


def test_text_held_for_a_stop_string_comes_out_when_another_rule_ends_the_answer() -> None:
    by_length = make(StopRules(2, stop=("bcd",))).commit(Block("d", [1]), 1, 2)
    assert (by_length.text, by_length.finish_reason) == ("bc", "length")
    by_id = make(StopRules(9, frozenset({END_ID}), stop=("bcd",)))
    delta = by_id.commit(Block("d", [1, 2]), 2, END_ID)
    assert (delta.ids, delta.text, delta.stop_reason) == ([1, 2, END_ID], "bc", None)


@pytest.mark.parametrize("min_tokens", range(6))
@pytest.mark.parametrize("end", ["end id", "stop id", "stop string"])
def test_nothing_ends_an_answer_before_min_tokens_wherever_blocks_end(
    min_tokens: int, end: str
) -> None:
    rules, ending, _, _ = ENDS[end]
    rules = replace(rules, min_tokens=min_tokens)
    for size in range(6):
        deltas = commit_all(make(rules), [*ending * 12], [size])
        ids = [id for delta in deltas for id in delta.ids]
        assert len(ids) == max(min_tokens, 1)
        assert "".join(delta.text for delta in deltas) == decode(ids[:-1])


def test_a_stop_string_completed_too_early_is_text_and_no_part_of_a_later_match() -> None:
    rules = StopRules(99, stop=("c", "bcd"), min_tokens=3)
    assert make(rules).commit(Block("d", [1, 2]), 2, 4).finish_reason is None
    delta = make(rules).commit(Block("d", [1, 2, 4]), 3, 2)
    assert (delta.ids, delta.text, delta.stop_reason) == ([1, 2, 4, 2], "bce", "c")
    delta = make(rules).commit(Block("d", [1, 2]), 2, 3)
    assert (delta.text, delta.stop_reason) == ("", "bcd")  # it begins before, ends in time


def test_logprobs_come_one_for_each_id_that_is_told() -> None:
    told = [TokenLogprob(-float(i), ()) for i in range(4)]
    rules = StopRules(9, stop_ids=frozenset({STOP_ID}))
    sequence = make(rules)
    sequence.num_logprobs = 0
    assert sequence.commit(Block("d", [1, 2]), 1, 3, told[:2]).logprobs == told[:2]
    delta = sequence.commit(Block("d", [1, STOP_ID, 2]), 3, 3, told)
    assert (delta.ids, delta.logprobs) == ([1, STOP_ID], told[:2])
    assert make(rules).commit(NO_BLOCK, 0, 1).logprobs is None


def test_stop_strings_begin_in_the_answer_not_in_the_prompt() -> None:
    delta = make(StopRules(9, stop=(decode([PROMPT[-1], 1]),))).commit(NO_BLOCK, 0, 1)
    assert delta.finish_reason is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(0, 4))
def test_one_committed_id_is_pending_after_each_pass(sizes: list[int], rejected: int) -> None:
    sequence = make(StopRules(99))
    for size in sizes:
        cached = len(sequence.committed) + size
        sequence.commit(Block("d", [1] * size + [2] * rejected), size, 3)
        assert (sequence.num_cached, sequence.num_pending) == (cached, 1)
    assert sequence.num_passes == len(sizes)
    counts = sequence.counts
    assert counts.num_draft_tokens == sum(sizes) + rejected * len(sizes)
    assert counts.num_accepted_tokens == sum(sizes)
    assert counts.num_drafts == sum(size + rejected > 0 for size in sizes)


@pytest.mark.parametrize(
    ("max_tokens", "wanted", "configured", "length"),
    [
        (9, None, 4, 4),
        (9, 2, 4, 2),
        (9, 0, 4, 0),
        (4, None, 4, 3),  # with the target's own id, four
        (1, None, 4, 0),
        (3, 8, 4, 2),
    ],
)
def test_a_draft_leaves_room_for_the_targets_own_id(
    max_tokens: int, wanted: int | None, configured: int, length: int
) -> None:
    assert make(StopRules(max_tokens), wanted).draft_length(configured) == length


def law(num_ids: int) -> Law:
    return Law(
        np.arange(2 * num_ids).reshape(num_ids, 2), np.linspace(0, 1, 2 * num_ids).reshape(-1, 2)
    )


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 1), min_size=1, max_size=5),
    st.lists(st.integers(0, 1), max_size=5),
    st.integers(1, 8),
    st.booleans(),
)
@example([0, 1, 0], [1], 5, True)
@example([0, 1, 0], [0], 2, True)
@example([0, 1], [0, 1, 1], 5, False)
@example([0, 1], [0], 1, False)
def test_a_late_proposal_is_cut_to_what_still_fits_or_dropped_with_its_reason(
    proposed: list[int], since: list[int], room: int, with_law: bool
) -> None:
    sequence = make(StopRules(len(since) + room))
    base = len(sequence.committed)
    sequence.proposal = Proposal("d", base, proposed, law(len(proposed)) if with_law else None)
    for id in since:
        sequence.commit(NO_BLOCK, 0, id)
    reason = sequence.salvage()
    rest = proposed[len(since) :][: room - 1]
    if proposed[: len(since)] != since[: len(proposed)]:
        assert reason == "mismatch"
    elif len(proposed) > len(since) and room > 1:
        assert reason is None
        assert sequence.proposal is not None
        assert sequence.proposal.base == len(sequence.committed)
        assert sequence.salvage() is None  # a second time changes nothing
    else:
        assert reason == ("no_room" if room == 1 else "too_late")
    block = sequence.take_block()
    assert sequence.proposal is None
    if reason is not None:
        assert block == NO_BLOCK
        return
    assert (block.draft, block.ids) == ("d", rest)
    if with_law:
        assert block.law is not None
        for kept, column in zip(block.law, law(len(proposed)), strict=True):
            assert np.array_equal(kept, column[len(since) :][: len(rest)])
    else:
        assert block.law is None


def test_nothing_held_is_nothing_dropped() -> None:
    sequence = make(StopRules(9))
    assert sequence.salvage() is None
    assert sequence.take_block() == NO_BLOCK


def test_the_callers_prompt_is_not_touched() -> None:
    prompt = list(PROMPT)
    sequence = Sequence(1, 0, prompt, Sampling(), StopRules(9), TextStream(decode, prompt))
    sequence.commit(NO_BLOCK, 0, 1)
    assert (prompt, sequence.seed, sequence.position) == (PROMPT, 0, 1)

"""Prompt lookup against its definition, by brute force."""

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.actors.lookup import PromptLookup


def look_up(committed: list[int], shortest: int, longest: int, num_ids: int) -> list[int]:
    """Longest n-gram at the end that occurred before, its latest occurrence, copied on."""
    for size in range(min(longest, len(committed)), shortest - 1, -1):
        gram = committed[len(committed) - size :]
        for end in range(len(committed) - 1, size - 1, -1):
            if committed[end - size : end] == gram:
                text = list(committed)
                for i in range(num_ids):
                    text.append(text[end + i])
                return text[len(committed) :]
    return []


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 3),
    st.integers(0, 3),
    st.lists(st.integers(1, 5), max_size=20),
    st.integers(0, 6),
)
def test_proposals_follow_the_definition_while_the_text_grows(
    text: list[int], shortest: int, more: int, steps: list[int], num_ids: int
) -> None:
    lookup = PromptLookup(shortest, shortest + more)
    length = 1
    for step in [*steps, 30]:
        committed = text[:length]
        want = look_up(committed, shortest, shortest + more, num_ids)
        assert lookup.propose(1, committed, num_ids) == want
        assert lookup.propose(1, committed, num_ids) == want  # asking twice changes nothing
        length = min(length + step, len(text))


def test_a_repeating_text_is_continued_past_its_end() -> None:
    assert PromptLookup(2, 5).propose(0, [9, 1, 2, 3, 1, 2], 7) == [3, 1, 2, 3, 1, 2, 3]
    assert PromptLookup(1, 5).propose(0, [4, 4], 3) == [4, 4, 4]


def test_the_longest_ngram_wins_over_a_later_one_then_the_latest_wins() -> None:
    assert PromptLookup(1, 2).propose(0, [1, 2, 7, 3, 2, 8, 1, 2], 1) == [7]
    assert PromptLookup(1, 2).propose(0, [2, 7, 2, 8, 5, 2], 1) == [8]


def test_nothing_is_proposed_when_nothing_recurs_or_what_recurs_is_too_short() -> None:
    assert PromptLookup(1, 3).propose(0, [1, 2, 3], 4) == []
    assert PromptLookup(2, 3).propose(0, [5, 1, 6, 1], 4) == []
    assert PromptLookup(1, 3).propose(0, [1], 4) == []


def test_sequences_do_not_see_one_another_and_are_forgotten() -> None:
    lookup = PromptLookup(1, 2)
    assert lookup.propose(0, [1, 2, 1], 1) == [2]
    assert lookup.propose(1, [3, 1], 1) == []
    assert len(lookup) == 2
    lookup.forget([0, 7])
    assert len(lookup) == 1
    assert lookup.propose(0, [5, 1], 1) == []


def test_the_committed_ids_are_not_touched() -> None:
    committed = [1, 2, 1]
    PromptLookup(1, 2).propose(0, committed, 3)
    assert committed == [1, 2, 1]

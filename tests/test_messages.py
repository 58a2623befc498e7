"""Messages: columns of equal length, checked at birth, that travel by pickle; and plain counts."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from outrider.actors.messages import Contexts, Law, Outcomes, Proposals, Rows, Sampling
from outrider.actors.requests import SpeculationCounts
from outrider.cluster.errors import OutriderError, OverloadedError, RequestError

LAW = Law(np.array([[1, 2]]), np.array([[0.25, 0.75]]))
COLUMNS: list[tuple[type[Any], dict[str, list[Any]]]] = [
    (
        Contexts,
        {
            "sequence": [1],
            "epoch": [0],
            "start": [2],
            "ids": [[3]],
            "position": [0],
            "num_tokens": [4],
            "sampling": [Sampling()],
        },
    ),
    (Proposals, {"sequence": [1], "epoch": [0], "base": [3], "ids": [[4]], "law": [None]}),
    (
        Rows,
        {
            "row": [0],
            "start": [2],
            "ids": [[3, 4]],
            "num_drafted": [1],
            "decides": [True],
            "position": [0],
            "sampling": [Sampling()],
            "law": [None],
            "num_logprobs": [None],
        },
    ),
    (Outcomes, {"accepted": [1], "next_id": [5], "logprobs": [[]]}),
]
CASES = [(kind, columns, name) for kind, columns in COLUMNS for name in columns]


@pytest.mark.parametrize(("kind", "columns", "name"), CASES)
def test_a_column_of_another_length_is_refused(
    kind: type[Any], columns: dict[str, list[Any]], name: str
) -> None:
    for wrong in ([], columns[name] * 2):
        with pytest.raises(ValueError, match="differ in length"):
            kind(**{**columns, name: wrong})


@pytest.mark.parametrize(("kind", "columns"), COLUMNS)
def test_a_message_survives_pickle_and_is_not_changed_in_place(
    kind: type[Any], columns: dict[str, list[Any]]
) -> None:
    message = kind(**columns)
    assert pickle.loads(pickle.dumps(message)) == message
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(message, next(iter(columns)), [])


@pytest.mark.parametrize(("kind", "columns"), COLUMNS)
def test_empty_messages_share_no_lists(kind: type[Any], columns: dict[str, list[Any]]) -> None:
    for name in columns:
        getattr(kind(), name).append(1)
        assert getattr(kind(), name) == []


def test_sequences_asked_for_again_are_no_column() -> None:
    assert Proposals(missing=[1, 2]).missing == [1, 2]


def test_a_law_travels_with_its_proposal() -> None:
    sent = Proposals([1], [0], [3], [[2]], [LAW])
    (law,) = pickle.loads(pickle.dumps(sent)).law
    for got, want in zip(law, LAW, strict=True):
        assert np.array_equal(got, want)
        assert got.dtype == want.dtype


def test_rows_count_the_tokens_of_their_pass() -> None:
    rows = Rows(
        [0, 1], [0, 4], [[1, 2, 3], [4]], [0, 0], [False, True], [0, 0], [Sampling()] * 2,
        [None, None], [None, None],
    )  # fmt: skip
    assert rows.num_ids == 4
    assert Rows().num_ids == 0


def test_counts_by_position_and_length_follow_from_the_blocks() -> None:
    counts = SpeculationCounts()
    for drafted, accepted in ((3, 2), (0, 0), (1, 1), (3, 0)):
        counts.record(drafted, accepted)
    assert counts == SpeculationCounts(
        num_drafts=3,
        num_draft_tokens=7,
        num_accepted_tokens=3,
        drafted_at=[3, 2, 2],
        accepted_at=[2, 1, 0],
        by_length={3: [1, 0, 1, 0], 1: [0, 1]},
    )


@pytest.mark.parametrize("cut", range(5))
def test_added_counts_are_those_of_all_blocks_together(cut: int) -> None:
    blocks = [(4, 4), (2, 1), (1, 0), (4, 0)]
    whole, first, second = SpeculationCounts(), SpeculationCounts(), SpeculationCounts()
    for i, block in enumerate(blocks):
        whole.record(*block)
        (first if i < cut else second).record(*block)
    before = pickle.loads(pickle.dumps(second))
    first.add(second)
    assert first == whole
    first.record(4, 1)
    assert second == before  # nothing is shared


@pytest.mark.parametrize(
    "error", [RequestError("too long", "prompt"), RequestError("no"), OverloadedError("later")]
)
def test_errors_cross_process_borders(error: OutriderError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert getattr(copy, "param", None) == getattr(error, "param", None)

"""Requests become sequences: stop rules, seeds and the context's end."""

import pytest

from outrider.actors.intake import Intake
from outrider.actors.messages import LoadReport
from outrider.actors.requests import GenerateRequest
from outrider.actors.vocabulary import Vocabulary
from outrider.cluster.errors import RequestError

TARGET = LoadReport(Vocabulary({i: str(i) for i in range(50)}), 40, (2, 3), 16)


def make_intake(seed: int | None = None) -> Intake:
    return Intake(TARGET, lambda ids: " ".join(map(str, ids)), seed)


def test_every_prompt_gets_its_choices_in_order() -> None:
    made = make_intake().sequences(GenerateRequest("r", [[5], [6, 7]], n=2, seed=9))
    assert [s.index for s in made] == [0, 1, 2, 3]
    assert [s.sampling.choice for s in made] == [0, 1, 0, 1]
    assert [s.committed for s in made] == [[5], [5], [6, 7], [6, 7]]
    assert {s.sampling.seed for s in made} == {9}
    assert len({s.id for s in made}) == 4


def test_a_negative_seed_is_its_twos_complement_and_comes_back_as_given() -> None:
    (made,) = make_intake().sequences(GenerateRequest("r", [[5]], seed=-1))
    assert made.sampling.seed == 2**64 - 1
    assert made.seed == -1


def test_unseeded_prompts_differ_and_a_number_repeats_a_run() -> None:
    request = GenerateRequest("r", [[5], [5]])
    first, second = (s.seed for s in make_intake().sequences(request))
    assert first != second
    again = [[s.seed for s in intake.sequences(request)] for intake in map(make_intake, (4, 4, 5))]
    assert again[0] == again[1] != again[2]


def test_answers_end_at_the_context_and_by_the_ids_that_the_request_allows() -> None:
    rules = [
        make_intake().sequences(request)[0].rules
        for request in (
            GenerateRequest("r", [[5] * 10]),
            GenerateRequest("r", [[5] * 10], max_tokens=3, stop_token_ids=(7,), stop=("x",)),
            GenerateRequest("r", [[5] * 10], max_tokens=99, ignore_eos=True),
        )
    ]
    assert [r.max_tokens for r in rules] == [6, 3, 6]
    assert [r.end_ids for r in rules] == [{2, 3}, {2, 3}, frozenset()]
    assert (rules[1].stop_ids, rules[1].stop) == ({7}, ("x",))


@pytest.mark.parametrize("prompt", [[], [40], [-1], [5] * 16])
def test_prompts_that_cannot_be_served_are_refused(prompt: list[int]) -> None:
    with pytest.raises(RequestError):
        make_intake().sequences(GenerateRequest("r", [prompt]))

"""Requests become sequences: stop rules, seeds and the context's end."""

from typing import Any

import pytest

from outrider.actors.intake import Intake
from outrider.actors.messages import LoadReport, Shaping
from outrider.actors.requests import GenerateRequest
from outrider.actors.sequence import NO_BLOCK
from outrider.actors.vocabulary import Vocabulary
from outrider.cluster.errors import RequestError

TARGET = LoadReport(Vocabulary({i: str(i) for i in range(50)}), 40, (2, 3), 16)


def make_intake(seed: int | None = None) -> Intake:
    return Intake(TARGET, detokenize, seed)


def detokenize(ids: list[int], *, skip_special_tokens: bool) -> str:
    """Id 2 is special."""
    return " ".join(str(id) for id in ids if id != 2 or not skip_special_tokens)


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


def test_a_request_without_options_has_no_shaping() -> None:
    neutral: list[dict[str, Any]] = [
        {},
        {"logit_bias": ((5, 0.0),)},
        {"repetition_penalty": 1.0, "presence_penalty": -0.0},
        {"min_tokens": 3, "ignore_eos": True},  # nothing could end it
        {"min_p": 0.5},
    ]
    for options in neutral:
        (made,) = make_intake().sequences(GenerateRequest("r", [[5]], **options))
        assert made.sampling.shaping is None


def test_options_become_the_law_of_every_choice() -> None:
    request = GenerateRequest(
        "r",
        [[5], [6]],
        n=2,
        min_p=0.1,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=-0.4,
        logit_bias=((7, 2.0), (8, 0.0)),
        bad_words=((1, 2),),
        allowed_token_ids=(3, 4),
        min_tokens=5,
        stop_token_ids=(30, 3),
        logprobs=0,
    )
    for made in make_intake().sequences(request):
        assert made.sampling.min_p == 0.1
        assert made.sampling.shaping == Shaping(
            1.2, 0.3, -0.4, ((7, 2.0),), ((1, 2),), (3, 4), 5, (2, 3, 30)
        )
        assert (made.rules.min_tokens, made.num_logprobs) == (5, 0)


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("logit_bias", {"logit_bias": ((40, 1.0),)}),
        ("logit_bias", {"logit_bias": ((-1, 1.0),)}),
        ("bad_words", {"bad_words": ((3,), (4, 2**70))}),
        ("allowed_token_ids", {"allowed_token_ids": (5, 40)}),
        ("min_tokens", {"min_tokens": 4, "max_tokens": 3}),
    ],
)
def test_options_that_cannot_be_served_are_refused_by_name(
    field: str, options: dict[str, Any]
) -> None:
    with pytest.raises(RequestError) as refused:
        make_intake().sequences(GenerateRequest("r", [[5]], **options))
    assert refused.value.param == field


def test_allowed_ids_of_which_none_is_a_token_are_refused() -> None:
    gaps = LoadReport(Vocabulary({0: "a", 3: "b"}), 4, (), 16)
    intake = Intake(gaps, detokenize)
    with pytest.raises(RequestError) as refused:
        intake.sequences(GenerateRequest("r", [[0]], allowed_token_ids=(1, 2)))
    assert refused.value.param == "allowed_token_ids"
    assert intake.sequences(GenerateRequest("r", [[0]], allowed_token_ids=(1, 3)))


@pytest.mark.parametrize(
    ("skip", "include", "text"),
    [(True, False, " 7"), (False, False, " 7"), (True, True, " 7"), (False, True, " 7 2")],
)
def test_special_tokens_are_shown_if_asked_for_and_the_end_only_if_included(
    skip: bool, include: bool, text: str
) -> None:
    request = GenerateRequest(
        "r", [[5]], skip_special_tokens=skip, include_stop_str_in_output=include
    )
    (made,) = make_intake().sequences(request)
    deltas = [made.commit(NO_BLOCK, 0, 7), made.commit(NO_BLOCK, 0, 2)]
    assert "".join(delta.text for delta in deltas) == text
    assert deltas[-1].finish_reason == "stop"

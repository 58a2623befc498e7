"""What may be asked, what is ignored, what is refused, and that a refusal names the field."""

import math
from dataclasses import replace
from typing import Any

import pytest

from outrider.actors.requests import GenerateRequest
from outrider.cluster.errors import RequestError
from outrider.deploy.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, IGNORED
from outrider.deploy.schema import (
    check_context,
    check_vocabulary,
    parse_chat,
    parse_completion,
)

HELLO = [{"role": "user", "content": "hello"}]


def completion(**fields: Any) -> Any:
    return parse_completion({"prompt": "hello", **fields})


def chat(**fields: Any) -> Any:
    return parse_chat({"messages": HELLO, **fields})


def refusal(parse: Any, *args: Any, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse(*args, **fields)
    return caught.value


def test_defaults_are_those_of_openai():
    request = completion().to_request("id", [[1]])
    assert (request.temperature, request.top_p, request.top_k, request.n) == (1.0, 1.0, 0, 1)
    assert request.max_tokens == 16
    assert request.seed is None and request.stop == () and request.stop_token_ids == ()
    assert not request.ignore_eos and request.num_speculative_tokens is None
    assert chat().to_request("id", [[1]]).max_tokens is None
    assert replace(request, max_tokens=None) == GenerateRequest("id", [[1]])
    assert chat().to_request("id", [[1]]) == GenerateRequest("id", [[1]])


def test_every_served_field_reaches_the_coordinator():
    request = completion(
        temperature=0, top_p=0.5, top_k=7, n=3, seed=-5, max_tokens=9, stop=["a", "b"],
        stop_token_ids=[4, 5], ignore_eos=True, num_speculative_tokens=0,
    ).to_request("id", [[1], [2]])  # fmt: skip
    assert request.request_id == "id" and request.prompts == [[1], [2]]
    assert (request.temperature, request.top_p, request.top_k) == (0.0, 0.5, 7)
    assert (request.n, request.seed, request.max_tokens) == (3, -5, 9)
    assert (request.stop, request.stop_token_ids) == (("a", "b"), (4, 5))
    assert request.ignore_eos and request.num_speculative_tokens == 0


def test_every_sampling_option_reaches_the_coordinator():
    for parse in (completion, chat):
        request = parse(
            min_p=0.1, repetition_penalty=1.2, presence_penalty=-2, frequency_penalty=0.5,
            logit_bias={"7": -100, "05": 2}, bad_words=["x"], allowed_token_ids=[5, 3, 5],
            min_tokens=4, max_tokens=4, include_stop_str_in_output=True, skip_special_tokens=False,
        ).to_request("id", [[1]], [(8, 9)])  # fmt: skip
        assert (request.min_p, request.repetition_penalty) == (0.1, 1.2)
        assert (request.presence_penalty, request.frequency_penalty) == (-2.0, 0.5)
        assert request.logit_bias == ((7, -100.0), (5, 2.0))
        assert request.bad_words == ((8, 9),)
        assert request.allowed_token_ids == (3, 5)
        assert request.min_tokens == 4
        assert request.include_stop_str_in_output and not request.skip_special_tokens


@pytest.mark.parametrize("off", [-1, 0, None])
def test_top_k_is_off_at_minus_one_zero_and_null(off):
    assert completion(top_k=off).to_request("id", [[1]]).top_k == 0


def test_null_means_not_given_for_every_field():
    nulls = dict.fromkeys([*type(completion()).model_fields, *COMPLETION_NEUTRAL, *IGNORED])
    assert completion(**nulls | {"prompt": "hello"}) == completion()


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, 2.1, math.nan, math.inf, True, "1", [1], 10**400]),
        ("top_p", [0, -0.5, 1.01, math.nan, True, "1"]),
        ("top_k", [-2, 1.5, True, "5", 2**31]),
        ("n", [0, 129, True, 1.0, "2"]),
        ("max_tokens", [0, -1, 1.5, True, "16"]),
        ("max_completion_tokens", [0, True, 2.0]),
        ("seed", [2**64, -(2**63) - 1, 1.0, True, "1"]),
        ("stop", ["", ["a", ""], 5, ["a", 5], ["a"] * 17, {"a": 1}, "\ud800"]),
        ("stop_token_ids", [[-1], [True], ["1"], 5, [1.0]]),
        ("ignore_eos", [1, "true"]),
        ("stream", [1, "true"]),
        ("return_token_ids", [1, "yes"]),
        ("num_speculative_tokens", [-1, 65, True, 1.5]),
        ("stream_options", [True, "x"]),
        ("model", [5, ["tiny"]]),
        ("min_p", [-0.01, 1.01, math.nan, -math.inf, True, "0.1", []]),
        ("presence_penalty", [-2.01, 2.01, math.nan, math.inf, False, "1", 10**400]),
        ("frequency_penalty", [-2.01, 2.01, math.nan, -math.inf, True, "1", {}]),
        ("repetition_penalty", [0, 0.009, 100.1, -1, math.nan, math.inf, True, "1"]),
        (
            "logit_bias",
            [
                {"5": 100.5},
                {"5": -101},
                {"5": math.nan},
                {"5": math.inf},
                {"5": True},
                {"5": "1"},
                {"5": None},
                {"-1": 1},
                {"a": 1},
                {"": 1},
                {"1.0": 1},
                {"\u0665": 1},
                {" 5": 1},
                {-1: 1},
                {True: 1},
                {1.0: 1},
                {"5": 1, "05": 1},
                {5: 1, "5": 1},
                {"9" * 5000: 1},
                {str(i): 1 for i in range(1025)},
                [[5, 1]],
                [],
                "5",
                5,
            ],
        ),
        (
            "bad_words",
            ["x", [""], ["x", ""], [5], [None], ["x" * 1025], ["x"] * 129, {"x": 1}, ["\ud800"]],
        ),
        (
            "allowed_token_ids",
            [[], [-1], [True], ["5"], [5.0], [None], 5, {"5": 1}, [5] * 16_385],
        ),
        ("stop_token_ids", [[-1], [True], ["5"], [None], 5, [5] * 1025]),
        ("min_tokens", [-1, 1.5, True, "3", math.nan, 2**31, [3]]),
        ("include_stop_str_in_output", [1, 0, "true", []]),
        ("skip_special_tokens", [1, 0, "false", {}]),
        ("logprobs", [-1, 21, 1.5, "5", [], math.nan]),
        ("typical_p", [0.9, 0, True, math.nan]),
        ("use_beam_search", [True, 0]),
        ("best_of", [2, 0, True]),
        ("length_penalty", [0.5]),
        ("early_stopping", [True, "never"]),
    ],
)
def test_values_out_of_range_or_of_another_type_are_refused_by_name(field, values):
    for value in values:
        for parse in (completion, chat):
            error = refusal(parse, **{"stream": True, field: value})
            assert error.param == field, value
            assert field in error.message, value


def test_numbers_at_the_edges_are_served():
    for fields in (
        {"temperature": 0}, {"temperature": 2}, {"top_p": 1}, {"top_p": 1e-9}, {"n": 128},
        {"seed": 2**64 - 1}, {"seed": -(2**63)}, {"max_tokens": 1}, {"max_tokens": 10**12},
        {"stop": ["x"] * 16}, {"stop": []}, {"stop": "é"}, {"num_speculative_tokens": 64},
        {"min_p": 0}, {"min_p": 1}, {"presence_penalty": 2}, {"presence_penalty": -2},
        {"frequency_penalty": 2}, {"frequency_penalty": -2}, {"repetition_penalty": 0.01},
        {"repetition_penalty": 100}, {"logit_bias": {}}, {"logit_bias": {"0": 100, 1: -100}},
        {"logit_bias": {str(i): 0 for i in range(1024)}}, {"bad_words": []},
        {"bad_words": ["x" * 1024] * 128}, {"allowed_token_ids": [0]}, {"min_tokens": 0},
        {"allowed_token_ids": [7] * 1000}, {"min_tokens": 5, "max_tokens": 5},
    ):  # fmt: skip
        completion(**fields)
        chat(**fields)


@pytest.mark.parametrize(
    "prompt",
    [None, [], [[]], [[1], []], 5, {}, [1, "a"], [1, True], [1.0], [-1], [[1], [-1]], [["a"]],
     ["a", [1]], True, "\ud800", ["a", "\udfff"]],
)  # fmt: skip
def test_what_is_no_prompt_is_refused(prompt):
    assert refusal(parse_completion, {"prompt": prompt}).param == "prompt"


def test_all_four_forms_of_a_prompt_are_served():
    assert completion(prompt="a").prompt == ["a"]
    assert completion(prompt=["a", "b"]).prompt == ["a", "b"]
    assert completion(prompt=[1, 2]).prompt == [[1, 2]]
    assert completion(prompt=[[1, 2], [3]]).prompt == [[1, 2], [3]]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hello", "messages"),
        (["hello"], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "a"}], "messages[0].role"),
        ([{"role": "robot", "content": "a"}], "messages[0].role"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        (
            [*HELLO, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[1].content",
        ),
        ([{"role": "assistant", "content": "a", "tool_calls": [{}]}], "messages[0].tool_calls"),
    ],
)
def test_what_is_no_conversation_of_texts_is_refused(messages, param):
    error = refusal(parse_chat, {"messages": messages})
    assert error.param == param and error.message.startswith(param)


def test_text_parts_are_one_text_and_developers_are_the_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    body = chat(
        messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
    )
    assert [message.to_template() for message in body.messages] == [
        {"role": "system", "content": "x"},
        {"role": "user", "content": "a\nb"},
    ]


def test_an_assistant_message_can_be_sent_back_as_it_came():
    sent_back = {"role": "assistant", "content": "hi", "refusal": None, "tool_calls": None,
                 "annotations": [], "audio": None, "function_call": None}  # fmt: skip
    body = chat(messages=[*HELLO, sent_back])
    assert body.messages[1].to_template() == {"role": "assistant", "content": "hi"}


@pytest.mark.parametrize("field", sorted(IGNORED))
def test_fields_that_cannot_change_the_text_are_ignored(field):
    for value in ("x", 5, {"a": 1}, True):
        assert completion(**{field: value}) == completion()
        assert chat(**{field: value}) == chat()


def test_fields_not_served_are_accepted_at_their_neutral_value():
    for parse, neutral in ((completion, COMPLETION_NEUTRAL), (chat, CHAT_NEUTRAL)):
        for field, values in neutral.items():
            for value in values:
                assert parse(**{field: value}) == parse(), field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]), ("tool_choice", "required"), ("echo", True),
        ("response_format", {"type": "json_object"}), ("best_of", 2), ("typical_p", 0.5),
        ("prompt_logprobs", 0), ("use_beam_search", True), ("length_penalty", 2),
        ("return_tokens_as_token_ids", True),
        ("structured_outputs", {"json": {}}), ("echo", 0), ("reasoning_effort", "high"),
    ],
)  # fmt: skip
def test_fields_not_served_are_refused_by_name_at_any_other_value(field, value):
    for parse in (completion, chat):
        error = refusal(parse, **{field: value})
        assert error.param == field and field in error.message


def test_best_of_is_neutral_where_all_are_returned():
    assert completion(n=3, best_of=3) == completion(n=3)
    assert refusal(completion, n=3, best_of=1).param == "best_of"


def test_unknown_fields_are_refused_all_by_name():
    error = refusal(completion, temperatur=1, foo=None, bar=2)
    assert error.param == "temperatur"
    assert "temperatur" in error.message and "bar" in error.message


def test_fields_of_the_other_api_are_unknown():
    assert refusal(chat, suffix="x").param == "suffix"
    assert refusal(chat, prompt="x").param == "prompt"
    assert refusal(completion, messages=HELLO).param == "messages"


def test_stream_options_need_a_stream_and_know_their_fields():
    assert completion(stream=True, stream_options={"include_usage": True}).include_usage
    assert not completion(stream=True, stream_options={"include_usage": None}).include_usage
    completion(stream=True, stream_options={"include_obfuscation": True})
    assert refusal(completion, stream_options={"include_usage": True}).param == "stream_options"
    for wrong in ({"include_usage": 1}, {"continuous_usage_stats": True}, {"x": 1}):
        error = refusal(completion, stream=True, stream_options=wrong)
        assert error.param == f"stream_options.{next(iter(wrong))}"


def test_max_completion_tokens_is_the_newer_name_of_max_tokens():
    assert chat(max_completion_tokens=7).limit == 7
    assert completion(max_tokens=7, max_completion_tokens=7).limit == 7
    assert refusal(chat, max_tokens=7, max_completion_tokens=8).param == "max_tokens"


def test_min_tokens_are_at_most_max_tokens():
    for parse in (completion, chat):
        assert refusal(parse, min_tokens=6, max_tokens=5).param == "min_tokens"
        assert refusal(parse, min_tokens=6, max_completion_tokens=5).param == "min_tokens"
    assert refusal(completion, min_tokens=17).param == "min_tokens"
    assert chat(min_tokens=17).to_request("id", [[1]]).min_tokens == 17


def test_an_entry_at_fault_is_told_in_the_message():
    assert "logit_bias[5]" in refusal(completion, logit_bias={"4": 1, "5": 101}).message
    assert "bad_words[1]" in refusal(chat, bad_words=["x", ""]).message
    assert "allowed_token_ids[2]" in refusal(chat, allowed_token_ids=[1, 2, -3]).message
    assert len(refusal(chat, logit_bias={"x" * 10**6: 1}).message) < 200


@pytest.mark.parametrize(
    ("asked", "told"), [(None, None), (False, None), (0, 0), (5, 5), (20, 20)]
)  # fmt: skip
def test_completions_ask_for_logprobs_by_a_number(asked, told):
    assert completion(logprobs=asked).to_request("id", [[1]]).logprobs == told


def test_chat_asks_for_logprobs_by_true_and_top_logprobs_by_a_number():
    def told(**fields: Any) -> Any:
        return chat(**fields).to_request("id", [[1]]).logprobs

    assert told() is told(logprobs=False) is told(top_logprobs=0) is None
    assert told(logprobs=True) == told(logprobs=True, top_logprobs=None) == 0
    assert told(logprobs=True, top_logprobs=20) == 20
    for wrong in (-1, 21, True, 1.0, "5"):
        assert refusal(chat, logprobs=True, top_logprobs=wrong).param == "top_logprobs"
    assert refusal(chat, top_logprobs=3).param == "top_logprobs"
    assert refusal(chat, top_logprobs=3, logprobs=False).param == "top_logprobs"


def test_each_api_refuses_the_others_form_of_logprobs():
    assert refusal(completion, logprobs=True).param == "logprobs"
    assert refusal(completion, logprobs=1, top_logprobs=1).param == "top_logprobs"
    for number in (0, 1, 5):
        assert refusal(chat, logprobs=number).param == "logprobs"


@pytest.mark.parametrize("body", [None, [], "x", 5])
def test_a_body_that_is_no_object_is_refused(body):
    refusal(parse_completion, body)
    refusal(parse_chat, body)


def test_ids_outside_the_vocabulary_are_refused():
    body = completion(stop_token_ids=[9])
    check_vocabulary(body, [[0, 9]], 10)
    assert refusal(check_vocabulary, body, [[0], [3, 10]], 10).param == "prompt"
    assert refusal(check_vocabulary, body, [[0]], 9).param == "stop_token_ids"
    for field, value in (
        ("logit_bias", {"9": 1, "3": 1}),
        ("allowed_token_ids", [9, 3]),
        ("allowed_token_ids", [2**64]),
        ("logit_bias", {str(10**17): 1}),
    ):
        error = refusal(check_vocabulary, completion(**{field: value}), [[0]], 9)
        assert error.param == field and field in error.message
    check_vocabulary(chat(logit_bias={"8": 1}, allowed_token_ids=[8]), [[8]], 9, [(8,)])
    assert refusal(check_vocabulary, chat(), [[9]], 9).param == "messages"
    assert refusal(check_vocabulary, chat(), [[0]], 9, [(1, 9)]).param == "bad_words"


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers():
    check_context([[1] * 31], 32, "prompt")
    error = refusal(check_context, [[1], [1] * 32], 32, "prompt")
    assert (
        "maximum context length is 32 tokens" in error.message and "has 32 tokens" in error.message
    )
    assert refusal(check_context, [[1], []], 32, "messages").param == "messages"

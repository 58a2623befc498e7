"""The OpenAI API over a scripted coordinator: words, statuses, streams, and no stream left open."""

import asyncio
import json
import math

import httpx
import httpx2
import openai
import pytest
from ray import serve
from ray.exceptions import ActorDiedError, RayTaskError
from ray.serve.exceptions import BackPressureError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from outrider.actors.messages import TokenLogprob
from outrider.actors.requests import Delta
from outrider.cluster.config import parse_settings
from outrider.cluster.errors import OverloadedError, RequestError, UnavailableError
from outrider.deploy.client import Client
from outrider.deploy.ingress import Ingress, make_ingress
from outrider.deploy.openapi import describe_api
from outrider.deploy.routes import build_routes, clean_request_id
from outrider.deploy.schema import ChatBody, CompletionBody
from outrider.deploy.tokens import read_token

from .fake_coordinator import CARD, MODEL, CharTokenizer, FakeCoordinator, answer, deltas_of

SETTINGS = parse_settings(
    {
        "model_name": MODEL,
        "target": {"model": "org/big"},
        "drafts": [{"method": "prompt_lookup", "num_speculative_tokens": 4}],
    }
)
HELLO = [{"role": "user", "content": "hi"}]
COMPLETION = {"model": MODEL, "prompt": "hi"}
CHAT = {"model": MODEL, "messages": HELLO}
SPECULATION = {
    "mean_acceptance_length": 2.5,
    "draft_acceptance_rate": 0.5,
    "acceptance_histogram": [0, 1, 1, 0, 0],
    "acceptance_histogram_by_draft_length": {"2": [0, 0, 1], "4": [0, 1, 0, 0, 0]},
    "num_spec_steps": 2,
    "num_accepted_draft_tokens": 3,
    "num_draft_tokens": 6,
    "num_spec_tokens": 4,
}


def ingress_over(coordinator, tokenizer=None):
    return Ingress(SETTINGS, coordinator, tokenizer or CharTokenizer())


def client_over(coordinator, tokenizer=None):
    app = build_routes(ingress_over(coordinator, tokenizer))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.fixture
def coordinator():
    """A healthy one; however a test's requests ended, their streams were cancelled."""
    fake = FakeCoordinator()
    yield fake
    assert all(stream.is_cancelled for stream in fake.streams)


def read_events(text):
    """The events' data; JSON except for the last, which ends the stream."""
    events = text.split("\n\n")
    assert events.pop() == "" and all(event.startswith("data: ") for event in events)
    data = [event.removeprefix("data: ") for event in events]
    assert data.pop() == "[DONE]"
    return [json.loads(item) for item in data]


def failing_with(error, after=0):
    """A script that fails after so many rounds."""

    async def script(request):
        rounds = 0
        async for item in answer(request):
            if rounds == after:
                raise error
            rounds += 1
            yield item

    return FakeCoordinator(script)


async def test_a_completion_has_openais_words(coordinator):
    async with client_over(coordinator) as client:
        response = await client.post("/v1/completions", json=COMPLETION)
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["model"] == MODEL and isinstance(body["created"], int)
    assert body["choices"] == [
        {
            "index": 0, "text": "<0>é…", "logprobs": None, "finish_reason": "stop",
            "stop_reason": None, "seed": 1000,
        }
    ]  # fmt: skip
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    assert body["metrics"] == {"speculative_decoding": SPECULATION}


async def test_a_chat_answer_has_openais_words(coordinator):
    async with client_over(coordinator) as client:
        body = (await client.post("/v1/chat/completions", json=CHAT)).json()
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "<0>é…", "refusal": None}
    assert choice["finish_reason"] == "stop" and choice["seed"] == 1000


async def test_prompts_are_tokenised_with_specials_and_templates_without(coordinator):
    async with client_over(coordinator) as client:
        await client.post("/v1/completions", json=COMPLETION)
        await client.post("/v1/completions", json={"prompt": [[7, 8], [9]]})
        await client.post("/v1/chat/completions", json=CHAT)
    first, second, third = coordinator.requests
    assert first.prompts == [[1, ord("h"), ord("i")]]
    assert second.prompts == [[7, 8], [9]]
    assert third.prompts == [[ord(c) for c in "u:hi|>"]]
    assert (first.max_tokens, third.max_tokens) == (16, None)


async def test_choices_are_numbered_prompt_by_prompt(coordinator):
    body = {"prompt": ["a", "bc"], "n": 2, "return_token_ids": True}
    async with client_over(coordinator) as client:
        got = (await client.post("/v1/completions", json=body)).json()
    assert [choice["index"] for choice in got["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in got["choices"]] == [f"<{i}>é…" for i in range(4)]
    assert [choice["seed"] for choice in got["choices"]] == [1000, 1000, 1001, 1001]
    assert [len(choice["prompt_token_ids"]) for choice in got["choices"]] == [2, 2, 3, 3]
    assert got["choices"][3]["token_ids"] == [31, 32, 33, 34]
    assert got["usage"] == {"prompt_tokens": 5, "completion_tokens": 16, "total_tokens": 21}
    assert got["metrics"]["speculative_decoding"]["num_draft_tokens"] == 4 * 6


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
async def test_a_stream_adds_up_to_the_whole_answer(coordinator, path, body, n):
    body = {**body, "n": n, "return_token_ids": True}
    async with client_over(coordinator) as client:
        whole = (await client.post(path, json=body)).json()
        response = await client.post(path, json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    chunks = read_events(response.text)
    texts, ids, ends, prompts = ["" for _ in range(n)], [[] for _ in range(n)], {}, {}
    for chunk in chunks:
        assert chunk["id"] == chunks[0]["id"] and "usage" not in chunk
        assert ("metrics" in chunk) == (chunk is chunks[-1])
        (choice,) = chunk["choices"]
        index = choice["index"]
        if "delta" in choice:
            assert ("role" in choice["delta"]) == (not ids[index])
        texts[index] += choice["delta"]["content"] if "delta" in choice else choice["text"]
        ids[index] += choice["token_ids"]
        if "prompt_token_ids" in choice:
            assert index not in prompts
            prompts[index] = choice["prompt_token_ids"]
        if choice["finish_reason"] is not None:
            ends[index] = (choice["finish_reason"], choice["seed"])
    for choice in whole["choices"]:
        index = choice["index"]
        assert texts[index] == (
            choice["message"]["content"] if "message" in choice else choice["text"]
        )
        assert ids[index] == choice["token_ids"]
        assert prompts[index] == choice["prompt_token_ids"]
        assert ends[index] == (choice["finish_reason"], choice["seed"])
    assert chunks[-1]["metrics"] == whole["metrics"]


async def test_usage_comes_in_a_last_chunk_of_its_own_and_is_null_before(coordinator):
    body = {**CHAT, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    async with client_over(coordinator) as client:
        *chunks, last = read_events((await client.post("/v1/chat/completions", json=body)).text)
    assert len(chunks) == 6
    assert all(chunk["usage"] is None and "metrics" not in chunk for chunk in chunks)
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}
    assert last["metrics"]["speculative_decoding"]["num_spec_steps"] == 4


async def test_rates_are_null_and_metrics_there_when_nothing_was_drafted():
    async def plain(request):
        yield [Delta(0, [5], "x", 1, "length", None, None, 1)]

    async with client_over(FakeCoordinator(plain)) as client:
        body = {**COMPLETION, "num_speculative_tokens": 0}
        got = (await client.post("/v1/completions", json=body)).json()
    told = got["metrics"]["speculative_decoding"]
    assert told.keys() == SPECULATION.keys()
    assert told["mean_acceptance_length"] is None and told["draft_acceptance_rate"] is None
    assert told["acceptance_histogram"] == [0] and told["num_spec_tokens"] == 0
    assert got["choices"][0]["finish_reason"] == "length"


async def test_what_stopped_an_answer_is_told():
    async def stopped(request):
        yield [Delta(0, [5], "x", 1, "stop", "END"), Delta(1, [6], "", 1, "stop", 6)]

    async with client_over(FakeCoordinator(stopped)) as client:
        got = (await client.post("/v1/completions", json={**COMPLETION, "n": 2})).json()
    assert [choice["stop_reason"] for choice in got["choices"]] == ["END", 6]


async def test_bad_words_are_tokenised_with_and_without_a_space_before(coordinator):
    async with client_over(coordinator) as client:
        for words in (["ab", "c"], [" ", "ab", "ab"]):
            body = {**CHAT, "bad_words": words}
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    a, b, c, space = map(ord, "abc ")
    assert [request.bad_words for request in coordinator.requests] == [
        ((a, b), (space, a, b), (c,), (space, c)),
        ((space,), (space, space), (a, b), (space, a, b)),
    ]


async def test_a_bad_word_without_tokens_is_refused(coordinator):
    tokenizer = template_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    async with client_over(coordinator, tokenizer) as client:
        body = {"prompt": "hi", "bad_words": ["hi", "\t"]}
        response = await client.post("/v1/completions", json=body)
        same = await client.post("/v1/completions", json={"prompt": "hi", "bad_words": ["hi"]})
    assert response.status_code == 400 and same.status_code == 200
    assert response.json()["error"]["param"] == "bad_words"
    assert coordinator.requests[0].bad_words == ((3,),)


TOP = [("A", -0.25), ("B", -0.5)]
SAID = [("<s>", -1.0), ("\x02", -2.0), ("\x03", -3.0), ("\x04", -4.0)]  # ids 1 to 4


@pytest.mark.parametrize("k", [0, 2])
async def test_completions_tell_logprobs_in_columns(coordinator, k):
    async with client_over(coordinator) as client:
        body = {**COMPLETION, "logprobs": k}
        got = (await client.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
    assert got == {
        "tokens": [token for token, _ in SAID],
        "token_logprobs": [logprob for _, logprob in SAID],
        "top_logprobs": [{**dict(TOP[:k]), token: logprob} for token, logprob in SAID],
        "text_offset": [0, 3, 4, 5],
    }


@pytest.mark.parametrize("k", [0, 2])
async def test_chat_tells_logprobs_in_entries(coordinator, k):
    def entry(token, logprob):
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    async with client_over(coordinator) as client:
        body = {**CHAT, "logprobs": True, "top_logprobs": k}
        response = await client.post("/v1/chat/completions", json=body)
    assert response.json()["choices"][0]["logprobs"] == {
        "content": [
            {**entry(*said), "top_logprobs": [entry(*top) for top in TOP[:k]]} for said in SAID
        ],
        "refusal": None,
    }


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {**COMPLETION, "logprobs": 2}),
        ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 2}),
    ],
)
async def test_the_logprobs_of_chunks_add_up_to_the_whole(coordinator, path, body):
    body = {**body, "n": 3, "return_token_ids": True}
    async with client_over(coordinator) as client:
        whole = (await client.post(path, json=body)).json()
        response = await client.post(path, json={**body, "stream": True})
    added = [{name: [] for name in choice["logprobs"]} for choice in whole["choices"]]
    for chunk in read_events(response.text):
        (choice,) = chunk["choices"]
        for name, entries in choice["logprobs"].items():
            assert entries is None or len(entries) == len(choice["token_ids"])
            added[choice["index"]][name] += entries or []
    assert added == [
        {name: entries or [] for name, entries in choice["logprobs"].items()}
        for choice in whole["choices"]
    ]


async def test_logprobs_are_always_numbers_and_the_likelier_of_equal_texts():
    async def extreme(request):
        top = ((0xD800, -1.5), (ord("a"), -math.inf), (0xD801, -0.5), (0xD802, math.nan))
        told = [TokenLogprob(-math.inf, top), TokenLogprob(math.nan, ())]
        yield [Delta(0, [ord("b"), 0xD803], "b", 1, "length", logprobs=told)]

    async with client_over(FakeCoordinator(extreme)) as client:
        for path, body in (
            ("/v1/completions", {**COMPLETION, "logprobs": 4}),
            ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 4}),
        ):
            response = await client.post(path, json=body)
            assert response.status_code == 200
            if "logprobs" in body and body["logprobs"] == 4:
                told = response.json()["choices"][0]["logprobs"]
                assert told["token_logprobs"] == [-9999.0, -9999.0]
                assert told["top_logprobs"][0] == {"\ufffd": -0.5, "a": -9999.0, "b": -9999.0}
            else:
                first, second = response.json()["choices"][0]["logprobs"]["content"]
                assert first["logprob"] == second["logprob"] == -9999.0
                got = [top["logprob"] for top in first["top_logprobs"]]
                assert got == [-1.5, -9999.0, -0.5, -9999.0]


async def test_without_the_question_there_are_no_logprobs(coordinator):
    async with client_over(coordinator) as client:
        for fields in ({}, {"logprobs": None}, {"logprobs": False}):
            got = (await client.post("/v1/completions", json={**COMPLETION, **fields})).json()
            assert got["choices"][0]["logprobs"] is None
            assert coordinator.requests[-1].logprobs is None


def byte_level_tokenizer():
    vocabulary = {"<s>": 0, "a": 1, "Ġ": 2, "â": 3, "Ĥ": 4, "¬": 5, "âĤ¬": 6, "ï¿½": 7}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"bos_token": "<s>"})
    return fast


def byte_fallback_tokenizer():
    vocabulary = {"<unk>": 0, "a": 1, "\u2581": 2, "<0xE2>": 3, "<0x82>": 4, "<0xAC>": 5, "€": 6}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_tokens_tell_their_true_bytes_where_they_are_parts_of_a_character(make):
    tokens = [read_token(make(), index) for index in range(7)]
    special, *_ = tokens
    assert special.text in ("<s>", "<unk>") and special.data == special.text.encode()
    assert tokens[1:3] == [("a", b"a"), (" ", b" ")]
    assert tokens[3:6] == [("\ufffd", b"\xe2"), ("\ufffd", b"\x82"), ("\ufffd", b"\xac")]
    assert tokens[6] == ("€", "€".encode())


def test_a_token_may_be_the_replacement_character_itself():
    assert read_token(byte_level_tokenizer(), 7) == ("\ufffd", "\ufffd".encode())


async def test_openapi_tells_the_bodies_of_both_routes(coordinator):
    async with client_over(coordinator) as client:
        told = (await client.get("/openapi.json")).json()
    for path, model in (("/v1/completions", CompletionBody), ("/v1/chat/completions", ChatBody)):
        operation = told["paths"][path]["post"]
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        name = schema["$ref"].removeprefix("#/components/schemas/")
        assert told["components"]["schemas"][name]["properties"].keys() == model.model_fields.keys()
        assert {"200", "4XX", "5XX"} == operation["responses"].keys()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "type_", "code"),
    [
        (RequestError("no", "n"), 400, "invalid_request_error", None),
        (OverloadedError("full"), 429, "rate_limit_error", "rate_limit_exceeded"),
        (UnavailableError("down"), 503, "unavailable_error", "service_unavailable"),
        (
            RayTaskError("generate", "a traceback", OverloadedError("full")).as_instanceof_cause(),
            429, "rate_limit_error", "rate_limit_exceeded",
        ),
        (BackPressureError(5, 5), 503, "unavailable_error", "service_unavailable"),
        (BackPressureError(5, 5, 429), 429, "rate_limit_error", "rate_limit_exceeded"),
        (ActorDiedError(), 503, "unavailable_error", "service_unavailable"),
        (ZeroDivisionError("secret"), 500, "server_error", "internal_error"),
    ],
)  # fmt: skip
async def test_errors_before_the_first_token_are_statuses(error, status, type_, code, stream):
    coordinator = failing_with(error)
    async with client_over(coordinator) as client:
        response = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
    told = response.json()["error"]
    assert response.status_code == status
    assert (told["type"], told["code"]) == (type_, code)
    assert told.keys() == {"message", "type", "param", "code"}
    assert "secret" not in response.text and "traceback" not in response.text
    assert ("retry-after" in response.headers) == (status == 429)
    assert told["param"] == getattr(error, "param", None)
    assert [stream.is_cancelled for stream in coordinator.streams] == [True]


async def test_later_errors_are_an_event_before_done():
    coordinator = failing_with(UnavailableError("the target is lost"), after=2)
    async with client_over(coordinator) as client:
        response = await client.post("/v1/completions", json={**COMPLETION, "stream": True})
    *chunks, error = read_events(response.text)
    assert response.status_code == 200 and len(chunks) == 2
    assert error["error"]["message"] == "the target is lost"
    assert error["error"]["type"] == "unavailable_error"
    assert coordinator.streams[0].is_cancelled


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stream_that_ends_before_the_answer_is_an_error(stream):
    async def short(request):
        yield [next(deltas_of(request, 0))]

    async with client_over(FakeCoordinator(short)) as client:
        response = await client.post("/v1/completions", json={**COMPLETION, "stream": stream})
    if stream:
        assert "error" in read_events(response.text)[-1]
    else:
        assert response.status_code == 503


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/completions", b""),
        ("/v1/completions", b"{"),
        ("/v1/completions", b"[]"),
        ("/v1/completions", b"\xff\xfe{}"),
        ("/v1/chat/completions", b"[" * 100_000),
        ("/v1/chat/completions", b'{"messages": "\xff"}'),
        ("/v1/completions", b'{"prompt": "a", "temperature": NaN}'),
        ("/v1/completions", b'{"prompt": "a", "min_p": NaN}'),
        ("/v1/completions", b'{"prompt": "a", "presence_penalty": -Infinity}'),
        ("/v1/completions", b'{"prompt": "a", "logit_bias": {"5": NaN}}'),
        ("/v1/completions", b'{"prompt": "a", "repetition_penalty": 1e999}'),
        ("/v1/completions", b'{"prompt": "a", "min_tokens": 1' + b"0" * 5000 + b"}"),
        ("/v1/completions", b'{"prompt": "a", "\\ud800": 1}'),
        ("/v1/completions", b'{"prompt": "\\ud800"}'),
    ],
)
async def test_a_body_that_cannot_be_read_is_a_400(coordinator, path, content):
    async with client_over(coordinator) as client:
        response = await client.post(path, content=content)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert not coordinator.requests


async def test_refused_fields_are_named_and_nothing_is_generated(coordinator):
    async with client_over(coordinator) as client:
        for body, param in (
            ({**COMPLETION, "min_p": 1.1}, "min_p"),
            ({**COMPLETION, "typical_p": 0.9}, "typical_p"),
            ({**COMPLETION, "logit_bias": {str(CARD.vocabulary_size): 1}}, "logit_bias"),
            ({**COMPLETION, "allowed_token_ids": [CARD.vocabulary_size]}, "allowed_token_ids"),
            ({**COMPLETION, "bad_words": ["a", chr(CARD.vocabulary_size)]}, "bad_words"),
            ({**COMPLETION, "stream": "yes"}, "stream"),
            ({**COMPLETION, "prompt": [CARD.vocabulary_size]}, "prompt"),
            ({**COMPLETION, "stop_token_ids": [CARD.vocabulary_size]}, "stop_token_ids"),
            ({**COMPLETION, "prompt": [1] * CARD.max_model_len}, "prompt"),
        ):
            response = await client.post("/v1/completions", json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == param
    assert not coordinator.requests


async def test_a_prompt_that_fills_the_context_is_refused_with_both_numbers(coordinator):
    async with client_over(coordinator) as client:
        response = await client.post("/v1/completions", json={"prompt": "x" * 40})
        fits = await client.post("/v1/completions", json={"prompt": "x" * 30})
    message = response.json()["error"]["message"]
    assert response.status_code == 400 and fits.status_code == 200
    assert "maximum context length is 32 tokens" in message and "has 41 tokens" in message


async def test_another_model_is_not_found(coordinator):
    async with client_over(coordinator) as client:
        for response in (
            await client.post("/v1/completions", json={**COMPLETION, "model": "gpt"}),
            await client.post(
                "/v1/chat/completions", json={**CHAT, "model": "gpt", "stream": True}
            ),
            await client.get("/v1/models/org/gpt"),
        ):
            assert response.status_code == 404
            told = response.json()["error"]
            assert (told["code"], told["param"]) == ("model_not_found", "model")
    assert not coordinator.requests


async def test_models_tell_the_context_length(coordinator):
    async with client_over(coordinator) as client:
        listed = (await client.get("/v1/models")).json()
        one = (await client.get(f"/v1/models/{MODEL}")).json()
    assert listed == {"object": "list", "data": [one]}
    assert one["id"] == MODEL and one["object"] == "model" and one["max_model_len"] == 32
    assert one["created"] == CARD.created


async def test_health_is_the_coordinators(coordinator):
    async with client_over(coordinator) as client:
        assert (await client.get("/health")).status_code == 200
        coordinator.illness = UnavailableError("the target is loading")
        response = await client.get("/health")
        assert response.status_code == 503
        assert "the target is loading" in response.json()["error"]["message"]
        coordinator.illness = None
        assert (await client.get("/health")).status_code == 200


async def test_metrics_are_the_coordinators(coordinator):
    async with client_over(coordinator) as client:
        response = await client.get("/metrics")
        assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert 'outrider_rounds_total{kind="plain",model="tiny"} 7.0\n' in response.text
        assert 'outrider_num_requests_waiting{model="tiny"} 2.0\n' in response.text
        coordinator.illness = UnavailableError("the target is loading")
        assert (await client.get("/metrics")).status_code == 503


async def test_routes_that_are_not_there_answer_in_openais_words(coordinator):
    async with client_over(coordinator) as client:
        for method, path, status in (
            ("GET", "/v1/embeddings", 404), ("POST", "/", 404), ("GET", "/v1/completions", 405),
            ("DELETE", "/v1/models", 405), ("GET", "/docs", 404),
        ):  # fmt: skip
            response = await client.request(method, path)
            assert response.status_code == status
            assert path in response.json()["error"]["message"]
            assert "x-request-id" in response.headers


@pytest.mark.parametrize("illness", [None, UnavailableError("the target is loading")])
async def test_head_answers_as_get_does_without_the_body(coordinator, illness):
    coordinator.illness = illness
    async with client_over(coordinator) as client:
        paths = [path for path, told in describe_api()["paths"].items() if "get" in told]
        for path in (*paths, "/v1/models/other", "/openapi.json", "/nowhere", "/v1/completions"):
            headers = {"x-request-id": "mine-1"}
            get = await client.get(path, headers=headers)
            head = await client.head(path, headers=headers)
            assert (head.status_code, head.headers) == (get.status_code, get.headers)
            assert get.content and not head.content
        told = (await client.get("/openapi.json")).json()["paths"]
        assert not any("head" in operations for operations in told.values())


async def test_request_ids_go_through(coordinator):
    async with client_over(coordinator) as client:
        headers = {"x-request-id": "mine-1"}
        named = await client.post("/v1/completions", json=COMPLETION, headers=headers)
        failed = await client.post("/v1/completions", json={}, headers=headers)
        unnamed = await client.post("/v1/completions", json=COMPLETION)
    assert named.headers["x-request-id"] == failed.headers["x-request-id"] == "mine-1"
    assert coordinator.requests[0].request_id == "mine-1"
    assert named.json()["id"] == "cmpl-mine-1"
    assert unnamed.headers["x-request-id"] == coordinator.requests[1].request_id


async def test_the_server_in_front_may_name_the_requests(coordinator):
    app = build_routes(ingress_over(coordinator), echo_request_id=False)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        headers = {"x-request-id": "mine-1"}
        response = await client.post("/v1/completions", json=COMPLETION, headers=headers)
    assert "x-request-id" not in response.headers
    assert coordinator.requests[0].request_id == "mine-1"


def test_request_ids_are_safe_to_log():
    assert clean_request_id("a" * 500) == "a" * 128
    for unsafe in ("", None, "a b", "a\nb", "é", "<x>"):
        assert clean_request_id(unsafe) != unsafe and clean_request_id(unsafe).isalnum()


async def test_a_model_without_a_chat_template_says_so(coordinator):
    async with client_over(coordinator, CharTokenizer(chat_template=None)) as client:
        response = await client.post("/v1/chat/completions", json=CHAT)
    assert response.status_code == 400
    assert "/v1/completions" in response.json()["error"]["message"]


def template_tokenizer():
    words = {"[UNK]": 0, "<s>": 1, "<user>": 2, "hi": 3, "<assistant>": 4}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")), unk_token="[UNK]"
    )
    tokenizer.add_special_tokens(
        {"bos_token": "<s>", "additional_special_tokens": ["<user>", "<assistant>"]}
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role != 'user' %}"
        "{{ raise_exception('only users may speak') }}{% endif %}"
        "<user>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


async def test_a_real_tokenizers_template_is_applied_and_may_refuse(coordinator):
    async with client_over(coordinator, template_tokenizer()) as client:
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        system = {"messages": [{"role": "system", "content": "x"}, *HELLO]}
        refused = await client.post("/v1/chat/completions", json=system)
        await client.post("/v1/completions", json={"prompt": "hi"})
    assert coordinator.requests[0].prompts == [[1, 2, 3, 4]]
    assert refused.status_code == 400
    assert "only users may speak" in refused.json()["error"]["message"]
    assert coordinator.requests[1].prompts == [[3]]


class Disconnecting:
    """An ASGI client that sends a request and goes away once `leave` is set."""

    def __init__(self, body):
        self._body = json.dumps(body).encode()
        self._sent = False
        self.leave = asyncio.Event()
        self.started = asyncio.Event()
        self.status = None
        self.scope = {
            "type": "http", "asgi": {"spec_version": "2.3"}, "method": "POST",
            "path": "/v1/completions", "raw_path": b"/v1/completions", "query_string": b"",
            "headers": [(b"host", b"test")], "http_version": "1.1", "scheme": "http",
        }  # fmt: skip

    async def receive(self):
        if not self._sent:
            self._sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self.started.set()


@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_cancels_its_stream(stream, rounds):
    arrived = asyncio.Event()

    async def slow(request):
        for _, delta in zip(range(rounds), deltas_of(request, 0), strict=False):
            yield [delta]
        arrived.set()
        await asyncio.Event().wait()

    coordinator = FakeCoordinator(slow)
    app = build_routes(ingress_over(coordinator))
    client = Disconnecting({**COMPLETION, "stream": stream})
    serving = asyncio.create_task(app(client.scope, client.receive, client.send))
    await asyncio.wait_for(arrived.wait(), 5)
    if stream and rounds:
        await asyncio.wait_for(client.started.wait(), 5)
    assert not coordinator.streams[0].is_cancelled
    client.leave.set()
    await asyncio.wait_for(serving, 5)
    assert coordinator.streams[0].is_cancelled
    assert client.status == (200 if stream and rounds else 499)


async def test_a_cancelled_task_cancels_its_stream():
    arrived = asyncio.Event()

    async def slow(request):
        yield [next(deltas_of(request, 0))]
        arrived.set()
        await asyncio.Event().wait()

    coordinator = FakeCoordinator(slow)
    task = asyncio.create_task(ingress_over(coordinator).create("completions", COMPLETION))
    await asyncio.wait_for(arrived.wait(), 5)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert coordinator.streams[0].is_cancelled


async def test_the_official_client_works_unchanged(coordinator):
    app = build_routes(ingress_over(coordinator))
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    async with openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="none", http_client=http, max_retries=0
    ) as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        whole = await client.chat.completions.create(model=MODEL, messages=HELLO, n=2)
        assert [choice.message.content for choice in whole.choices] == ["<0>é…", "<1>é…"]
        assert whole.usage.completion_tokens == 8
        assert whole.metrics["speculative_decoding"]["num_draft_tokens"] == 12

        text, usage = "", None
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options={"include_usage": True}
        ):
            text += "".join(choice.delta.content for choice in chunk.choices)
            usage = chunk.usage
        assert text == "<0>é…" and usage.total_tokens == 10

        completion = await client.completions.create(
            model=MODEL, prompt=["a", "b"], extra_body={"return_token_ids": True}
        )
        assert completion.choices[1].token_ids == [11, 12, 13, 14]
        with pytest.raises(openai.NotFoundError) as not_found:
            await client.completions.create(model="gpt", prompt="a")
        assert not_found.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model=MODEL, prompt="a", presence_penalty=3)
        assert refused.value.param == "presence_penalty"


async def test_the_official_client_reads_logprobs(coordinator):
    app = build_routes(ingress_over(coordinator))
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    async with openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="none", http_client=http, max_retries=0
    ) as client:
        completion = await client.completions.create(
            model=MODEL, prompt="a", logprobs=2, logit_bias={"5": -100}, presence_penalty=1
        )
        told = completion.choices[0].logprobs
        assert list(zip(told.tokens, told.token_logprobs, strict=True)) == SAID
        assert told.top_logprobs[1] == {**dict(TOP), "\x02": -2.0}
        ask = {"model": MODEL, "messages": HELLO, "logprobs": True, "top_logprobs": 2}
        whole = await client.chat.completions.create(**ask)
        content = whole.choices[0].logprobs.content
        assert [(entry.token, entry.logprob) for entry in content] == SAID
        assert [(top.token, top.logprob) for top in content[0].top_logprobs] == TOP
        assert bytes(content[0].bytes) == b"<s>"
        chunks = [
            chunk.choices[0].logprobs.content
            async for chunk in await client.chat.completions.create(**ask, stream=True)
        ]
        assert [entry for chunk in chunks for entry in chunk] == content
    assert coordinator.requests[0].logit_bias == ((5, -100.0),)
    assert [request.logprobs for request in coordinator.requests] == [2, 2, 2]


async def test_the_official_client_sees_overload_and_late_errors():
    for after, expected in ((0, openai.RateLimitError), (1, openai.APIError)):
        app = build_routes(ingress_over(failing_with(OverloadedError("full"), after)))
        http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
        async with openai.AsyncOpenAI(
            base_url="http://test/v1", api_key="none", http_client=http, max_retries=0
        ) as client:
            with pytest.raises(expected, match="full"):
                async for _ in await client.completions.create(
                    model=MODEL, prompt="a", stream=True
                ):
                    pass


class ScriptedCoordinator:
    """A real deployment with the coordinator's methods."""

    async def generate(self, request):
        """Three rounds, unless the seed says that the queue is full."""
        if request.seed == 429:
            raise OverloadedError("full")
        async for item in answer(request):
            yield item

    async def describe(self):
        """The fake's card."""
        return CARD

    async def check_ready(self):
        """Healthy."""


@pytest.fixture(scope="module")
def handle():
    """The handle of a served ingress, in this process."""
    coordinator = serve.deployment(ScriptedCoordinator).bind()
    application = serve.deployment(make_ingress()).bind(SETTINGS, coordinator, CharTokenizer())
    return serve.run(application, name="local", _local_testing_mode=True)


async def test_it_runs_as_a_serve_deployment(handle):
    whole = await handle.create.remote("completions", COMPLETION)
    assert whole["choices"][0]["text"] == "<0>é…"
    chunks = [c async for c in handle.options(stream=True).stream.remote("chat", CHAT)]
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == "<0>é…"


async def test_errors_go_through_a_serve_handle(handle):
    with pytest.raises(OverloadedError, match="full"):
        await handle.create.remote("completions", {**COMPLETION, "seed": 429})
    with pytest.raises(RequestError):
        async for _ in handle.options(stream=True).stream.remote("chat", {}):
            pass


def test_the_client_works_over_a_serve_handle(handle):
    with Client(handle) as client:
        assert client.generate("hi").text == "<0>é…"
        assert [got.seed for got in client.generate(["a", "b"], seed=7)] == [7, 7]
        assert "".join(chunk.text for chunk in client.stream(HELLO)) == "<0>é…"
        with pytest.raises(OverloadedError, match="full"):
            client.generate("hi", seed=429)
        with pytest.raises(OverloadedError, match="full"):
            list(client.stream("hi", seed=429))
        with pytest.raises(RequestError) as caught:
            client.generate("hi", top_p=2)
    assert caught.value.param == "top_p"

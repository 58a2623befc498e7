"""Clients over HTTP and over a handle: same answers, same errors, nothing left running."""

import asyncio
import subprocess
import sys
import threading
import time
from contextlib import aclosing

import httpx
import openai
import pytest

from outrider.actors.requests import Delta
from outrider.cluster.config import parse_settings
from outrider.cluster.errors import OverloadedError, RequestError, UnavailableError
from outrider.deploy.client import AsyncClient, Client
from outrider.deploy.completion import Logprob
from outrider.deploy.ingress import Ingress
from outrider.deploy.routes import build_routes

from .fake_coordinator import MODEL, CharTokenizer, FakeCoordinator, answer, counts, deltas_of
from .http_server import serve_http

SETTINGS = parse_settings({"model_name": MODEL, "target": {"model": "org/big"}})
HELLO = [{"role": "user", "content": "hi"}]


class FakeHandle:
    """The Serve handle of an ingress: calls it in the caller's loop, and sees cancellations."""

    def __init__(self, coordinator):
        self._ingress = Ingress(SETTINGS, coordinator, CharTokenizer())
        self.create = FakeMethod(self._ingress.create, FakeResponse)
        self.stream = FakeMethod(self._ingress.stream, FakeGenerator)

    def options(self, *, stream):
        assert stream
        return self


class FakeMethod:
    def __init__(self, call, wrap):
        self._call = call
        self._wrap = wrap

    def remote(self, *args):
        return self._wrap(self._call(*args))


class FakeResponse:
    def __init__(self, work):
        self._task = asyncio.ensure_future(work)

    def __await__(self):
        return self._task.__await__()

    def cancel(self):
        self._task.cancel()


class FakeGenerator:
    """Like Serve's: dropping it stops nothing, only `cancel` does."""

    def __init__(self, chunks):
        self._chunks = chunks
        self._closing = None

    def __aiter__(self):
        return self._chunks

    def cancel(self):
        self._closing = asyncio.ensure_future(self._chunks.aclose())


def echo(request):
    """Answers each prompt with its own text, its length as the last id."""

    async def script():
        for index, ids in enumerate(request.prompts):
            text = "".join(map(chr, ids[1:]))
            await asyncio.sleep(0)
            yield [Delta(index, [len(ids)], text, 5, "stop", None, counts((4, 3)))]

    return script()


def way(name, coordinator):
    """Arguments of a client that gets to `coordinator` by this way."""
    if name == "handle":
        return {"server": FakeHandle(coordinator)}
    app = build_routes(Ingress(SETTINGS, coordinator, CharTokenizer()))
    return {"server": "http://test/v1/", "http_transport": httpx.ASGITransport(app)}


ways = pytest.mark.parametrize("name", ["handle", "http"])


@ways
async def test_a_prompt_gets_a_completion(name):
    coordinator = FakeCoordinator()
    async with AsyncClient(**way(name, coordinator)) as client:
        got = await client.generate("hi", temperature=0, n=2, stop=("x",))
    assert (got.text, got.token_ids) == ("<0>é…", (1, 2, 3, 4))
    assert (got.finish_reason, got.stop_reason, got.seed) == ("stop", None, 1000)
    assert [choice.text for choice in got.choices] == ["<0>é…", "<1>é…"]
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (3, 8)
    assert got.usage.total_tokens == 11
    assert (got.speculation.num_draft_tokens, got.speculation.draft_acceptance_rate) == (12, 0.5)
    (request,) = coordinator.requests
    assert (request.temperature, request.n, request.stop) == (0.0, 2, ("x",))


@ways
async def test_texts_ids_and_messages_are_prompts(name):
    coordinator = FakeCoordinator()
    async with AsyncClient(**way(name, coordinator)) as client:
        for prompt in ("hi", [1, 104, 105], HELLO):
            assert (await client.generate(prompt)).text == "<0>é…"
    assert [request.prompts for request in coordinator.requests] == [
        [[1, 104, 105]], [[1, 104, 105]], [[ord(c) for c in "u:hi|>"]],
    ]  # fmt: skip


@ways
async def test_many_prompts_keep_their_order_and_the_limit(name):
    running = peak = 0
    full = asyncio.Event()

    async def counted(request):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        if running == 3:
            full.set()
        await asyncio.wait_for(full.wait(), 10)
        for _ in range(200 - 10 * len(request.prompts[0])):  # later prompts end sooner
            await asyncio.sleep(0)
        running -= 1
        async for item in echo(request):
            yield item

    coordinator = FakeCoordinator(counted)
    prompts = ["x" * length for length in range(1, 13)]
    async with AsyncClient(**way(name, coordinator)) as client:
        got = await client.generate(prompts, concurrency=3)
    assert [completion.text for completion in got] == prompts
    assert peak == 3


@ways
async def test_many_prompts_of_every_kind_are_many(name):
    async with AsyncClient(**way(name, FakeCoordinator())) as client:
        assert len(await client.generate(["a", "b"])) == 2
        assert len(await client.generate([[1, 2], [3]])) == 2
        assert len(await client.generate([HELLO, HELLO, HELLO])) == 3
        assert await client.generate([]) == []


@ways
async def test_a_stream_adds_up_to_the_answer(name):
    async with AsyncClient(**way(name, FakeCoordinator())) as client:
        whole = await client.generate(HELLO)
        chunks = [chunk async for chunk in client.stream(HELLO)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert sum((chunk.token_ids for chunk in chunks), ()) == whole.token_ids
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "stop"]
    assert chunks[-1].seed == whole.seed and chunks[-1].speculation == whole.speculation
    assert chunks[0].speculation is None


@ways
@pytest.mark.parametrize(
    ("prompt", "fields", "has_own"),
    [("hi", {"logprobs": 2}, True), (HELLO, {"logprobs": True, "top_logprobs": 2}, False)],
)
async def test_logprobs_are_one_kind_of_object_from_both_apis(name, prompt, fields, has_own):
    async with AsyncClient(**way(name, FakeCoordinator())) as client:
        whole = await client.generate(prompt, **fields)
        chunks = [chunk async for chunk in client.stream(prompt, **fields)]
        silent = await client.generate(prompt)
    tokens = ("<s>", "\x02", "\x03", "\x04")
    assert whole.logprobs == tuple(
        Logprob(token, -number, (("A", -0.25), ("B", -0.5), *([(token, -number)] * has_own)))
        for number, token in enumerate(tokens, 1)
    )
    assert sum((chunk.logprobs for chunk in chunks), ()) == whole.logprobs
    assert len(whole.logprobs) == len(whole.token_ids)
    assert silent.logprobs is None


@ways
async def test_sampling_options_are_passed_on(name):
    coordinator = FakeCoordinator()
    async with AsyncClient(**way(name, coordinator)) as client:
        await client.generate(
            "hi", min_p=0.1, logit_bias={7: -1}, bad_words=("x",), allowed_token_ids=(5, 7)
        )
    (request,) = coordinator.requests
    assert (request.min_p, request.logit_bias) == (0.1, ((7, -1.0),))
    assert request.bad_words == ((ord("x"),), (ord(" "), ord("x")))
    assert request.allowed_token_ids == (5, 7)


@ways
@pytest.mark.parametrize(
    "error",
    [RequestError("no such thing", "seed"), OverloadedError("full"), UnavailableError("down")],
)
async def test_errors_come_back_as_they_were_raised(name, error):
    async def failing(request):
        if request.n == 2:
            yield [next(deltas_of(request, 0))]
        raise error

    async with AsyncClient(**way(name, FakeCoordinator(failing))) as client:
        with pytest.raises(type(error), match=str(error)) as caught:
            await client.generate("hi")
        assert getattr(caught.value, "param", None) == getattr(error, "param", None)
        for n in (1, 2):  # before the first chunk, and after it
            with pytest.raises(type(error), match=str(error)):
                async for _ in client.stream("hi", n=n):
                    pass


@ways
async def test_a_refused_field_names_itself(name):
    async with AsyncClient(**way(name, FakeCoordinator())) as client:
        with pytest.raises(RequestError) as caught:
            await client.generate("hi", temperature=3)
    assert caught.value.param == "temperature"


@ways
async def test_the_first_error_of_many_prompts_ends_all(name):
    async def second_fails(request):
        if len(request.prompts[0]) == 3:
            raise OverloadedError("full")
        await asyncio.Event().wait()
        yield []

    coordinator = FakeCoordinator(second_fails)
    async with AsyncClient(**way(name, coordinator)) as client:
        with pytest.raises(OverloadedError):
            await client.generate(["a", "ab", "abc", "abcd"], concurrency=3)
    assert all(len(request.prompts[0]) < 5 for request in coordinator.requests)
    assert all(stream.is_cancelled for stream in coordinator.streams)


async def test_leaving_a_stream_of_a_handle_cancels_it():
    async def endless(request):
        while True:
            yield [next(deltas_of(request, 0))]

    coordinator = FakeCoordinator(endless)
    async with (
        AsyncClient(FakeHandle(coordinator)) as client,
        aclosing(client.stream("hi")) as chunks,
    ):
        await anext(chunks)
        assert not coordinator.streams[0].is_cancelled
    await asyncio.sleep(0)
    assert coordinator.streams[0].is_cancelled


def test_a_progress_bar_shows_when_asked_for(capsys):
    with Client(**way("http", FakeCoordinator(echo))) as client:
        client.generate(["a", "b", "c"], progress=True)
        assert "3/3" in capsys.readouterr().err
        client.generate(["a", "b"])
        client.generate("a", progress=True)
        assert capsys.readouterr().err == ""


@ways
def test_the_client_without_a_loop_gives_the_same(name):
    with Client(**way(name, FakeCoordinator(echo))) as client:
        assert client.generate("hi").text == "hi"
        assert [got.text for got in client.generate(["a", "b"], concurrency=2)] == ["a", "b"]
        assert [chunk.text for chunk in client.stream("hi")] == ["hi"]
        with pytest.raises(RequestError):
            client.generate("hi", n=0)


def test_a_closed_client_leaves_no_thread():
    before = threading.active_count()
    client = Client(**way("http", FakeCoordinator()))
    client.generate("hi")
    client.close()
    client.close()
    assert threading.active_count() == before


async def test_a_server_that_is_not_there_is_unavailable():
    async with AsyncClient("http://127.0.0.1:9") as client:
        with pytest.raises(UnavailableError, match=r"cannot reach http://127\.0\.0\.1:9"):
            await client.generate("hi")
        with pytest.raises(UnavailableError):
            async for _ in client.stream("hi"):
                pass


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (httpx.Response(502, text="<html>bad gateway"), UnavailableError),
        (httpx.Response(408, text=""), RequestError),
        (httpx.Response(429, text="slow down"), OverloadedError),
        (httpx.Response(500, json=["?"]), UnavailableError),
    ],
)
async def test_answers_of_others_on_the_way_are_errors_of_ours(response, error):
    transport = httpx.MockTransport(lambda request: response)
    async with AsyncClient("http://test", http_transport=transport) as client:
        with pytest.raises(error):
            await client.generate("hi")
        with pytest.raises(error):
            async for _ in client.stream("hi"):
                pass


async def test_a_stream_that_is_cut_is_an_error():
    cut = httpx.MockTransport(lambda request: httpx.Response(200, text='data: {"choices": []}\n\n'))
    async with AsyncClient("http://test", http_transport=cut) as client:
        with pytest.raises(UnavailableError, match="ended the stream"):
            async for _ in client.stream("hi"):
                pass


async def slow_start(request):
    """One delta, then silence for ever."""
    yield [next(deltas_of(request, 0))]
    await asyncio.Event().wait()


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.01)


def test_leaving_a_stream_early_stops_the_server():
    coordinator = FakeCoordinator(slow_start)
    app = build_routes(Ingress(SETTINGS, coordinator, CharTokenizer()))
    with serve_http(app) as url, Client(url) as client:
        for chunk in client.stream("hi"):
            assert chunk.text == "<0>"
            break
        wait_until(lambda: coordinator.streams[0].is_cancelled)


def test_the_official_sync_client_streams_from_a_real_server():
    app = build_routes(Ingress(SETTINGS, FakeCoordinator(answer), CharTokenizer()))
    with (
        serve_http(app) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        chunks = list(stream)
        whole = client.chat.completions.create(model=MODEL, messages=HELLO)
    text = "".join(chunk.choices[0].delta.content for chunk in chunks)
    assert text == whole.choices[0].message.content == "<0>é…"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert whole._request_id == whole.id.removeprefix("chatcmpl-")


def test_importing_the_client_imports_no_torch_transformers_or_ray():
    script = (
        "import sys, outrider.deploy.client as c; c.AsyncClient('http://x'); "
        "print([m for m in ('torch', 'transformers', 'ray', 'fastapi') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"

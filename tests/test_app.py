"""The whole application on a real Serve: HTTP in, SSE out, real (tiny) models behind it."""

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from ray import serve

from outrider.cluster.errors import UnavailableError
from outrider.deploy.app import build, coordinator_options
from outrider.deploy.client import Client
from outrider.deploy.launch import check_http_options
from outrider.deploy.serve_file import ServeFile

from .conftest import Folders
from .serving import LOOKUP, make_settings, neural, send, wait_for, worker_pids

WORDS = "w5 w6 w7 w8 w9 w5 w6"


@pytest.fixture(scope="module")
def url(ray_session: None, folders: Folders) -> Iterator[str]:
    """A server of two target ranks, prompt lookup and a noisy draft, with metrics."""
    port, metrics_port = _free_port(), _free_port()
    settings = make_settings(
        folders.target,
        LOOKUP,
        neural("noisy", folders.noisy),
        target_changes={"tensor_parallel_size": 2, "max_queued": 100},
        metrics={"port": metrics_port, "vllm_names": True},
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build(settings), name="outrider", route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as client:
        yield client


def coordinator() -> Any:
    """The handle of the coordinator's deployment."""
    return serve.get_deployment_handle("Coordinator", "outrider")


async def complete(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"prompt": WORDS, "max_tokens": 24, "return_token_ids": True, **fields}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def ids_of(answer: dict[str, Any]) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


async def idle_usage() -> dict[str, int]:
    async def is_idle() -> dict[str, int] | None:
        usage: dict[str, int] = await coordinator().usage.remote()
        held = {name: count for name, count in usage.items() if name != "free_rows"}
        return None if any(held.values()) else usage

    usage: dict[str, int] = await wait_for(is_idle, "an idle coordinator")
    return usage


@pytest.mark.parametrize("law", [{"temperature": 0}, {"temperature": 1, "seed": 5}])
async def test_speculation_and_two_ranks_do_not_change_the_ids(
    http: httpx.AsyncClient, law: dict[str, Any]
) -> None:
    plain = await complete(http, num_speculative_tokens=0, n=2, **law)
    drafted = await complete(http, n=2, **law)
    assert ids_of(plain) == ids_of(drafted)
    counts = drafted["metrics"]["speculative_decoding"]
    assert counts["num_draft_tokens"] > 0
    assert plain["metrics"]["speculative_decoding"]["num_draft_tokens"] == 0


async def test_the_openai_client_streams_a_chat(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        with pytest.raises(openai.BadRequestError, match="chat template"):
            await client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "w5"}]
            )
        stream = await client.completions.create(
            model="tiny", prompt=WORDS, max_tokens=8, stream=True, temperature=0
        )
        text = "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])
        whole = await client.completions.create(
            model="tiny", prompt=WORDS, max_tokens=8, temperature=0
        )
        assert text == whole.choices[0].text != ""


async def test_clients_that_disconnect_leave_nothing_behind(http: httpx.AsyncClient) -> None:
    async def leave(number: int) -> int:
        body = {
            "prompt": [5 + number % 50, 6],
            "max_tokens": 120,
            "ignore_eos": True,
            "stream": True,
        }
        async with http.stream("POST", "/v1/completions", json=body) as response:
            async for _ in response.aiter_lines():
                break
            return response.status_code

    assert set(await asyncio.gather(*(leave(number) for number in range(100)))) == {200}
    assert (await idle_usage())["free_rows"] == 8


async def test_clients_that_disconnect_cost_no_draft(http: httpx.AsyncClient) -> None:
    """Ray cancels what it takes for a part of a cancelled request: no call to a draft may be."""

    async def losses() -> tuple[int, int]:
        draft = (await coordinator().snapshot.remote()).drafts["noisy"]
        return draft.quarantines, draft.counts.num_drafts

    before = await losses()
    body = {"prompt": [5, 9, 11, 70], "max_tokens": 100, "ignore_eos": True, "stream": True}
    for _ in range(12):
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            for _ in range(5):  # by then the draft holds a copy
                await anext(lines)
        await idle_usage()  # the copy is freed
    after = await losses()
    assert after[0] == before[0]
    assert after[1] > before[1], "it did draft"


def test_a_serve_that_listens_elsewhere_is_told_where(url: str, folders: Folders) -> None:
    port = int(url.rpartition(":")[2])
    file = ServeFile(make_settings(folders.target), "other", "/", {}, None)
    check_http_options(replace(file, http_options={"host": "127.0.0.1", "port": port}))
    for other in ({"host": "127.0.0.1", "port": port + 1}, {"host": "0.0.0.0", "port": port}):
        with pytest.raises(UnavailableError, match=f"runs on that cluster already, at .*:{port}:"):
            check_http_options(replace(file, http_options=other))


async def test_the_same_ids_come_when_the_draft_is_killed_in_mid_stream(
    http: httpx.AsyncClient,
) -> None:
    law = {"temperature": 1, "seed": 3, "max_tokens": 100, "ignore_eos": True}
    plain = await complete(http, num_speculative_tokens=0, n=2, **law)

    async def drafts() -> bool:
        before = (await coordinator().snapshot.remote()).drafts["noisy"].counts.num_drafts
        await complete(http, temperature=1, seed=4)
        after = (await coordinator().snapshot.remote()).drafts["noisy"].counts.num_drafts
        return bool(after > before)

    async def runs() -> bool:
        return bool((await coordinator().usage.remote())["running"] == 2)

    await wait_for(drafts, "proposals of the draft")
    running = asyncio.create_task(complete(http, n=2, **law))
    await wait_for(runs, "running sequences")
    send(signal.SIGKILL, worker_pids("DraftWorker"))
    assert ids_of(await running) == ids_of(plain)


async def test_health_models_and_metrics_answer(http: httpx.AsyncClient, url: str) -> None:
    assert (await http.get("/health")).status_code == 200
    models = (await http.get("/v1/models")).json()
    assert [(m["id"], m["max_model_len"]) for m in models["data"]] == [("tiny", 128)]
    await complete(http)
    page = await http.get("/status")
    assert page.status_code == 200 and "<title>tiny: " in page.text and "noisy" in page.text
    stats = await coordinator().snapshot.remote()
    settings = (await coordinator().settings.remote()).metrics
    async with httpx.AsyncClient(trust_env=False) as client:
        text = (await client.get(f"http://127.0.0.1:{settings.port}/metrics")).text
    got = await http.get("/metrics")
    assert text == got.text, "the API shows the same page"
    head = await http.head("/metrics")
    assert head.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]
    assert head.headers["content-length"] == str(len(got.content))
    emitted = [
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("outrider_generation_tokens_total")
    ]
    assert sum(emitted) == stats.emitted_tokens > 0
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"}' in text
    labels = 'draft="noisy",method="same",model="tiny"'
    assert f"outrider_spec_decode_num_drafts_total{{{labels}}}" in text
    assert 'outrider_draft_replicas_living{draft="noisy",model="tiny"}' in text


async def test_errors_before_the_first_token_are_http_statuses(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", json={"prompt": [5] * 128, "stream": True})
    assert response.status_code == 400
    assert "128" in response.json()["error"]["message"]
    response = await http.post("/v1/completions", json={"prompt": "w5", "min_p": 2})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "min_p"
    response = await http.post("/v1/completions", json={"prompt": "w5", "model": "other"})
    assert response.status_code == 404


def test_the_python_client_works_over_the_handle_and_the_url(url: str) -> None:
    fields = {"max_tokens": 12, "temperature": 0}
    with Client(url) as over_url, Client(serve.get_app_handle("outrider")) as over_handle:
        completions = over_url.generate([WORDS, "w9"], progress=False, **fields)
        others = over_handle.generate([WORDS, "w9"], progress=False, **fields)
        assert [c.text for c in completions] == [c.text for c in others]
        chunks = over_url.stream(WORDS, **fields)
        assert "".join(chunk.text for chunk in chunks) == completions[0].text


async def test_a_stream_ends_with_done(http: httpx.AsyncClient) -> None:
    body = {"prompt": WORDS, "max_tokens": 4, "stream": True, "temperature": 0}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    last = json.loads(lines[-2].removeprefix("data: "))
    assert "speculative_decoding" in last["metrics"]


def test_coordinator_and_ingress_ask_for_no_cpu_and_ranks_get_bundles(folders: Folders) -> None:
    settings = make_settings(
        folders.target,
        target_changes={"tensor_parallel_size": 2, "num_gpus": 1, "labels": {"pool": "target"}},
    )
    options = coordinator_options(settings)
    assert options["ray_actor_options"] == {"num_cpus": 0}
    assert options["placement_group_bundles"] == [{"CPU": 0.5, "GPU": 1.0}] * 2
    assert options["placement_group_bundle_label_selector"] == [{"pool": "target"}] * 2

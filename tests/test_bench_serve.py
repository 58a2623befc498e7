"""The bench of a server, driven against a small server whose answers are known."""

import argparse
import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from outrider.actors.requests import SpeculationCounts
from outrider.cluster.errors import ConfigError, UnavailableError
from outrider.deploy import bench_serve
from outrider.deploy.load import Answer, Prompt, Run, drive, http_client, read_counts, read_prompts
from outrider.deploy.summary import compare, summarise

# Of every answer with speculation: {drafted: [drafts of which 0, 1, ... tokens were accepted]}
BY_LENGTH = {"2": [1, 0, 0], "4": [0, 1, 0, 0, 1]}


class Server:
    """A chat server that notes what it is asked; some prompts get a special treatment."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.num_running = 0
        self.most_running = 0
        self.together = asyncio.Barrier(1)  # streams that begin only when all of them run
        self.app = FastAPI()
        self.app.get("/v1/models")(self.models)
        self.app.post("/v1/chat/completions")(self.chat)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "tiny"}]}

    async def chat(self, request: Request) -> Any:
        body = await request.json()
        self.bodies.append(body)
        prompt = body["messages"][0]["content"]
        if prompt == "refused":
            return JSONResponse({"error": {"message": "no such thing"}}, status_code=400)
        return StreamingResponse(self.stream(body, prompt), media_type="text/event-stream")

    async def stream(self, body: dict[str, Any], prompt: str) -> AsyncIterator[str]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await self.together.wait()
        is_on = body.get("num_speculative_tokens") != 0
        yield event(choices=[{"delta": {"role": "assistant", "content": ""}, "token_ids": []}])
        if prompt == "broken":
            yield event(error={"message": "the target is down"})
        if prompt in ("broken", "cut"):
            self.num_running -= 1
            return
        for id in [1, 2, 4] if is_on and prompt == "different" else [1, 2, 3]:
            yield event(choices=[{"delta": {"content": f" {id}"}, "token_ids": [id]}], usage=None)
        yield event(choices=[{"delta": {"content": ""}, "finish_reason": "stop"}], usage=None)
        yield event(
            choices=[],
            usage={"prompt_tokens": 5, "completion_tokens": 3},
            metrics={"speculative_decoding": told(is_on)},
        )
        self.num_running -= 1
        yield "data: [DONE]\n\n"


def event(**fields: Any) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def told(is_on: bool) -> dict[str, Any]:
    return {"acceptance_histogram_by_draft_length": BY_LENGTH if is_on else {}}


class Uvicorn(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(uvicorn.Config(app, port=0, log_level="error"))
        self.is_up = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.is_up.set()


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    listener = Uvicorn(server.app)
    thread = threading.Thread(target=listener.run)
    thread.start()
    try:
        assert listener.is_up.wait(30)
        port = listener.servers[0].sockets[0].getsockname()[1]
        server.url = f"http://127.0.0.1:{port}"
        yield server
    finally:
        listener.should_exit = True
        thread.join(30)


def bench(server: Server, folder: Path, prompts: Sequence[str], *arguments: str) -> int:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    parser = argparse.ArgumentParser()
    bench_serve.add_arguments(parser)
    options = parser.parse_args(
        ["--url", server.url, "--prompts", str(path), "--concurrency", "1", *arguments]
    )
    return bench_serve.run(options)


def test_turns_alternate_after_a_warm_up_of_both_sides(server: Server, tmp_path: Path) -> None:
    assert bench(server, tmp_path, ["a", "b"], "--warmup", "1", "--repeats", "3") == 0
    asked = [(b["messages"][0]["content"], "num_speculative_tokens" in b) for b in server.bodies]
    off, on = [("a", True), ("b", True)], [("a", False), ("b", False)]
    assert asked == [("a", True), ("a", False), *off, *on, *on, *off, *off, *on]
    assert {body.get("num_speculative_tokens", 0) for body in server.bodies} == {0}


def test_both_sides_of_a_prompt_are_asked_alike(server: Server, tmp_path: Path) -> None:
    arguments = ["--seed", "7", "--max-tokens", "5", "--temperature", "0.5", "--warmup", "0"]
    assert bench(server, tmp_path, ["a", "b"], "--repeats", "1", *arguments) == 0
    for body in server.bodies:
        body.pop("num_speculative_tokens", None)
    assert server.bodies[:2] == server.bodies[2:]
    assert [body["seed"] for body in server.bodies[:2]] == [7, 8]
    assert server.bodies[0] == {
        "model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5,
        "temperature": 0.5, "seed": 7, "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }  # fmt: skip


def test_counts_are_pooled_and_the_table_and_the_file_tell_them(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    assert bench(server, tmp_path, ["a", "different"], "--json", str(path)) == 0
    document = json.loads(path.read_text())
    (comparison,) = document["comparisons"]
    assert comparison["concurrency"] == 1
    assert comparison["compared_outputs"] == 2
    assert comparison["differing_outputs"] == 1
    off, on = comparison["off"], comparison["on"]
    assert (off["requests"], off["failed"], off["output_tokens"]) == (4, 0, 12)
    assert (off["num_drafts"], off["acceptance_rate"], off["acceptance_length"]) == (0, None, None)
    # 4 answers, each with 3 drafts: of 2, 4, 4 tokens, accepted 0, 1, 4
    assert (on["num_drafts"], on["num_draft_tokens"], on["num_accepted_tokens"]) == (12, 40, 20)
    assert (on["acceptance_rate"], on["acceptance_length"]) == (20 / 40, 1 + 20 / 12)
    assert on["acceptance_by_position"] == [8 / 12, 4 / 12, 4 / 12, 4 / 12]
    assert comparison["speedup"] == on["output_tokens_per_s"] / off["output_tokens_per_s"]
    assert document["model"] == "tiny"
    assert document["versions"]["outrider"]
    assert document["options"]["num_prompts"] == 8
    answers = [answer for turn in document["turns"] for answer in turn["run"]["answers"]]
    assert len(answers) == 8
    assert answers[0]["text"] == " 1 2 3"
    assert answers[0]["token_ids"] == [1, 2, 3]
    assert 0 < answers[0]["ttft_s"] < answers[0]["e2e_s"]
    table = capsys.readouterr().out
    assert "0.667 0.333 0.333 0.333" in table
    assert "1 of 2" in table


def test_failed_requests_are_counted_told_and_make_the_exit_code(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "out.json"
    prompts = ["a", "refused", "broken", "cut"]
    assert bench(server, tmp_path, prompts, "--warmup", "1", "--json", str(path)) == 1
    (comparison,) = json.loads(path.read_text())["comparisons"]
    assert (comparison["off"]["requests"], comparison["off"]["failed"]) == (8, 6)
    assert comparison["off"]["output_tokens"] == 6
    assert comparison["compared_outputs"] == 1
    said = capsys.readouterr()
    assert "6 of 8" in said.out
    assert said.err.splitlines() == [
        "4 requests failed: HTTP 400: no such thing",
        "4 requests failed: the target is down",
        "4 requests failed: the stream ended without [DONE]",
    ]


def test_a_failed_warm_up_ends_the_bench(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="warm-up request failed: HTTP 400: no such thing"):
        bench(server, tmp_path, ["refused"])


async def test_so_many_requests_run_at_a_time_and_answers_keep_the_order(server: Server) -> None:
    server.together = asyncio.Barrier(3)  # a stream alone would wait for ever
    prompts = [Prompt(str(i), [{"role": "user", "content": "a"}]) for i in range(6)]
    done: list[None] = []
    async with http_client(server.url) as client:
        run = await drive(client, prompts, [{"model": "tiny"}] * 6, 3, lambda: done.append(None))
    assert server.most_running == 3
    assert [answer.prompt for answer in run.answers] == list("012345")
    assert [answer.error for answer in run.answers] == [None] * 6
    assert len(done) == 6


def test_no_server_is_one_sentence(tmp_path: Path) -> None:
    nowhere = Server()
    nowhere.url = "http://127.0.0.1:1"
    with pytest.raises(UnavailableError, match=r"no model is served at http://127\.0\.0\.1:1/v1/"):
        bench(nowhere, tmp_path, ["a"])


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "h:1/v1/"])
def test_urls_may_come_with_or_without_their_ends(url: str) -> None:
    assert str(http_client(url).base_url) == "http://h:1/v1/"


def test_prompts_come_in_three_forms_and_by_category(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    conversation = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path.write_text(
        '{"id": 81, "category": "writing", "turns": ["first", "second"]}\n\n'
        '{"prompt": "plain", "category": "qa"}\n' + json.dumps({"messages": conversation})
    )
    assert read_prompts(path) == [
        Prompt("81", [{"role": "user", "content": "first"}]),
        Prompt("line 3", [{"role": "user", "content": "plain"}]),
        Prompt("line 4", conversation),
    ]
    assert [prompt.name for prompt in read_prompts(path, "qa")] == ["line 3"]
    assert [prompt.name for prompt in read_prompts(path, limit=2)] == ["81", "line 3"]
    with pytest.raises(ConfigError, match="no prompts of category 'maths'"):
        read_prompts(path, "maths")


@pytest.mark.parametrize("line", ["{", "3", "{}", '{"turns": []}', '{"prompt": 3}'])
def test_a_line_that_is_no_prompt_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line)
    with pytest.raises(ConfigError, match=r"p\.jsonl, line 2: "):
        read_prompts(path)


def test_time_per_output_token_leaves_out_the_first() -> None:
    assert Answer("a", output_tokens=5, ttft_s=1.0, e2e_s=3.0).tpot_s == 0.5
    assert Answer("a", output_tokens=1, ttft_s=1.0, e2e_s=3.0).tpot_s is None
    assert Answer("a", output_tokens=0, e2e_s=3.0).tpot_s is None


def test_throughput_is_a_ratio_of_sums_and_failures_do_not_count() -> None:
    fast = Run(1.0, [Answer("a", output_tokens=10, ttft_s=0.1, e2e_s=1.0)])
    slow = Run(3.0, [Answer("a", output_tokens=10, ttft_s=0.3, e2e_s=3.0)])
    lost = Run(0.0, [Answer("a", output_tokens=99, ttft_s=9.0, error="lost")])
    summary = summarise([fast, slow, lost])
    assert summary.output_tokens_per_s == 20 / 4
    assert (summary.requests, summary.failed) == (3, 1)
    assert summary.ttft_ms.mean == pytest.approx(200)
    assert summary.acceptance_rate is None


def test_nothing_answered_is_reported_without_a_ratio() -> None:
    lost = [Run(1.0, [Answer("a", error="lost")])]
    comparison = compare(4, lost, lost)
    assert comparison.speedup is None
    assert comparison.compared_outputs == 0
    assert comparison.off.ttft_ms.p99 is None


def test_counts_are_rebuilt_exactly_from_what_a_response_tells() -> None:
    counts = SpeculationCounts()
    for drafted, accepted in ((2, 0), (4, 1), (4, 4)):
        counts.record(drafted, accepted)
    assert read_counts(told(True)) == counts

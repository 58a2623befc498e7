"""Requests made up from the OpenAPI description, and worse: answered, or refused in words."""

import asyncio
import json
import math
import operator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.generation.modes import GenerationMode

from outrider.actors.requests import ModelCard
from outrider.cluster.config import parse_settings
from outrider.deploy.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, IGNORED
from outrider.deploy.ingress import Ingress
from outrider.deploy.openapi import describe_api
from outrider.deploy.routes import build_routes
from outrider.deploy.schema import ChatBody, CompletionBody

from .fake_coordinator import MODEL, CharTokenizer, FakeCoordinator

SETTINGS = parse_settings({"model_name": MODEL, "target": {"model": "org/big"}})
ROOMY = ModelCard(MODEL, max_model_len=10**6, vocabulary_size=10**30, created=0)
API = schemathesis.openapi.from_dict(describe_api())
SOUND = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}
FIELDS = sorted(
    {*CompletionBody.model_fields, *ChatBody.model_fields, *COMPLETION_NEUTRAL, *CHAT_NEUTRAL}
    | IGNORED
)
SCALARS = st.one_of(
    st.sampled_from(
        [None, True, False, math.nan, math.inf, 10**400, -1, 0, 1, 2**63, "", "\ud800"]
    ),
    st.floats(),
    st.integers(),
    st.text(),
)
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)

fuzzed = settings(
    max_examples=50,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
both_routes = pytest.mark.parametrize("path", SOUND)


class Server:
    """The routes over a scripted coordinator, in one event loop."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self._runner = runner
        self.coordinator = FakeCoordinator(card=ROOMY)
        self._app = build_routes(Ingress(SETTINGS, self.coordinator, CharTokenizer()))

    def post(self, path: str, content: bytes) -> httpx.Response:
        """The response; an error that the routes let through is raised here."""
        return self._runner.run(self._post(path, content))

    async def _post(self, path: str, content: bytes) -> httpx.Response:
        transport = httpx.ASGITransport(self._app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, content=content)


@pytest.fixture
def server() -> Any:
    """Whatever a test sent, a sound request works afterwards and nothing is left open."""
    with asyncio.Runner() as runner:
        server = Server(runner)
        yield server
        for path, body in SOUND.items():
            assert server.post(path, json.dumps(body).encode()).status_code == 200
        assert all(stream.is_cancelled for stream in server.coordinator.streams)


def check(response: httpx.Response, body: object) -> None:
    """It is an answer, or a refusal that says what is wrong with which field."""
    if response.status_code == 200:
        assert isinstance(body, dict)
        if body.get("stream"):
            assert response.text.endswith("data: [DONE]\n\n") and '{"error"' not in response.text
        else:
            assert response.json()["choices"]
        return
    assert response.status_code in (400, 404), response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and len(error["message"]) > 10
    if isinstance(body, dict):
        assert isinstance(error["param"], str)


def send_all(server: Server, path: str, bodies: st.SearchStrategy[Any]) -> list[int]:
    """The statuses of the answers to bodies of a strategy; bytes are sent as they are."""
    statuses = []

    @fuzzed
    @given(bodies)
    def send(body: Any) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = server.post(path, content)
        check(response, body)
        statuses.append(response.status_code)

    send()
    return statuses


def from_schema(path: str, mode: GenerationMode) -> st.SearchStrategy[Any]:
    """Bodies that the OpenAPI description allows, or that it forbids."""
    return API[path]["POST"].as_strategy(generation_mode=mode).map(operator.attrgetter("body"))


@both_routes
def test_well_formed_requests_are_answered_or_refused_in_words(server: Server, path: str) -> None:
    statuses = send_all(server, path, from_schema(path, GenerationMode.POSITIVE))
    assert 200 in statuses


@both_routes
def test_malformed_requests_are_refused_in_words(server: Server, path: str) -> None:
    statuses = send_all(server, path, from_schema(path, GenerationMode.NEGATIVE))
    assert statuses.count(400) > len(statuses) / 2


@both_routes
def test_no_values_of_any_fields_are_an_internal_error(server: Server, path: str) -> None:
    fields = st.dictionaries(st.sampled_from(FIELDS), ANYTHING, min_size=1, max_size=3)
    statuses = send_all(server, path, fields.map(lambda some: {**SOUND[path], **some}))
    assert 400 in statuses


@both_routes
def test_no_value_of_one_field_is_an_internal_error(server: Server, path: str) -> None:
    kind = ChatBody if "chat" in path else CompletionBody
    for field in kind.model_fields:
        for value in (math.nan, -math.inf, -1, 10**400, 1.5, "\ud800", [], [[]], {}, {"": None}):
            body = {**SOUND[path], field: value}
            check(server.post(path, json.dumps(body).encode()), body)

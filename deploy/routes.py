"""HTTP: the routes of OpenAI's API over an ingress, server-sent events, statuses, request ids.

The first chunk of a stream is awaited before the response begins, so that what goes wrong before
the first token is an HTTP status; what goes wrong later is an error event. Work for a client that
went away is cancelled. Knows no tokens.
"""

import asyncio
import json
import logging
import re
import uuid
from collections.abc import AsyncGenerator, Coroutine, Mapping
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, StreamingResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.cluster.errors import RequestError, UnavailableError
from outrider.deploy.answers import Kind
from outrider.deploy.failures import Failure, describe_failure
from outrider.deploy.metrics import TEXT_FORMAT
from outrider.deploy.openapi import describe_api
from outrider.deploy.status_page import HEADERS, render_trouble

REQUEST_ID = "x-request-id"
MAX_REQUEST_ID = 128  # characters
CLIENT_CLOSED_REQUEST = 499  # nginx's status for an answer that nobody waits for
DONE = b"data: [DONE]\n\n"

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Chunks = AsyncGenerator[dict[str, Any], None]


class Answers(Protocol):
    """The part of `Ingress` that the routes need."""

    async def create(
        self, kind: Kind, body: Mapping[str, Any], request_id: str | None = None
    ) -> dict[str, Any]: ...

    def stream(
        self, kind: Kind, body: Mapping[str, Any], request_id: str | None = None
    ) -> _Chunks: ...

    async def list_models(self) -> list[dict[str, Any]]: ...

    def check_model(self, name: str | None) -> None: ...

    async def check_ready(self) -> None: ...

    async def metrics(self) -> bytes: ...

    async def status(self) -> str: ...


def build_routes(answers: Answers, *, echo_request_id: bool = True) -> FastAPI:
    """The HTTP app over `answers`.

    Without `echo_request_id` the x-request-id of a response is left to the server in front.
    """
    app = FastAPI(openapi_url=None)  # it knows no bodies: they are checked without it

    async def answer(kind: Kind, request: Request) -> Response:
        body = await _read_json(request)
        if body.get("stream") is not True:
            return _json(await answers.create(kind, body, request.state.id))
        chunks = answers.stream(kind, body, request.state.id)
        return EventStream(await anext(chunks), chunks, request.state.id)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _guard(request, answer("completions", request))

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _guard(request, answer("chat", request))

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        async def list_them() -> Response:
            return _json({"object": "list", "data": await answers.list_models()})

        return await _guard(request, list_them())

    @app.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        async def find() -> Response:
            answers.check_model(name)
            return _json((await answers.list_models())[0])

        return await _guard(request, find())

    @app.get("/health")
    async def health(request: Request) -> Response:
        async def check() -> Response:
            await answers.check_ready()
            return _json({"status": "ok"})

        return await _guard(request, check())

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        async def show() -> Response:
            return Response(await answers.metrics(), media_type=TEXT_FORMAT)

        return await _guard(request, show())

    @app.get("/status")
    async def status(request: Request) -> Response:
        async def show() -> Response:
            try:
                return HTMLResponse(await answers.status(), headers=HEADERS)
            except UnavailableError as error:
                return HTMLResponse(render_trouble(str(error)), 503, HEADERS)

        return await _guard(request, show())

    @app.get("/openapi.json")
    async def openapi() -> Response:
        return _json(describe_api())

    @app.exception_handler(HTTPException)
    async def no_such_route(request: Request, error: HTTPException) -> Response:
        message = f"{error.detail}: {request.method} {request.url.path}"
        headers = dict(error.headers or {})
        return _fail(Failure(error.status_code, message, "invalid_request_error", headers=headers))

    app.add_middleware(NameRequests, echo=echo_request_id)
    app.add_middleware(AnswerHead)
    return app


class AnswerHead:
    """Answers HEAD as GET without the body, as HTTP wants of every route that has GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            return await self._app(scope, receive, send)

        async def send_head(message: Message) -> None:
            is_body = message["type"] == "http.response.body"
            await send({**message, "body": b""} if is_body else message)

        await self._app({**scope, "method": "GET"}, receive, send_head)


class NameRequests:
    """Gives each request an id, the client's if it sent a usable one, as `request.state.id`."""

    def __init__(self, app: ASGIApp, echo: bool) -> None:
        self._app = app
        self._echo = echo

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        request_id = clean_request_id(Headers(scope=scope).get(REQUEST_ID))
        scope.setdefault("state", {})["id"] = request_id

        async def send_named(message: Message) -> None:
            if self._echo and message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        await self._app(scope, receive, send_named)


class EventStream(StreamingResponse):
    """Chunks as server-sent events, then `[DONE]`; whatever happens, `chunks` is closed."""

    def __init__(self, first: dict[str, Any], chunks: _Chunks, request_id: str) -> None:
        self._chunks = chunks
        super().__init__(
            _events(first, chunks, request_id),
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._chunks):
            await super().__call__(scope, receive, send)


async def _events(
    first: dict[str, Any], chunks: _Chunks, request_id: str
) -> AsyncGenerator[bytes, None]:
    yield _event(first)
    try:
        async for chunk in chunks:
            yield _event(chunk)
    except Exception as error:  # the status is sent already: all that is left is an event
        yield _event(_describe(error, request_id).body)
    yield DONE


def clean_request_id(given: str | None) -> str:
    """The client's id if it is safe to log and to send back, at most 128 characters; else a new."""
    given = (given or "")[:MAX_REQUEST_ID]
    return given if re.fullmatch(r"[\w.:/+=@-]+", given, re.ASCII) else uuid.uuid4().hex


async def _guard(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """The response of `work`, or to its failure; `work` is cancelled when the client goes away."""
    await request.body()  # kept by the request: what is received after it can only be the end
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            _log.info("%s: the client disconnected", request.state.id)
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        return task.result()
    except Exception as error:
        return _fail(_describe(error, request.state.id))
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _read_json(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body())
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestError("the body must be a JSON object")
    return body


def _describe(error: Exception, request_id: str) -> Failure:
    failure = describe_failure(error)
    if failure.status == 500:
        _log.error("%s: internal error", request_id, exc_info=error)
    return failure


def _fail(failure: Failure) -> Response:
    return _json(failure.body, failure.status, failure.headers)


def _json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(body), status, headers, media_type="application/json")


def _event(body: object) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


def _encode(body: object) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which UTF-8 cannot hold, becomes JSON's own escape."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")

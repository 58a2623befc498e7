"""Two ways to an ingress, with the same two calls: over HTTP, and through a Serve handle.

Both answer with the JSON that the API gives and raise RequestError, OverloadedError or
UnavailableError with the server's sentence. However a stream is left, it is closed on the other
side too. Imports Ray only where a handle is used.
"""

import json
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import httpx

from outrider.cluster.errors import UnavailableError
from outrider.deploy.answers import Kind
from outrider.deploy.failures import read_failure, to_outrider_error

PATHS: dict[Kind, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
CONNECT_TIMEOUT_S = 10.0


class Transport(Protocol):
    """A way to an ingress."""

    async def create(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""

    def stream(self, kind: Kind, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of the answer."""

    async def aclose(self) -> None:
        """Free what is held."""


class HttpTransport:
    """Over HTTP, to the server at `url` (with or without /v1)."""

    def __init__(
        self,
        url: str,
        timeout_s: float | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        self._http = httpx.AsyncClient(
            base_url=self._url, timeout=timeout, limits=limits, transport=transport
        )

    async def create(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        try:
            response = await self._http.post(PATHS[kind], json=body)
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
        check_status(response)
        answer: dict[str, Any] = response.json()
        return answer

    async def stream(
        self, kind: Kind, body: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of the answer."""
        body = {**body, "stream": True}
        try:
            async with self._http.stream("POST", PATHS[kind], json=body) as response:
                if response.is_error:
                    await response.aread()
                    check_status(response)
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    if line.startswith("data:"):
                        chunk = json.loads(data)
                        if "error" in chunk:
                            raise read_failure(chunk)
                        yield chunk
        except httpx.HTTPError as error:
            raise self._unavailable(error) from error
        raise UnavailableError(f"{self._url} ended the stream before the answer")

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def _unavailable(self, error: httpx.HTTPError) -> UnavailableError:
        reason = str(error) or type(error).__name__
        return UnavailableError(f"cannot reach {self._url}: {reason}")


class HandleTransport:
    """Through the Serve handle of an ingress deployment, without HTTP."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def create(self, kind: Kind, body: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        response = self._handle.create.remote(kind, _as_json(body))
        try:
            answer: dict[str, Any] = await response
            return answer
        except Exception as error:
            raise to_outrider_error(error, "the server") from None
        finally:
            response.cancel()

    async def stream(
        self, kind: Kind, body: dict[str, Any]
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of the answer."""
        chunks = self._streaming.stream.remote(kind, _as_json(body))
        try:
            async for chunk in chunks:
                yield chunk
        except Exception as error:
            raise to_outrider_error(error, "the server") from None
        finally:
            chunks.cancel()

    async def aclose(self) -> None:
        """Nothing is held."""


def _as_json(body: dict[str, Any]) -> dict[str, Any]:
    """The body as it would arrive over HTTP: tuples become lists, and so on."""
    copy: dict[str, Any] = json.loads(json.dumps(body))
    return copy


def check_status(response: httpx.Response) -> None:
    """Raise the error that an answer tells, if it tells one."""
    if response.is_success:
        return
    try:
        body = response.json()
    except ValueError:
        text = response.text.strip()[:200]
        body = {"error": {"message": text}} if text else None
    raise read_failure(body, response.status_code)

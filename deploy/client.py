"""Python clients: `Client` and `AsyncClient` over a URL or the Serve handle of an ingress.

A prompt is a text, token ids or a list of chat messages; fields of the API (`temperature=0`,
`max_tokens=64`, ...) are passed on as they are. Errors are RequestError, OverloadedError and
UnavailableError with the server's sentence. Imports no torch, and Ray only where a handle is used.
"""

import asyncio
import sys
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar, overload

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from outrider.deploy.answers import Kind
from outrider.deploy.completion import Chunk, Completion
from outrider.deploy.transports import HandleTransport, HttpTransport, Transport

Message = Mapping[str, Any]
Prompt = str | list[int] | list[Message]
Prompts = list[str] | list[list[int]] | list[list[Message]]

_T = TypeVar("_T")


class AsyncClient:
    """For use in an event loop; `async with AsyncClient(...) as client:` closes it.

    `server` is a URL or the Serve handle of an ingress. `timeout_s` is the longest silence of a
    server over HTTP (null = no limit); `http_transport` replaces the network below httpx.
    """

    def __init__(
        self,
        server: str | Any,
        *,
        timeout_s: float | None = None,
        http_transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._transport: Transport = (
            HttpTransport(server, timeout_s, http_transport)
            if isinstance(server, str)
            else HandleTransport(server)
        )

    @overload
    async def generate(
        self, prompt: Prompt, *, concurrency: int = 16, progress: bool | None = None, **fields: Any
    ) -> Completion: ...

    @overload
    async def generate(
        self, prompt: Prompts, *, concurrency: int = 16, progress: bool | None = None, **fields: Any
    ) -> list[Completion]: ...

    async def generate(
        self,
        prompt: Prompt | Prompts,
        *,
        concurrency: int = 16,
        progress: bool | None = None,
        **fields: Any,
    ) -> Completion | list[Completion]:
        """Answer one prompt, or many in their order, at most `concurrency` at a time.

        With many prompts a bar shows the progress if stderr is a terminal, or as `progress` says.
        The first error ends all.
        """
        if _is_one(prompt):
            return await self._generate_one(prompt, fields)
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        completions: list[Completion | None] = [None] * len(prompt)
        waiting = enumerate(prompt)

        async def work(bar: Progress) -> None:
            for index, one in waiting:
                completions[index] = await self._generate_one(one, fields)
                bar.advance(bar.task_ids[0])

        with _progress(len(prompt), progress) as bar:
            tasks = [asyncio.create_task(work(bar)) for _ in range(min(concurrency, len(prompt)))]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        return [completion for completion in completions if completion is not None]

    async def stream(self, prompt: Prompt, **fields: Any) -> AsyncGenerator[Chunk, None]:
        """The answer to one prompt, as it comes.

        Whoever stops early should close the generator (`contextlib.aclosing`): that is when the
        server stops, too.
        """
        kind, body = _request(prompt, fields)
        async with aclosing(self._transport.stream(kind, body)) as chunks:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    yield Chunk.read(choice, chunk.get("metrics"))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._transport.aclose()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def _generate_one(self, prompt: Any, fields: Mapping[str, Any]) -> Completion:
        kind, body = _request(prompt, fields)
        return Completion.read(await self._transport.create(kind, body))


class Client:
    """`AsyncClient` for code without an event loop; it runs one in a thread until `close`.

    Takes the same arguments; `with Client(...) as client:` closes it.
    """

    def __init__(
        self,
        server: str | Any,
        *,
        timeout_s: float | None = None,
        http_transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._client = AsyncClient(server, timeout_s=timeout_s, http_transport=http_transport)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="outrider-client", daemon=True
        )
        self._thread.start()

    @overload
    def generate(
        self, prompt: Prompt, *, concurrency: int = 16, progress: bool | None = None, **fields: Any
    ) -> Completion: ...

    @overload
    def generate(
        self, prompt: Prompts, *, concurrency: int = 16, progress: bool | None = None, **fields: Any
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Any,
        *,
        concurrency: int = 16,
        progress: bool | None = None,
        **fields: Any,
    ) -> Completion | list[Completion]:
        """Answer one prompt, or many in their order, at most `concurrency` at a time."""
        answer: Completion | list[Completion] = self._run(
            self._client.generate(prompt, concurrency=concurrency, progress=progress, **fields)
        )
        return answer

    def stream(self, prompt: Prompt, **fields: Any) -> Generator[Chunk, None, None]:
        """The answer to one prompt, as it comes; leaving the loop early stops the server."""
        chunks = self._client.stream(prompt, **fields)
        try:
            while (chunk := self._run(anext(chunks, None))) is not None:
                yield chunk
        finally:
            self._run(chunks.aclose())

    def close(self) -> None:
        """Close the connections and end the thread."""
        if self._loop.is_closed():
            return
        self._run(self._client.aclose())
        self._run(self._loop.shutdown_asyncgens())
        self._run(self._loop.shutdown_default_executor())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, work: Coroutine[Any, Any, _T]) -> _T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # Ctrl-C while waiting: the work must not go on alone
            future.cancel()
            raise


def _is_one(prompt: Sequence[Any]) -> bool:
    """Whether it is one prompt: a text, token ids or messages; an empty list is no prompts."""
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], int | Mapping))


def _request(prompt: Any, fields: Mapping[str, Any]) -> tuple[Kind, dict[str, Any]]:
    """Which API answers the prompt, and the body to send."""
    body = {"return_token_ids": True, **fields}
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], Mapping):
        return "chat", {"messages": prompt, **body}
    return "completions", {"prompt": prompt, **body}


@contextmanager
def _progress(total: int, wanted: bool | None) -> Iterator[Progress]:
    shown = sys.stderr.isatty() if wanted is None else wanted
    columns = [TextColumn("prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        bar.add_task("prompts", total=total)
        yield bar

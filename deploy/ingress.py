"""The way in: checks and tokenises a request, asks the coordinator, answers in OpenAI's words.

`Ingress` is a plain class: Serve wraps it where the app is built, tests call it. `create` and
`stream` answer with dictionaries, through a Serve handle as well as under the HTTP routes.
However a request ends, its stream from the coordinator is cancelled: nothing is decoded unread.
Knows no tensors; ids and text only.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from ray import serve
from starlette.types import ASGIApp

from outrider.actors.requests import Delta, GenerateRequest, ModelCard
from outrider.actors.stats import Snapshot
from outrider.cluster.config import Settings
from outrider.cluster.errors import RequestError, UnavailableError
from outrider.cluster.logs import log_to_terminal, reporter
from outrider.deploy.answers import Answer, Kind
from outrider.deploy.failures import UnknownModelError, to_outrider_error, unwrap
from outrider.deploy.metrics import render
from outrider.deploy.routes import build_routes
from outrider.deploy.schema import (
    ChatBody,
    CompletionBody,
    check_context,
    check_vocabulary,
    parse_chat,
    parse_completion,
)
from outrider.deploy.tokens import Tokenizer, Tokens

CONTROL_TIMEOUT_S = 10.0  # for the coordinator's answer to a question that needs no decoding

_log = logging.getLogger(__name__)


class DeltaStream(Protocol):
    """What a streaming call of the coordinator returns: Serve's DeploymentResponseGenerator."""

    def __aiter__(self) -> AsyncIterator[list[Delta]]: ...

    def cancel(self) -> None: ...


@dataclass(frozen=True)
class _Prepared:
    request: GenerateRequest
    answer: Answer


class Ingress:
    """Serves one model's OpenAI API over the handle of its coordinator.

    `coordinator` is a Serve handle (or has its interface); without a `tokenizer`, the target's own
    or the one that the settings name is loaded: ConfigError if that fails.
    """

    def __init__(
        self, settings: Settings, coordinator: Any, tokenizer: Tokenizer | None = None
    ) -> None:
        self.model_name = settings.model_name
        self._settings = settings
        self._coordinator = coordinator
        self._streaming = coordinator.options(stream=True)
        self._tokens = Tokens(tokenizer or _load_tokenizer(settings))
        self._card: ModelCard | None = None
        self._num_spec_tokens = max(
            (draft.num_speculative_tokens for draft in settings.drafts), default=0
        )

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """The HTTP side, where Serve asks for it; its proxy names the requests by itself."""
        return build_routes(self, echo_request_id=False)

    async def create(
        self, kind: Kind, body: Mapping[str, Any], request_id: str | None = None
    ) -> dict[str, Any]:
        """The whole answer to a request of `kind`, in OpenAI's words.

        Raises RequestError, OverloadedError or UnavailableError.
        """
        prepared = await self._prepare(kind, body, request_id)
        async with aclosing(self._deltas(prepared)) as items:
            async for deltas in items:
                for delta in deltas:
                    prepared.answer.collect(delta)
        return prepared.answer.whole()

    async def stream(
        self, kind: Kind, body: Mapping[str, Any], request_id: str | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """The chunks of the answer as they come; raises what `create` does, mostly at the first."""
        prepared = await self._prepare(kind, {**body, "stream": True}, request_id)
        async with aclosing(self._deltas(prepared)) as items:
            async for deltas in items:
                for chunk in prepared.answer.chunks(deltas):
                    yield chunk

    async def list_models(self) -> list[dict[str, Any]]:
        """The models served, as OpenAI lists them: one. UnavailableError until it is loaded."""
        card = await self._describe()
        return [
            {
                "id": self.model_name,
                "object": "model",
                "created": card.created,
                "owned_by": "outrider",
                "root": self.model_name,
                "parent": None,
                "max_model_len": card.max_model_len,
            }
        ]

    async def check_ready(self) -> None:
        """Return if the coordinator says that it can serve; UnavailableError otherwise.

        Not named `check_health`: Serve would restart the ingress for the coordinator's illness.
        """
        await self._ask(self._coordinator.check_ready.remote(), "not ready")

    async def metrics(self) -> bytes:
        """The coordinator's counts in Prometheus' text format, whichever ingress is asked."""
        snapshot: Snapshot = await self._ask(self._coordinator.measure.remote(), "not ready")
        return render(self._settings, snapshot)

    async def _describe(self) -> ModelCard:
        if self._card is None:
            self._card = await self._ask(self._coordinator.describe.remote(), "not ready")
        return self._card

    async def _ask(self, call: Awaitable[Any], trouble: str) -> Any:
        try:
            return await asyncio.wait_for(_await(call), CONTROL_TIMEOUT_S)
        except TimeoutError:
            message = f"the coordinator is {trouble}: no answer within {CONTROL_TIMEOUT_S:g} s"
            raise UnavailableError(message) from None
        except Exception as error:
            raise UnavailableError(f"the coordinator is {trouble}: {unwrap(error)}") from error

    async def _prepare(
        self, kind: Kind, body: Mapping[str, Any], request_id: str | None
    ) -> _Prepared:
        """Check and tokenise."""
        parsed: CompletionBody | ChatBody
        if kind == "chat":
            parsed = parse_chat(body)
        elif kind == "completions":
            parsed = parse_completion(body)
        else:
            raise RequestError(f"no such kind of request: {kind!r}")
        self.check_model(parsed.model)
        card = await self._describe()
        prompts = await self._tokens.encode_prompts(parsed)
        check_context(prompts, card.max_model_len, "messages" if kind == "chat" else "prompt")
        bad_words = await self._tokens.encode_bad_words(parsed.bad_words)
        check_vocabulary(parsed, prompts, card.vocabulary_size, bad_words)
        request = parsed.to_request(request_id or uuid.uuid4().hex, prompts, bad_words)
        asked = parsed.num_speculative_tokens
        answer = Answer(
            kind=kind,
            model=self.model_name,
            request=request,
            texts=self._tokens.texts,
            # A request may ask for longer drafts than the settings do, if there are drafts.
            num_spec_tokens=self._num_spec_tokens
            if asked is None or self._num_spec_tokens == 0
            else asked,
            return_token_ids=parsed.return_token_ids,
            include_usage=parsed.include_usage,
        )
        return _Prepared(request, answer)

    def check_model(self, name: str | None) -> None:
        """Refuse a model that is not served here."""
        if name is not None and name != self.model_name:
            raise UnknownModelError(
                f"The model {name!r} does not exist: this server has {self.model_name!r}", "model"
            )

    async def _deltas(self, prepared: _Prepared) -> AsyncGenerator[list[Delta], None]:
        """The coordinator's items; the stream is cancelled however this ends."""
        request, answer = prepared.request, prepared.answer
        _log.info("%s: %d prompts, n %d", request.request_id, len(request.prompts), request.n)
        stream: DeltaStream = self._streaming.generate.remote(request)
        try:
            async for deltas in stream:
                await self._tokens.read(deltas)
                yield deltas
            if not answer.is_finished:
                raise UnavailableError("the coordinator ended the stream before the answer")
        except Exception as error:
            reason = to_outrider_error(error, "the coordinator")
            _log.warning("%s: failed: %s", request.request_id, reason)
            raise reason from None
        finally:
            stream.cancel()
            _log.info(
                "%s: %d of %d choices ended",
                request.request_id,
                answer.num_ended,
                answer.num_choices,
            )


def make_ingress() -> Any:
    """`Ingress` as a class for a Serve deployment; its HTTP side is made in the replica."""
    return serve.ingress()(Ingress)


async def _await(call: Awaitable[Any]) -> Any:
    """`wait_for` wants a coroutine; a DeploymentResponse is only awaitable."""
    return await call


def _load_tokenizer(settings: Settings) -> Tokenizer:
    # Only a server that has no tokenizer yet needs transformers.
    from outrider.actors.vocabulary import load_tokenizer
    from outrider.cluster.models import resolve

    log_to_terminal(logging.WARNING)
    report = reporter("ingress")
    target = settings.target
    return load_tokenizer(resolve(target.model, target.revision, report), target.tokenizer, report)

"""What a request may say: OpenAI's fields with the extensions of vLLM, checked before any work.

`parse_completion` and `parse_chat` turn a JSON body into a checked, frozen request, or raise a
RequestError that names the field. Types are strict: a boolean is no number, a string no list;
null means "not given". Knows the vocabulary's and the context's size only as numbers.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)

from outrider.actors.requests import GenerateRequest
from outrider.cluster.errors import RequestError
from outrider.deploy.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, screen

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
MAX_N = 128
MAX_STOP_STRINGS = 16
MAX_SPECULATIVE_TOKENS = 64

Prompts = list[str] | list[list[int]]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class StreamOptions(_Strict):
    """What a stream tells besides the answer."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = None  # padding against eavesdroppers: ignored
    continuous_usage_stats: Literal[False] | None = None


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _encodable(value: str) -> str:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError("holds half of a surrogate pair, which is no text") from error
    return value


Text = Annotated[str, AfterValidator(_encodable)]
StopString = Annotated[str, Field(min_length=1), AfterValidator(_encodable)]


class GenerationBody(_Strict):
    """The fields that completions and chat have in common."""

    model: str | None = None  # None = the one that is served
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)  # 0 = greedy
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)  # 0 and -1 = off
    n: int = Field(1, ge=1, le=MAX_N)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: Annotated[list[StopString], BeforeValidator(_listed)] = Field(
        default=[], max_length=MAX_STOP_STRINGS
    )
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    num_speculative_tokens: int | None = Field(None, ge=0, le=MAX_SPECULATIVE_TOKENS)

    @model_validator(mode="after")
    def _consistent(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream: true", "stream_options")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise RequestError(
                "max_tokens and max_completion_tokens differ: give one of them", "max_tokens"
            )
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens of one answer; None = to the context's end."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a chunk of its own for the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def to_request(self, request_id: str, prompts: list[list[int]]) -> GenerateRequest:
        """The request for the coordinator, with the prompts tokenised."""
        return GenerateRequest(
            request_id=request_id,
            prompts=prompts,
            n=self.n,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            seed=self.seed,
            max_tokens=self.limit,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            num_speculative_tokens=self.num_speculative_tokens,
        )


def _prompts(value: object) -> Prompts:
    if isinstance(value, str):
        return [_encodable(value)]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [_ids(value)]
        if all(isinstance(item, str) for item in value):
            return [_encodable(item) for item in value]
        if all(isinstance(item, list) and item for item in value):
            return [_ids(item) for item in value]
    raise ValueError("must be a string, a list of strings, token ids or a list of lists of them")


def _ids(value: list[Any]) -> list[int]:
    for item in value:
        if type(item) is not int or item < 0:
            raise ValueError(f"{item!r} is not a token id")
    return value


class CompletionBody(GenerationBody):
    """A request to continue one or more prompts."""

    prompt: Annotated[Prompts, PlainValidator(_prompts)]

    @property
    def limit(self) -> int | None:
        """Most tokens of one answer."""
        return super().limit or COMPLETION_MAX_TOKENS


class TextPart(_Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: Text


def _one_text(value: object) -> object:
    """Content as one string: text parts are joined by line ends, as in vLLM."""
    if not isinstance(value, list):
        return value
    if not value:
        raise ValueError("must hold at least one part")
    parts = []
    for index, part in enumerate(value):
        try:
            parts.append(TextPart.model_validate(part).text)
        except ValidationError as error:
            raise ValueError(f"part {index} is not {{'type': 'text', 'text': ...}}") from error
    return "\n".join(parts)


class Message(_Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[Text, BeforeValidator(_one_text)]
    name: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, value: object) -> object:
        """Clients send back the assistant's message with all its fields, most of them empty."""
        if not isinstance(value, Mapping):
            return value
        kept = ("role", "content")
        return {k: v for k, v in value.items() if k in kept or not (v is None or v == [])}

    def to_template(self) -> dict[str, str]:
        """The message for a chat template; `developer` is OpenAI's newer word for `system`."""
        role = "system" if self.role == "developer" else self.role
        name = {} if self.name is None else {"name": self.name}
        return {"role": role, "content": self.content, **name}


class ChatBody(GenerationBody):
    """A request for the next message of a conversation."""

    messages: list[Message] = Field(min_length=1)


Body = TypeVar("Body", bound=GenerationBody)


def parse_completion(body: object) -> CompletionBody:
    """Check the body of a completions request; RequestError if it cannot be served."""
    return _parse(CompletionBody, COMPLETION_NEUTRAL, body)


def parse_chat(body: object) -> ChatBody:
    """Check the body of a chat request; RequestError if it cannot be served."""
    return _parse(ChatBody, CHAT_NEUTRAL, body)


def check_vocabulary(body: GenerationBody, prompts: list[list[int]], size: int) -> None:
    """Refuse token ids that the vocabulary of `size` ids does not have."""
    for ids in prompts:
        if max(ids, default=0) >= size:
            raise RequestError(f"token id {max(ids)} is not below {size}", "prompt")
    if max(body.stop_token_ids, default=0) >= size:
        message = f"token id {max(body.stop_token_ids)} is not below {size}"
        raise RequestError(message, "stop_token_ids")


def check_context(prompts: list[list[int]], max_model_len: int, param: str) -> None:
    """Refuse prompts that are empty or leave no room for one token of an answer."""
    for ids in prompts:
        if not ids:
            raise RequestError("the prompt has no tokens", param)
        if len(ids) >= max_model_len:
            raise RequestError(
                f"This model's maximum context length is {max_model_len} tokens. However, your "
                f"prompt has {len(ids)} tokens, which leaves no room for an answer: shorten it.",
                param,
            )


def _parse(kind: type[Body], neutral: Mapping[str, tuple[object, ...]], body: object) -> Body:
    if not isinstance(body, Mapping):
        raise RequestError("the body must be a JSON object")
    fields = screen(body, kind.model_fields, neutral)
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _to_request_error(error) from None


def _to_request_error(error: ValidationError) -> RequestError:
    """The first thing that is wrong, with the path to it as OpenAI writes it: messages[0].role."""
    first = error.errors(include_url=False, include_context=False)[0]
    path = ""
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        message = "is required"
    elif first["type"] == "extra_forbidden":
        message = "is not supported: leave it out"
    return RequestError(f"{path}: {message}", re.sub(r"\[\d+\]$", "", path) or None)

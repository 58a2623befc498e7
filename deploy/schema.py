"""What a request may say: OpenAI's fields with the extensions of vLLM, checked before any work.

`parse_completion` and `parse_chat` turn a JSON body into a checked, frozen request, or raise a
RequestError that names the field. Types are strict: a boolean is no number, a string no list;
null means "not given". Knows the vocabulary's and the context's size only as numbers.
"""

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Annotated, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from outrider.actors.requests import GenerateRequest
from outrider.cluster.errors import RequestError
from outrider.deploy.fields import CHAT_NEUTRAL, COMPLETION_NEUTRAL, screen
from outrider.deploy.values import (
    MAX_BAD_WORDS,
    MAX_LOGPROBS,
    BadWord,
    LogitBias,
    NumLogprobs,
    Penalty,
    PromptField,
    StopStrings,
    Text,
    TokenId,
)

COMPLETION_MAX_TOKENS = 16  # OpenAI's default
MAX_N = 128
MAX_SPECULATIVE_TOKENS = 64
# Longer lists would hold up everybody's rounds: they are looked at for every token.
MAX_ALLOWED_IDS = 16_384
MAX_STOP_IDS = 1024


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class StreamOptions(_Strict):
    """What a stream tells besides the answer."""

    include_usage: bool | None = False
    include_obfuscation: bool | None = None  # padding against eavesdroppers: ignored
    continuous_usage_stats: Literal[False] | None = None


class GenerationBody(_Strict):
    """The fields that completions and chat have in common."""

    model: str | None = None  # None = the one that is served
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)  # 0 = greedy
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)  # 0 and -1 = off
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=0.01, le=100)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: LogitBias = {}
    bad_words: list[BadWord] = Field([], max_length=MAX_BAD_WORDS)
    allowed_token_ids: list[TokenId] | None = Field(None, min_length=1, max_length=MAX_ALLOWED_IDS)
    n: int = Field(1, ge=1, le=MAX_N)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    stop: StopStrings = []
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_IDS)
    min_tokens: int = Field(0, ge=0, lt=2**31)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
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
        if self.limit is not None and self.min_tokens > self.limit:
            raise RequestError(
                f"min_tokens: {self.min_tokens} is more than max_tokens, {self.limit}", "min_tokens"
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

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to tell beside each emitted one; None = no logprobs at all."""

    def to_request(
        self,
        request_id: str,
        prompts: list[list[int]],
        bad_words: Iterable[tuple[int, ...]] = (),
    ) -> GenerateRequest:
        """The request for the coordinator, with the prompts and the bad words tokenised."""
        return GenerateRequest(
            request_id=request_id,
            prompts=prompts,
            n=self.n,
            temperature=self.temperature,
            top_k=max(self.top_k, 0),
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=tuple(self.logit_bias.items()),
            bad_words=tuple(bad_words),
            allowed_token_ids=tuple(sorted(set(self.allowed_token_ids or ()))),
            seed=self.seed,
            max_tokens=self.limit,
            stop=tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            logprobs=self.num_logprobs,
            num_speculative_tokens=self.num_speculative_tokens,
        )


class CompletionBody(GenerationBody):
    """A request to continue one or more prompts."""

    prompt: PromptField
    logprobs: NumLogprobs = None

    @property
    def limit(self) -> int | None:
        """Most tokens of one answer."""
        return super().limit or COMPLETION_MAX_TOKENS

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to tell beside each emitted one; None = no logprobs at all."""
        return self.logprobs


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
    content: Annotated[
        Text, BeforeValidator(_one_text, json_schema_input_type=Text | list[TextPart])
    ]
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
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _has_logprobs(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to tell beside each emitted one; None = no logprobs at all."""
        return self.top_logprobs if self.logprobs else None


Body = TypeVar("Body", bound=GenerationBody)


def parse_completion(body: object) -> CompletionBody:
    """Check the body of a completions request; RequestError if it cannot be served."""
    return _parse(CompletionBody, COMPLETION_NEUTRAL, body)


def parse_chat(body: object) -> ChatBody:
    """Check the body of a chat request; RequestError if it cannot be served."""
    return _parse(ChatBody, CHAT_NEUTRAL, body)


def check_vocabulary(
    body: GenerationBody,
    prompts: list[list[int]],
    size: int,
    bad_words: Iterable[tuple[int, ...]] = (),
) -> None:
    """Refuse token ids that the vocabulary of `size` ids does not have."""
    given: dict[str, Iterable[int]] = {
        "messages" if isinstance(body, ChatBody) else "prompt": chain.from_iterable(prompts),
        "stop_token_ids": body.stop_token_ids,
        "logit_bias": body.logit_bias,
        "allowed_token_ids": body.allowed_token_ids or (),
        "bad_words": chain.from_iterable(bad_words),
    }
    for param, ids in given.items():
        largest = max(ids, default=0)
        if largest >= size:
            raise RequestError(f"{param}: token id {largest} is not below {size}", param)


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

"""What a client gets: answers, chunks and counts as frozen objects, read from the API's JSON."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Usage:
    """Tokens of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class Speculation:
    """How speculation went in one request; the rates are None if nothing was drafted."""

    mean_acceptance_length: float | None  # 1 + accepted / steps
    draft_acceptance_rate: float | None  # accepted / drafted
    acceptance_histogram: tuple[int, ...]  # [j]: steps that accepted exactly j tokens
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int

    @classmethod
    def read(cls, metrics: Mapping[str, Any] | None) -> "Speculation | None":
        """From the `metrics` of an answer or of the last chunk."""
        if metrics is None:
            return None
        told = metrics["speculative_decoding"]
        return cls(
            mean_acceptance_length=told["mean_acceptance_length"],
            draft_acceptance_rate=told["draft_acceptance_rate"],
            acceptance_histogram=tuple(told["acceptance_histogram"]),
            num_spec_steps=told["num_spec_steps"],
            num_accepted_draft_tokens=told["num_accepted_draft_tokens"],
            num_draft_tokens=told["num_draft_tokens"],
            num_spec_tokens=told["num_spec_tokens"],
        )


@dataclass(frozen=True)
class Logprob:
    """The target's law at one emitted token: natural logarithms, before any processing."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...]  # the likeliest tokens, as the API told them

    @classmethod
    def read(cls, logprobs: Mapping[str, Any] | None) -> "tuple[Logprob, ...] | None":
        """From the `logprobs` of a choice, in either form; None if there are none."""
        if logprobs is None:
            return None
        if "content" in logprobs:
            return tuple(
                cls(
                    token=entry["token"],
                    logprob=entry["logprob"],
                    top=tuple((top["token"], top["logprob"]) for top in entry["top_logprobs"]),
                )
                for entry in logprobs["content"]
            )
        columns = (logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"])
        return tuple(
            cls(token, logprob, tuple(top.items()))
            for token, logprob, top in zip(*columns, strict=True)
        )


@dataclass(frozen=True)
class Choice:
    """One of the n samples of an answer."""

    text: str
    token_ids: tuple[int, ...]  # with the id that ended it
    finish_reason: str  # "stop" | "length"
    stop_reason: int | str | None  # the stop id or stop string that ended it
    seed: int
    logprobs: tuple[Logprob, ...] | None = None  # one for each of the token ids, if asked for

    @classmethod
    def read(cls, choice: Mapping[str, Any]) -> "Choice":
        """From a choice of an answer."""
        text = choice["message"]["content"] if "message" in choice else choice["text"]
        return cls(
            text=text,
            token_ids=tuple(choice.get("token_ids") or ()),
            finish_reason=choice["finish_reason"],
            stop_reason=choice["stop_reason"],
            seed=choice["seed"],
            logprobs=Logprob.read(choice.get("logprobs")),
        )


@dataclass(frozen=True)
class Completion:
    """The answer to one prompt; `text` and so on are those of its first choice."""

    choices: tuple[Choice, ...]
    usage: Usage
    speculation: Speculation | None

    @property
    def text(self) -> str:
        """The text, without what ended it."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The token ids, with the one that ended it."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> str:
        """Why it ended: "stop" or "length"."""
        return self.choices[0].finish_reason

    @property
    def stop_reason(self) -> int | str | None:
        """The stop id or stop string that ended it."""
        return self.choices[0].stop_reason

    @property
    def seed(self) -> int:
        """The seed that was used: with it, the same request has the same answer."""
        return self.choices[0].seed

    @property
    def logprobs(self) -> tuple[Logprob, ...] | None:
        """One for each of the token ids, if asked for."""
        return self.choices[0].logprobs

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> "Completion":
        """From an answer of the API."""
        usage = answer["usage"]
        return cls(
            choices=tuple(Choice.read(choice) for choice in answer["choices"]),
            usage=Usage(usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]),
            speculation=Speculation.read(answer.get("metrics")),
        )


@dataclass(frozen=True)
class Chunk:
    """What is new in a streamed answer; the last one of a choice has a `finish_reason`."""

    text: str
    token_ids: tuple[int, ...]
    index: int = 0  # of the choice
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    seed: int | None = None  # with the finish_reason
    logprobs: tuple[Logprob, ...] | None = None  # one for each of the token ids, if asked for
    speculation: Speculation | None = None  # of the request, with its last chunk

    @classmethod
    def read(cls, choice: Mapping[str, Any], metrics: Mapping[str, Any] | None) -> "Chunk":
        """From a choice of a chunk, and the chunk's metrics."""
        text = choice["delta"].get("content") if "delta" in choice else choice["text"]
        return cls(
            text=text or "",
            token_ids=tuple(choice.get("token_ids") or ()),
            index=choice["index"],
            finish_reason=choice.get("finish_reason"),
            stop_reason=choice.get("stop_reason"),
            seed=choice.get("seed"),
            logprobs=Logprob.read(choice.get("logprobs")),
            speculation=Speculation.read(metrics),
        )

"""The words that actors say to one another: token ids in columns, one object per call.

Every message is idempotent: positions are absolute, so a repeat or a late arrival is harmless.
Lists of one message have equal length (checked at birth); entry i of each speaks of the same
sequence. `committed` means prompt ids followed by output ids; a *position* is the index of an
output token (0 = first generated token), a *start* or *base* an index into `committed`.
"""

from collections.abc import Sized
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from outrider.actors.spelling import TokenizerData
    from outrider.actors.vocabulary import Vocabulary


# Drafts have the target's vocabulary, or another, of which ids or text are translated; or no model.
Method = Literal["same", "string", "token", "prompt_lookup"]


class Shaping(NamedTuple):
    """What a request does to the logits before temperature; the defaults do nothing."""

    repetition_penalty: float = 1.0  # over prompt and output ids
    presence_penalty: float = 0.0  # over output ids, as frequency_penalty
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, what is added)
    bad_words: tuple[tuple[int, ...], ...] = ()  # id sequences that the output must not hold
    allowed_ids: tuple[int, ...] = ()  # empty = all
    min_tokens: int = 0  # output tokens before any of `end_ids` may be drawn
    end_ids: tuple[int, ...] = ()


class Sampling(NamedTuple):
    """The law of one sequence's next token, and the key of its random numbers."""

    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # 1 = off
    seed: int = 0  # 0 <= seed < 2**64
    choice: int = 0  # index of the sample within its prompt (0 for n = 1)
    min_p: float = 0.0  # 0 = off
    shaping: Shaping | None = None  # None = the logits as they are


class TokenLogprob(NamedTuple):
    """Natural logarithms of the target's unprocessed law at one emitted token."""

    logprob: float  # of the token itself
    top: tuple[tuple[int, float], ...]  # the likeliest (id, logprob), likeliest first


class Law(NamedTuple):
    """The sparse law q that each token of one proposal was really drawn from (ratio rule)."""

    ids: NDArray[np.int64]  # [tokens, k], target ids, distinct within a row
    probs: NDArray[np.float64]  # [tokens, k], each row sums to 1; 0 pads


@dataclass(frozen=True)
class Contexts:
    """Coordinator to a draft: what was committed, and how many tokens to propose after it."""

    sequence: list[int] = field(default_factory=list)
    epoch: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)  # `ids` are committed[start:]
    ids: list[list[int]] = field(default_factory=list)  # never empty
    position: list[int] = field(default_factory=list)  # output position of the first token proposed
    num_tokens: list[int] = field(default_factory=list)  # at most so many
    sampling: list[Sampling] = field(default_factory=list)
    with_law: bool = False  # ratio rule: sampled tokens come with their law
    method: Method = "same"  # how the draft's tokens become the target's

    def __post_init__(self) -> None:
        _check_columns(
            self.sequence, self.epoch, self.start, self.ids, self.position, self.num_tokens,
            self.sampling,
        )  # fmt: skip


@dataclass(frozen=True)
class Proposals:
    """A draft to the coordinator: tokens that may follow committed[:base]; empty = none."""

    sequence: list[int] = field(default_factory=list)
    epoch: list[int] = field(default_factory=list)
    base: list[int] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    law: list[Law | None] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)  # sequences to be sent again from start 0
    method: Method = "same"
    seconds: float = 0.0  # time spent in the call

    def __post_init__(self) -> None:
        _check_columns(self.sequence, self.epoch, self.base, self.ids, self.law)


@dataclass(frozen=True)
class Rows:
    """Coordinator to the target: tokens to run, each row at its own place, and what to decide.

    Row i's cache is cut to `start`, then `ids` are run; the last `num_drafted` of them are drafted,
    those before are committed. Where `decides` is false (a prefill chunk that does not reach the
    end of the committed tokens) nothing is chosen.
    """

    row: list[int] = field(default_factory=list)  # row of the KV cache
    start: list[int] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    num_drafted: list[int] = field(default_factory=list)
    decides: list[bool] = field(default_factory=list)
    position: list[int] = field(default_factory=list)  # output position of the first choice
    sampling: list[Sampling] = field(default_factory=list)
    law: list[Law | None] = field(default_factory=list)  # only with the ratio rule
    num_logprobs: list[int | None] = field(default_factory=list)  # likeliest told; None = nothing

    def __post_init__(self) -> None:
        _check_columns(
            self.row, self.start, self.ids, self.num_drafted, self.decides, self.position,
            self.sampling, self.law, self.num_logprobs,
        )  # fmt: skip

    @property
    def num_ids(self) -> int:
        """Tokens run by the pass."""
        return sum(map(len, self.ids))


@dataclass(frozen=True)
class Outcomes:
    """The target to the coordinator, in the order of `Rows`: drafted ids kept, then its own id."""

    accepted: list[int] = field(default_factory=list)  # 0 where nothing was decided
    next_id: list[int] = field(default_factory=list)  # -1 where nothing was decided
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)  # of accepted + 1 ids; or []
    seconds: float = 0.0  # time spent in the pass

    def __post_init__(self) -> None:
        _check_columns(self.accepted, self.next_id, self.logprobs)


@dataclass(frozen=True)
class LoadReport:
    """A worker to the coordinator, once: what it loaded."""

    vocabulary: "Vocabulary"
    num_logits: int  # rows of the model's embedding
    end_ids: tuple[int, ...]
    max_model_len: int
    weights_bytes: int = 0
    cache_bytes: int = 0
    tokenizer: "TokenizerData | None" = None  # None = none that can be translated

    @property
    def num_ids(self) -> int:
        """Ids that can be fed are below this: known to the tokenizer and to the model."""
        return min(self.vocabulary.size, self.num_logits)


def _check_columns(*columns: Sized) -> None:
    lengths = {len(column) for column in columns}
    if len(lengths) > 1:
        raise ValueError(f"columns of one message differ in length: {sorted(lengths)}")

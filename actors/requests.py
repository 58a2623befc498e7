"""What a client asks of the coordinator, and what streams back: ids and text, no HTTP."""

from dataclasses import dataclass, field

from outrider.actors.messages import TokenLogprob


@dataclass(frozen=True)
class GenerateRequest:
    """One request, checked and tokenised by the ingress: every prompt is answered `n` times."""

    request_id: str
    prompts: list[list[int]]  # token ids, none empty
    n: int = 1
    temperature: float = 1.0  # 0 = greedy
    top_k: int = 0  # 0 = off
    top_p: float = 1.0  # in (0, 1]
    min_p: float = 0.0  # in [0, 1]
    repetition_penalty: float = 1.0  # > 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, what is added), ids distinct
    bad_words: tuple[tuple[int, ...], ...] = ()  # id sequences, none empty
    allowed_token_ids: tuple[int, ...] = ()  # empty = all
    seed: int | None = None  # any int; None = drawn per prompt, returned in the deltas
    max_tokens: int | None = None  # None = to the context's end
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0  # output tokens before anything may end the answer
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # likeliest tokens told beside each emitted one; None = nothing
    num_speculative_tokens: int | None = None  # None = as configured; 0 = plain decoding


@dataclass
class SpeculationCounts:
    """Plain counts of one sequence, or summed, in the words of vLLM.

    A *draft* is one verified block with at least one drafted token; tokens are counted as verified,
    before stop rules cut the block. `drafted_at[i]` and `accepted_at[i]` count position i of the
    blocks, `by_length[d][a]` the blocks of d drafted tokens of which exactly a were accepted.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    by_length: dict[int, list[int]] = field(default_factory=dict)

    def record(self, drafted: int, accepted: int) -> None:
        """Count one verified block."""
        if drafted == 0:
            return
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        missing = drafted - len(self.drafted_at)
        self.drafted_at.extend([0] * missing)
        self.accepted_at.extend([0] * missing)
        for position in range(drafted):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < accepted
        self.by_length.setdefault(drafted, [0] * (drafted + 1))[accepted] += 1

    def add(self, other: "SpeculationCounts") -> None:
        """Add the counts of another."""
        self.num_drafts += other.num_drafts
        self.num_draft_tokens += other.num_draft_tokens
        self.num_accepted_tokens += other.num_accepted_tokens
        missing = len(other.drafted_at) - len(self.drafted_at)
        self.drafted_at.extend([0] * missing)
        self.accepted_at.extend([0] * missing)
        for position, (drafted, accepted) in enumerate(
            zip(other.drafted_at, other.accepted_at, strict=True)
        ):
            self.drafted_at[position] += drafted
            self.accepted_at[position] += accepted
        for length, blocks in other.by_length.items():
            mine = self.by_length.setdefault(length, [0] * (length + 1))
            for accepted, count in enumerate(blocks):
                mine[accepted] += count


@dataclass(frozen=True)
class Delta:
    """New ids and text of one sequence. The last one of a sequence has a `finish_reason`."""

    index: int  # prompt * n + choice
    ids: list[int]  # includes the id that ended the answer
    text: str  # excludes it unless include_stop_str_in_output; whole UTF-8 characters only
    seed: int  # the seed used; of a user's seed, the number given
    finish_reason: str | None = None  # "stop" | "length"
    stop_reason: int | str | None = None  # the stop id or stop string that ended it
    speculation: SpeculationCounts | None = None  # with the finish_reason
    num_passes: int = 0  # with the finish_reason: target passes that decided tokens of it
    logprobs: list[TokenLogprob] | None = None  # one for each of `ids`, if asked for


@dataclass(frozen=True)
class ModelCard:
    """What the coordinator serves."""

    model_name: str
    max_model_len: int
    vocabulary_size: int  # token ids a prompt may hold are below this
    created: int  # unix seconds

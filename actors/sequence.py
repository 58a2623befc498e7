"""One answer in the making: its committed ids, its stop rules, and the proposal it holds.

The committed ids (prompt, then output) are the only truth; every cache is a cache of them.
Knows neither Ray nor clocks, nor which draft or row serves it beyond their names.
"""

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field

from outrider.actors.messages import Law, Method, Sampling, TokenLogprob
from outrider.actors.requests import Delta, SpeculationCounts
from outrider.actors.text import TextStream


@dataclass(frozen=True)
class StopRules:
    """What ends an answer, beside the client's disconnection.

    Ids and strings end it at output token number `min_tokens` or later; what comes earlier is text.
    """

    max_tokens: int  # >= 1; the context's end is counted in
    end_ids: frozenset[int] = frozenset()  # the model's end-of-sequence ids
    stop_ids: frozenset[int] = frozenset()  # the client's own
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    include_stop: bool = False  # the text includes the stop string or the id that ended it


@dataclass(frozen=True)
class Proposal:
    """Ids that a draft proposed after committed[:base]."""

    draft: str
    base: int
    ids: list[int]
    law: Law | None = None
    method: Method = "same"


@dataclass(frozen=True)
class Block:
    """The part of a proposal that still fits: what one pass verifies after the committed ids."""

    draft: str | None = None
    ids: list[int] = field(default_factory=list)
    law: Law | None = None
    method: Method = "same"


NO_BLOCK = Block()


class Sequence:
    """One answer; `committed` grows by whole verified blocks and never shrinks."""

    def __init__(
        self,
        id: int,
        index: int,
        prompt: Ids[int],
        sampling: Sampling,
        rules: StopRules,
        text: TextStream,
        *,
        seed: int | None = None,
        num_speculative_tokens: int | None = None,
        num_logprobs: int | None = None,
    ) -> None:
        self.id = id
        self.index = index  # of the answer within its request
        self.committed = list(prompt)
        self.num_prompt_ids = len(prompt)
        self.sampling = sampling
        self.rules = rules
        self.seed = sampling.seed if seed is None else seed  # as the client wrote it
        self.num_logprobs = num_logprobs
        self.row: int | None = None  # of the target's cache
        self.num_cached = 0  # committed ids that the target's cache holds
        self.num_passes = 0
        self.num_losses = 0  # passes with it in which the target was lost
        self.counts = SpeculationCounts()
        self.proposal: Proposal | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self._text = text
        self._num_speculative_tokens = num_speculative_tokens

    @property
    def position(self) -> int:
        """Index of the next output id."""
        return len(self.committed) - self.num_prompt_ids

    @property
    def num_pending(self) -> int:
        """Committed ids that the target has not run; 1 while decoding."""
        return len(self.committed) - self.num_cached

    def draft_length(self, configured: int) -> int:
        """Ids worth drafting now: the target adds one of its own, so one less than may follow."""
        wanted = self._num_speculative_tokens
        return min(configured if wanted is None else wanted, self._room)

    @property
    def _room(self) -> int:
        return self.rules.max_tokens - self.position - 1

    def salvage(self) -> str | None:
        """Rebase the held proposal onto the ids committed since; say why it was dropped, if so."""
        proposal = self.proposal
        if proposal is None:
            return None
        since = self.committed[proposal.base :]
        ids, law = proposal.ids[len(since) :][: self._room], proposal.law
        if ids and proposal.ids[: len(since)] == since:
            if law is not None:
                part = slice(len(since), len(since) + len(ids))
                law = Law(law.ids[part], law.probs[part])
            base = len(self.committed)
            self.proposal = Proposal(proposal.draft, base, ids, law, proposal.method)
            return None
        self.proposal = None
        if any(drafted != own for drafted, own in zip(proposal.ids, since, strict=False)):
            return "mismatch"
        return "no_room" if self._room <= 0 else "too_late"

    def take_block(self) -> Block:
        """Use up the held proposal, salvaged before: what the pass verifies."""
        proposal, self.proposal = self.proposal, None
        if proposal is None:
            return NO_BLOCK
        return Block(proposal.draft, proposal.ids, proposal.law, proposal.method)

    def commit(
        self, block: Block, accepted: int, next_id: int, logprobs: Ids[TokenLogprob] = ()
    ) -> Delta:
        """Commit `block.ids[:accepted]` and the target's own id, up to the first that ends it.

        `logprobs` has one entry for each of them where the sequence asks for any.
        """
        self.num_passes += 1
        self.counts.record(len(block.ids), accepted)
        self.num_cached = len(self.committed) + accepted
        new_ids: list[int] = []
        text = ""
        for id in [*block.ids[:accepted], next_id]:
            self.committed.append(id)
            new_ids.append(id)
            text += self._apply_rules(id)
            if self.finish_reason is not None:
                break
        if not self.rules.stop:
            is_last_shown = self.finish_reason != "stop" or self.rules.include_stop
            text = self._text.push(new_ids if is_last_shown else new_ids[:-1])
        told = None if self.num_logprobs is None else list(logprobs[: len(new_ids)])
        if self.finish_reason is None:
            return Delta(self.index, new_ids, text, self.seed, logprobs=told)
        text += self._text.flush()
        if self._text.matched is not None:
            self._finish("stop", self._text.matched)
        return Delta(
            self.index,
            new_ids,
            text,
            self.seed,
            self.finish_reason,
            self.stop_reason,
            self.counts,
            self.num_passes,
            told,
        )

    def _apply_rules(self, id: int) -> str:
        """See whether the id just committed ends the answer; its text, if strings may end it."""
        rules, text = self.rules, ""
        may_stop = self.position >= rules.min_tokens
        if may_stop and id in rules.stop_ids:
            self._finish("stop", id)
        elif may_stop and id in rules.end_ids:
            self._finish("stop")
        if rules.stop and (self.finish_reason is None or rules.include_stop):
            text = self._text.push([id], may_stop=may_stop and self.finish_reason is None)
            if self._text.matched is not None:
                self._finish("stop", self._text.matched)
        if self.finish_reason is None and self.position >= rules.max_tokens:
            self._finish("length")
        return text

    def _finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        self.finish_reason = reason
        self.stop_reason = stop_reason

"""From deltas to OpenAI's answers: whole ones, and the chunks of streamed ones.

`Answer` collects what one request has got so far; `chunks` words a few new deltas, `whole` all of
them. Beside OpenAI's fields every choice tells its `seed`, vLLM's `stop_reason` and, if asked,
`token_ids` and `prompt_token_ids`; every answer tells `metrics.speculative_decoding`.
Logprobs have an entry for every emitted id, the one that ended the answer included.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from outrider.actors.messages import TokenLogprob
from outrider.actors.requests import Delta, GenerateRequest, SpeculationCounts
from outrider.deploy.logprobs import Texts, chat_form, completions_form

Kind = Literal["completions", "chat"]


@dataclass
class _Choice:
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_characters: int = 0  # of the texts of `ids` one by one; counted for logprobs only
    last: Delta | None = None  # set once it ended


@dataclass
class Answer:
    """What one request got so far; `num_spec_tokens` is the longest draft it may get.

    `texts` has the tokens of all logprobs in time: before their delta comes.
    """

    kind: Kind
    model: str
    request: GenerateRequest
    texts: Texts = field(default_factory=dict)
    num_spec_tokens: int = 0
    return_token_ids: bool = False
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    choices: dict[int, _Choice] = field(default_factory=dict)
    num_ended: int = 0  # choices

    @property
    def num_choices(self) -> int:
        """How many choices it will have in the end."""
        return len(self.request.prompts) * self.request.n

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return self.num_ended == self.num_choices

    def collect(self, delta: Delta) -> bool:
        """Take in one delta; say whether it is the first of its choice."""
        is_first = delta.index not in self.choices
        choice = self.choices.setdefault(delta.index, _Choice())
        choice.text.append(delta.text)
        choice.ids += delta.ids
        if self.request.logprobs is not None:
            choice.logprobs += delta.logprobs or []
            choice.num_characters += sum(len(self.texts[index].text) for index in delta.ids)
        if delta.finish_reason is not None:
            choice.last = delta
            self.num_ended += 1
        return is_first

    def whole(self) -> dict[str, Any]:
        """The answer in one piece, once it is finished."""
        choices = [self._whole_choice(index) for index in range(self.num_choices)]
        kind = "chat.completion" if self.kind == "chat" else "text_completion"
        body = {**self._head(kind), "choices": choices, "usage": self._usage()}
        return {**body, "metrics": self._metrics()}

    def chunks(self, deltas: list[Delta]) -> Iterator[dict[str, Any]]:
        """The chunks for new deltas, one each; the last of the answer brings the metrics."""
        kind = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        for delta in deltas:
            is_first = self.collect(delta)
            body = {**self._head(kind), "choices": [self._chunk_choice(delta, is_first)]}
            if self.include_usage:
                yield {**body, "usage": None}
            elif self.is_finished:
                yield {**body, "metrics": self._metrics()}
            else:
                yield body
        if self.include_usage and self.is_finished:
            body = {**self._head(kind), "choices": [], "usage": self._usage()}
            yield {**body, "metrics": self._metrics()}

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        return {
            "id": f"{prefix}-{self.request.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
        }

    def _whole_choice(self, index: int) -> dict[str, Any]:
        choice = self.choices[index]
        assert choice.last is not None, "an answer is told whole only once it is finished"
        text = "".join(choice.text)
        content: dict[str, Any] = {"text": text}
        if self.kind == "chat":
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        logprobs = self._logprobs(choice, choice.ids, choice.logprobs)
        body = {"index": index, **content, "logprobs": logprobs, **_ending(choice.last)}
        if self.return_token_ids:
            body["prompt_token_ids"] = self.request.prompts[index // self.request.n]
            body["token_ids"] = choice.ids
        return body

    def _chunk_choice(self, delta: Delta, is_first: bool) -> dict[str, Any]:
        content: dict[str, Any] = {"text": delta.text}
        if self.kind == "chat":
            role = {"role": "assistant"} if is_first else {}
            content = {"delta": {**role, "content": delta.text}}
        ending: dict[str, Any] = {"finish_reason": None, "stop_reason": None}
        if delta.finish_reason is not None:
            ending = _ending(delta)
        logprobs = self._logprobs(self.choices[delta.index], delta.ids, delta.logprobs or [])
        body = {"index": delta.index, **content, "logprobs": logprobs, **ending}
        if self.return_token_ids:
            if is_first:
                body["prompt_token_ids"] = self.request.prompts[delta.index // self.request.n]
            body["token_ids"] = delta.ids
        return body

    def _logprobs(
        self, choice: _Choice, ids: Sequence[int], told: Sequence[TokenLogprob]
    ) -> dict[str, Any] | None:
        """Those of the last `ids` that the choice has got; None if nobody asked."""
        if self.request.logprobs is None:
            return None
        if self.kind == "chat":
            return chat_form(ids, told, self.texts)
        return completions_form(ids, told, self.texts, choice.num_characters)

    def _usage(self) -> dict[str, int]:
        """Every prompt counts once, however many choices it has; emitted ids count all."""
        prompt = sum(map(len, self.request.prompts))
        completion = sum(len(choice.ids) for choice in self.choices.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _metrics(self) -> dict[str, Any]:
        counts = SpeculationCounts()
        for choice in self.choices.values():
            if choice.last is not None and choice.last.speculation is not None:
                counts.add(choice.last.speculation)
        return {"speculative_decoding": describe_speculation(counts, self.num_spec_tokens)}


def _ending(delta: Delta) -> dict[str, Any]:
    return {
        "finish_reason": delta.finish_reason,
        "stop_reason": delta.stop_reason,
        "seed": delta.seed,
    }


def describe_speculation(counts: SpeculationCounts, num_spec_tokens: int) -> Mapping[str, Any]:
    """The counts in vLLM's keys for `metrics.speculative_decoding`.

    - `num_spec_steps`: blocks verified that had at least one drafted token.
    - `num_draft_tokens`, `num_accepted_draft_tokens`: tokens of them; the target's own not counted.
    - `mean_acceptance_length`: 1 + accepted / steps, so with the target's own; null without steps.
    - `draft_acceptance_rate`: accepted / drafted; null without steps.
    - `num_spec_tokens`: the longest draft that the settings and the request allow.
    - `acceptance_histogram[j]`: blocks of which exactly j tokens were accepted;
      num_spec_tokens + 1 entries.
    - `acceptance_histogram_by_draft_length`: the same for blocks of each length d that occurred,
      d + 1 entries under the key d.
    """
    steps, drafted = counts.num_drafts, counts.num_draft_tokens
    accepted = counts.num_accepted_tokens
    longest = max(num_spec_tokens, len(counts.drafted_at))
    histogram = [0] * (longest + 1)
    for blocks in counts.by_length.values():
        for length, count in enumerate(blocks):
            histogram[length] += count
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else None,
        "draft_acceptance_rate": accepted / drafted if drafted else None,
        "acceptance_histogram": histogram,
        "acceptance_histogram_by_draft_length": {
            str(length): counts.by_length[length] for length in sorted(counts.by_length)
        },
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": longest,
    }

"""A coordinator's Serve handle without Ray: answers by a script, records what it was asked."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

from outrider.actors.messages import TokenLogprob
from outrider.actors.requests import Delta, GenerateRequest, ModelCard, SpeculationCounts
from outrider.actors.stats import Levels, RoundStats, Snapshot, Stats

MODEL = "tiny"
CARD = ModelCard(MODEL, max_model_len=32, vocabulary_size=0x500, created=1_700_000_000)

Script = Callable[[GenerateRequest], AsyncIterator[list[Delta]]]


def counts(*blocks: tuple[int, int]) -> SpeculationCounts:
    """Counts of blocks, each (drafted, accepted)."""
    total = SpeculationCounts()
    for drafted, accepted in blocks:
        total.record(drafted, accepted)
    return total


def logprobs_of(request: GenerateRequest, ids: list[int]) -> list[TokenLogprob] | None:
    """If asked for: -id for each id, beside the likeliest, which are always A, B, and so on."""
    if request.logprobs is None:
        return None
    top = tuple((ord("A") + rank, -0.25 * (rank + 1)) for rank in range(request.logprobs))
    return [TokenLogprob(-float(index), top) for index in ids]


def deltas_of(request: GenerateRequest, index: int) -> Iterator[Delta]:
    """Three deltas for choice `index`: its text is "<index>é…", its ids 10 * index + 1, 2, 3, 4."""
    for delta in _silent_deltas_of(request, index):
        yield replace(delta, logprobs=logprobs_of(request, delta.ids))


def _silent_deltas_of(request: GenerateRequest, index: int) -> Iterator[Delta]:
    seed = request.seed if request.seed is not None else 1000 + index // request.n
    first = 10 * index
    yield Delta(index, [first + 1], f"<{index}>", seed)
    yield Delta(index, [first + 2, first + 3], "é…", seed)
    ended = counts((4, 1), (2, 2))
    yield Delta(index, [first + 4], "", seed, "stop", None, ended, 3)


async def answer(request: GenerateRequest) -> AsyncIterator[list[Delta]]:
    """Every choice gets its three deltas, one round after another; choice 0 is first in each."""
    streams = [deltas_of(request, index) for index in range(len(request.prompts) * request.n)]
    for _ in range(3):
        yield [next(stream) for stream in streams]


class FakeStream:
    """What a streaming call returns."""

    def __init__(self, items: AsyncIterator[list[Delta]]) -> None:
        self._items = items
        self.is_cancelled = False

    def __aiter__(self) -> AsyncIterator[list[Delta]]:
        return self._items

    def cancel(self) -> None:
        """As Serve's: does not wait."""
        self.is_cancelled = True


class _Method:
    def __init__(self, call: Callable[..., Any]) -> None:
        self.remote = call


class FakeCoordinator:
    """Has the part of a DeploymentHandle that the ingress uses."""

    def __init__(
        self, script: Script = answer, card: ModelCard = CARD, illness: Exception | None = None
    ) -> None:
        self._script = script
        self._card = card
        self.illness = illness
        self.snapshot = Snapshot(
            Stats(rounds={"plain": RoundStats(num_rounds=7)}), Levels(waiting=2)
        )
        self.requests: list[GenerateRequest] = []
        self.streams: list[FakeStream] = []
        self.generate = _Method(self._generate)
        self.describe = _Method(self._describe)
        self.check_ready = _Method(self._check_ready)
        self.measure = _Method(self._measure)

    def options(self, *, stream: bool) -> "FakeCoordinator":
        """The same handle: it knows which of its methods stream."""
        assert stream
        return self

    def _generate(self, request: GenerateRequest) -> FakeStream:
        self.requests.append(request)
        self.streams.append(FakeStream(self._script(request)))
        return self.streams[-1]

    async def _describe(self) -> ModelCard:
        if self.illness is not None:
            raise self.illness
        return self._card

    async def _measure(self) -> Snapshot:
        if self.illness is not None:
            raise self.illness
        return self.snapshot

    async def _check_ready(self) -> None:
        if self.illness is not None:
            raise self.illness


class CharTokenizer:
    """One id per character, its code point; id 1 begins a text and is shown as <s>."""

    def __init__(self, chat_template: str | None = "{{ messages }}") -> None:
        self.chat_template = chat_template

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The text's ids."""
        return [1] * add_special_tokens + [ord(character) for character in text]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The ids' text; surrogates are no characters."""
        special = "" if skip_special_tokens else "<s>"
        letters = (special if index == 1 else chr(index) for index in token_ids)
        return "".join(letters).encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def convert_ids_to_tokens(self, ids: int) -> str:
        """The id's character."""
        return chr(ids)

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        """`role:content|` for every message, then `>`."""
        assert add_generation_prompt and not tokenize
        return "".join(f"{m['role'][0]}:{m['content']}|" for m in conversation) + ">"

"""Between text and token ids, for the ingress: one call of the tokenizer at a time, off the loop.

Knows what a prompt, a bad word and a token's text are; decides nothing about a request.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, Protocol, TypeVar

from jinja2 import TemplateError

from outrider.actors.byte_letters import read_byte_letters, read_byte_piece
from outrider.actors.requests import Delta
from outrider.cluster.errors import RequestError
from outrider.deploy.logprobs import TokenText
from outrider.deploy.schema import ChatBody, CompletionBody

_P = ParamSpec("_P")
_T = TypeVar("_T")


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is needed here."""

    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The text's token ids."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> Any:
        """The ids' text."""

    def convert_ids_to_tokens(self, ids: int) -> Any:
        """The id's entry in the vocabulary."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool
    ) -> Any:
        """The conversation as one text."""


class Tokens:
    """One model's tokenizer; `texts` has what tokens say, once `read` has met them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._turn = asyncio.Lock()  # Rust tokenizers are not safe to share among threads
        self.texts: dict[int, TokenText] = {}

    async def encode_prompts(self, body: CompletionBody | ChatBody) -> list[list[int]]:
        """The ids of the request's prompts; RequestError if the chat template refuses them."""
        if isinstance(body, CompletionBody) and isinstance(body.prompt[0], list):
            return [ids for ids in body.prompt if isinstance(ids, list)]
        return await self._run(self._encode_prompts, body)

    async def encode_bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """The distinct id sequences of the words, each as given and with a space before it."""
        return await self._run(self._encode_bad_words, words) if words else ()

    async def read(self, deltas: list[Delta]) -> None:
        """Learn the texts of all tokens that the deltas' logprobs tell of."""
        told = [delta for delta in deltas if delta.logprobs]
        ids = {index for delta in told for index in delta.ids}
        ids |= {index for delta in told for entry in delta.logprobs or () for index, _ in entry.top}
        if new := ids - self.texts.keys():
            self.texts.update(await self._run(self._read, new))

    async def _run(self, work: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        async with self._turn:
            return await asyncio.to_thread(work, *args, **kwargs)

    def _encode_prompts(self, body: CompletionBody | ChatBody) -> list[list[int]]:
        if isinstance(body, CompletionBody):
            texts = [text for text in body.prompt if isinstance(text, str)]
            return [self._tokenizer.encode(text, add_special_tokens=True) for text in texts]
        if not self._tokenizer.chat_template:
            raise RequestError("the model has no chat template: use /v1/completions", "messages")
        try:
            text = self._tokenizer.apply_chat_template(
                [message.to_template() for message in body.messages],
                add_generation_prompt=True,
                tokenize=False,
            )
        except TemplateError as error:
            raise RequestError(
                f"the model's chat template refuses the messages: {error}", "messages"
            ) from error
        return [self._tokenizer.encode(text, add_special_tokens=False)]

    def _encode_bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        sequences: dict[tuple[int, ...], None] = {}  # a set that keeps the order
        for number, word in enumerate(words):
            for text in (word, f" {word}"):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if not ids:
                    message = f"bad_words[{number}]: the model has no tokens for it"
                    raise RequestError(message, "bad_words")
                sequences[ids] = None
        return tuple(sequences)

    def _read(self, ids: Iterable[int]) -> dict[int, TokenText]:
        return {index: read_token(self._tokenizer, index) for index in ids}


def read_token(tokenizer: Tokenizer, index: int) -> TokenText:
    """What token `index` says by itself; its true bytes even if they are no whole character."""
    text: str = tokenizer.decode([index], skip_special_tokens=False)
    data = None
    if "\ufffd" in text:
        piece = tokenizer.convert_ids_to_tokens(index)
        data = read_byte_piece(piece) or read_byte_letters(piece)
    return TokenText(text, text.encode() if data is None else data)

"""Logprobs in OpenAI's words: the form of the completions API, and that of chat."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from outrider.actors.messages import TokenLogprob

FLOOR = -9999.0  # stands for minus infinity, which JSON cannot say, as in vLLM


class TokenText(NamedTuple):
    """What one token id says by itself."""

    text: str  # special tokens shown; U+FFFD for bytes that are no whole character
    data: bytes  # the token's own bytes


Texts = Mapping[int, TokenText]


def completions_form(
    ids: Sequence[int], told: Sequence[TokenLogprob], texts: Texts, end: int
) -> dict[str, Any]:
    """One entry for each of `ids`, whose texts end `end` characters into those of the choice.

    `top_logprobs` has the emitted token, too; of tokens with the same text it has the likeliest.
    """
    tokens = [texts[index].text for index in ids]
    begin = end - sum(map(len, tokens))
    likeliest = []
    for index, entry in zip(ids, told, strict=True):
        by_text: dict[str, float] = {}
        for other, logprob in (*entry.top, (index, entry.logprob)):
            text = texts[other].text
            by_text[text] = max(_finite(logprob), by_text.get(text, FLOOR))
        likeliest.append(by_text)
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(entry.logprob) for entry in told],
        "top_logprobs": likeliest,
        "text_offset": list(accumulate(map(len, tokens), initial=begin))[:-1],
    }


def chat_form(ids: Sequence[int], told: Sequence[TokenLogprob], texts: Texts) -> dict[str, Any]:
    """One entry for each of `ids`, each with its likeliest tokens, likeliest first."""
    content = [
        {
            **_chat_token(texts[index], entry.logprob),
            "top_logprobs": [_chat_token(texts[other], logprob) for other, logprob in entry.top],
        }
        for index, entry in zip(ids, told, strict=True)
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: TokenText, logprob: float) -> dict[str, Any]:
    return {"token": token.text, "logprob": _finite(logprob), "bytes": list(token.data)}


def _finite(logprob: float) -> float:
    return logprob if logprob > FLOOR else FLOOR  # of NaN, too

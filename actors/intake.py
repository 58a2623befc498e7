"""From requests to sequences: what the model can serve is checked, laws and stop rules are set.

Pure but for the seeds of unseeded requests, which come from the operating system unless a number
makes the run repeatable.
"""

import functools
import itertools
import random
import secrets
from collections.abc import Iterable

from outrider.actors.messages import LoadReport, Sampling, Shaping
from outrider.actors.philox import key64
from outrider.actors.requests import GenerateRequest
from outrider.actors.sequence import Sequence, StopRules
from outrider.actors.text import Detokenize, TextStream
from outrider.cluster.errors import RequestError

_SEED_BITS = 63  # a drawn seed fits a signed 64-bit integer, so that it can be sent back


class Intake:
    """Makes the sequences of requests for one loaded target."""

    def __init__(self, target: LoadReport, decode: Detokenize, seed: int | None = None) -> None:
        self._target = target
        self._decode = decode
        self._seeds = None if seed is None else random.Random(seed)
        self._ids = itertools.count()

    def sequences(self, request: GenerateRequest) -> list[Sequence]:
        """One sequence per prompt and choice, in that order; RequestError if one cannot be."""
        self._check(request)
        decode = functools.partial(self._decode, skip_special_tokens=request.skip_special_tokens)
        sampling = Sampling(
            request.temperature,
            request.top_k,
            request.top_p,
            min_p=request.min_p,
            shaping=self._shaping(request),
        )
        made = []
        for number, prompt in enumerate(request.prompts):
            seed = self._draw_seed() if request.seed is None else request.seed
            rules = self._rules(request, self._room(prompt))
            for choice in range(request.n):
                made.append(
                    Sequence(
                        next(self._ids),
                        number * request.n + choice,
                        prompt,
                        sampling._replace(seed=key64(seed), choice=choice),
                        rules,
                        TextStream(decode, prompt, rules.stop, include_stop=rules.include_stop),
                        seed=seed,
                        num_speculative_tokens=request.num_speculative_tokens,
                        num_logprobs=request.logprobs,
                    )
                )
        return made

    def _rules(self, request: GenerateRequest, room: int) -> StopRules:
        return StopRules(
            max_tokens=min(request.max_tokens or room, room),
            end_ids=self._end_ids(request),
            stop_ids=frozenset(request.stop_token_ids),
            stop=request.stop,
            min_tokens=request.min_tokens,
            include_stop=request.include_stop_str_in_output,
        )

    def _shaping(self, request: GenerateRequest) -> Shaping | None:
        """What the request does to the logits; None if that is nothing."""
        ending = self._end_ids(request).union(request.stop_token_ids)
        holds_back = request.min_tokens > 0 and bool(ending)
        shaping = Shaping(
            repetition_penalty=request.repetition_penalty,
            presence_penalty=request.presence_penalty,
            frequency_penalty=request.frequency_penalty,
            logit_bias=tuple((id, added) for id, added in request.logit_bias if added != 0),
            bad_words=request.bad_words,
            allowed_ids=request.allowed_token_ids,
            min_tokens=request.min_tokens if holds_back else 0,
            end_ids=tuple(sorted(ending)) if holds_back else (),
        )
        return None if shaping == Shaping() else shaping

    def _end_ids(self, request: GenerateRequest) -> frozenset[int]:
        return frozenset(() if request.ignore_eos else self._target.end_ids)

    def _check(self, request: GenerateRequest) -> None:
        self._check_ids((id for id, _ in request.logit_bias), "logit_bias")
        self._check_ids((id for word in request.bad_words for id in word), "bad_words")
        self._check_ids(request.allowed_token_ids, "allowed_token_ids")
        allowed = request.allowed_token_ids
        if allowed and self._target.vocabulary.tokens.keys().isdisjoint(allowed):
            raise RequestError("none of the allowed ids stands for a token", "allowed_token_ids")
        if request.max_tokens is not None and request.min_tokens > request.max_tokens:
            raise RequestError(
                f"min_tokens {request.min_tokens} exceeds max_tokens {request.max_tokens}",
                "min_tokens",
            )

    def _check_ids(self, ids: Iterable[int], field: str) -> None:
        num_ids = self._target.num_ids
        for id in ids:
            if not 0 <= id < num_ids:
                raise RequestError(f"{id} is no token id: they are below {num_ids}", field)

    def _room(self, prompt: list[int]) -> int:
        """Tokens that may follow the prompt: at least one."""
        longest, num_ids = self._target.max_model_len, self._target.num_ids
        if not prompt or not all(0 <= id < num_ids for id in prompt):
            raise RequestError(f"a prompt is one or more token ids below {num_ids}", "prompt")
        if len(prompt) >= longest:
            raise RequestError(
                f"this model's maximum context length is {longest} tokens, but the prompt has "
                f"{len(prompt)}: leave room for at least one more",
                "prompt",
            )
        return longest - len(prompt)

    def _draw_seed(self) -> int:
        if self._seeds is None:
            return secrets.randbits(_SEED_BITS)
        drawn: int = self._seeds.getrandbits(_SEED_BITS)
        return drawn

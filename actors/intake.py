"""From requests to sequences: what the model can serve is checked, seeds and stop rules are set.

Pure but for the seeds of unseeded requests, which come from the operating system unless a number
makes the run repeatable.
"""

import itertools
import random
import secrets

from outrider.actors.messages import LoadReport, Sampling
from outrider.actors.philox import key64
from outrider.actors.requests import GenerateRequest
from outrider.actors.sequence import Sequence, StopRules
from outrider.actors.text import Decode, TextStream
from outrider.cluster.errors import RequestError

_SEED_BITS = 63  # a drawn seed fits a signed 64-bit integer, so that it can be sent back


class Intake:
    """Makes the sequences of requests for one loaded target."""

    def __init__(self, target: LoadReport, decode: Decode, seed: int | None = None) -> None:
        self._target = target
        self._decode = decode
        self._seeds = None if seed is None else random.Random(seed)
        self._ids = itertools.count()

    def sequences(self, request: GenerateRequest) -> list[Sequence]:
        """One sequence per prompt and choice, in that order; RequestError if a prompt cannot be."""
        made = []
        for number, prompt in enumerate(request.prompts):
            room = self._room(prompt)
            seed = self._draw_seed() if request.seed is None else request.seed
            rules = StopRules(
                max_tokens=min(request.max_tokens or room, room),
                end_ids=frozenset(() if request.ignore_eos else self._target.end_ids),
                stop_ids=frozenset(request.stop_token_ids),
                stop=request.stop,
            )
            for choice in range(request.n):
                law = (request.temperature, request.top_k, request.top_p)
                made.append(
                    Sequence(
                        next(self._ids),
                        number * request.n + choice,
                        prompt,
                        Sampling(*law, key64(seed), choice),
                        rules,
                        TextStream(self._decode, prompt, request.stop),
                        seed=seed,
                        num_speculative_tokens=request.num_speculative_tokens,
                    )
                )
        return made

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

"""Continues the committed ids of many sequences at once, with a model of any vocabulary.

A `Drafter` keeps one copy of each sequence in its own row cache, cut back to the committed ids
before every proposal. Copies may be lost at any time: what is missing is said, and sent again.
What an id of the target is to the draft is for the method to say. Knows neither Ray nor time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.actors.messages import Contexts, Law, Proposals, Sampling
from outrider.actors.methods import Draft, DraftMethod, Same, String, Token
from outrider.actors.model import Model
from outrider.actors.pairing import Pair, View
from outrider.actors.sampling import draw_rows, draw_with_law
from outrider.actors.shaping import shape_rows

_ALWAYS_READY = 65  # ids a decoding sequence may lag behind: the longest block and one
_MOST_OWN_PER_ID = 3  # tokens drafted for one of the target's: what takes longer is given up


@dataclass
class _Copy:
    """A draft's copy of one sequence."""

    row: int
    view: View | None  # None = the draft has the target's vocabulary
    committed: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)  # own ids whose keys and values the row holds

    @property
    def own(self) -> list[int]:
        """The committed ids as the draft reads them."""
        return self.committed if self.view is None else self.view.ids


@dataclass
class _Continuation:
    """One sequence of a call: what is drafted so far."""

    sequence: int
    epoch: int
    copy: _Copy
    position: int
    sampling: Sampling
    draft: Draft
    room: int  # own ids that may be drafted
    laws: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @property
    def law(self) -> Law | None:
        if not self.laws:
            return None
        return Law(np.stack([ids for ids, _ in self.laws]), np.stack([p for _, p in self.laws]))

    @property
    def is_done(self) -> bool:
        return self.draft.is_done or len(self.draft.own) >= self.room


class Drafter:
    """Proposes ids of the target with a model of its vocabulary, or with the pair it is given.

    One call prefills no more than `max_num_batched_tokens` ids of long contexts, so that it never
    takes much longer than its neighbours wait; such a sequence gets its first proposal later.
    """

    def __init__(
        self,
        model: Model,
        num_rows: int,
        draft_top_k: int,
        max_num_batched_tokens: int = 512,
        pair: Pair | None = None,
    ) -> None:
        self._model = model
        self._pair = pair
        self._methods: dict[str, DraftMethod] = (
            {"same": Same()} if pair is None else {"string": String(pair), "token": Token(pair)}
        )
        self._draft_top_k = draft_top_k
        self._max_num_batched_tokens = max_num_batched_tokens
        self._free_rows = list(range(num_rows))
        self._copies: dict[int, _Copy] = {}  # least recently asked first

    def __len__(self) -> int:
        """Sequences of which a copy is kept."""
        return len(self._copies)

    def free(self, sequences: Iterable[int]) -> None:
        """Drop the copies of sequences; unknown ones are ignored."""
        for sequence in sequences:
            copy = self._copies.pop(sequence, None)
            if copy is not None:
                self._free_rows.append(copy.row)

    def reset(self) -> None:
        """Drop every copy."""
        self.free(list(self._copies))

    def propose(self, contexts: Contexts) -> Proposals:
        """Draft after each context; sequences whose beginning is unknown come back as missing."""
        asked, missing = self._receive(contexts)
        method = self._methods[contexts.method]
        with_law = contexts.with_law and contexts.method != "string"
        drafting = self._prefill([c for c in asked if not c.is_done])
        while drafting:
            self._draw(self._forward(drafting), drafting, method, with_law)
            drafting = [c for c in drafting if not c.is_done]
        return Proposals(
            sequence=[c.sequence for c in asked],
            epoch=[c.epoch for c in asked],
            base=[len(c.copy.committed) for c in asked],
            ids=[c.draft.proposed for c in asked],
            law=[c.law for c in asked],
            missing=missing,
            method=contexts.method,
        )

    def _receive(self, contexts: Contexts) -> tuple[list[_Continuation], list[int]]:
        asked: list[_Continuation] = []
        missing: list[int] = []
        for sequence, epoch, start, ids, position, num_tokens, sampling in zip(
            contexts.sequence,
            contexts.epoch,
            contexts.start,
            contexts.ids,
            contexts.position,
            contexts.num_tokens,
            contexts.sampling,
            strict=True,
        ):
            copy = self._copies.pop(sequence, None)
            if copy is None or start > len(copy.committed):
                if start > 0:
                    missing.append(sequence)
                    if copy is not None:
                        self._copies[sequence] = copy
                    continue
                if copy is None:
                    view = None if self._pair is None else View(self._pair)
                    copy = _Copy(self._take_row(contexts.sequence), view)
            self._copies[sequence] = copy
            copy.committed[start:] = ids
            if copy.view is not None:
                copy.view.follow(copy.committed)
            room = self._model.max_model_len - len(copy.own) if copy.own else 0
            room = min(room, _MOST_OWN_PER_ID * num_tokens)
            draft = Draft(num_tokens)
            asked.append(_Continuation(sequence, epoch, copy, position, sampling, draft, room))
        return asked, missing

    def _take_row(self, asked: list[int]) -> int:
        if not self._free_rows:
            # Whoever was not asked for longest lost its coordinator's interest, or a `free` was.
            in_use = set(asked)
            self.free([next(s for s in self._copies if s not in in_use)])
        return self._free_rows.pop()

    def _prefill(self, asked: list[_Continuation]) -> list[_Continuation]:
        """Run a part of the contexts that are too long for this call; returns the others."""
        budget = self._max_num_batched_tokens
        ready: list[_Continuation] = []
        parts: list[tuple[_Copy, int, int]] = []
        for c in asked:
            start = _common_prefix(c.copy.cached, c.copy.own)
            num_pending = len(c.copy.own) - start
            if num_pending <= max(budget, _ALWAYS_READY):
                ready.append(c)
                budget = max(budget - num_pending, 0)
            elif budget > 0:
                parts.append((c.copy, start, start + budget))
                budget = 0
        if parts:
            self._model.forward(
                [copy.row for copy, _, _ in parts],
                [start for _, start, _ in parts],
                [copy.own[start:end] for copy, start, end in parts],
                [0] * len(parts),
            )
        for copy, _, end in parts:
            copy.cached = copy.own[:end]
        return ready

    def _forward(self, drafting: list[_Continuation]) -> torch.Tensor:
        """Run what each row has not cached yet; logits [len(drafting), V] of the last ids."""
        texts = [c.copy.own + c.draft.own for c in drafting]
        starts = [
            min(_common_prefix(c.copy.cached, text), len(text) - 1)
            for c, text in zip(drafting, texts, strict=True)
        ]
        logits = self._model.forward(
            [c.copy.row for c in drafting],
            starts,
            [text[start:] for text, start in zip(texts, starts, strict=True)],
            [1] * len(drafting),
        )
        for c, text in zip(drafting, texts, strict=True):
            c.copy.cached = text
        return logits

    def _draw(
        self,
        logits: torch.Tensor,
        drafting: list[_Continuation],
        method: DraftMethod,
        with_law: bool,
    ) -> None:
        """Draw one id for each row, from the law that its request shapes as the target will."""
        samplings = [c.sampling for c in drafting]
        positions = [c.position + len(c.draft.ids) for c in drafting]
        texts = [c.copy.committed + c.draft.ids for c in drafting]
        logits = shape_rows(method.spread(logits), samplings, texts, positions)
        with_own_law = [with_law and sampling.temperature > 0 for sampling in samplings]
        for i in (i for i, alone in enumerate(with_own_law) if alone):
            c = drafting[i]
            id, *law = draw_with_law(logits[i], c.sampling, positions[i], self._draft_top_k)
            method.add(c.draft, id)
            c.laws.append((law[0], law[1]))
        shared = [i for i, alone in enumerate(with_own_law) if not alone]
        if shared:
            rows = logits if len(shared) == len(drafting) else logits[shared]
            drawn = draw_rows(rows, [samplings[i] for i in shared], [positions[i] for i in shared])
            for i, id in zip(shared, drawn, strict=True):
                method.add(drafting[i].draft, id)


def _common_prefix(a: list[int], b: list[int]) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])

"""A neural draft: continues the committed ids of many sequences at once.

A thin shell around `Drafter`, which keeps one copy of each sequence in its own row cache, cut back
to the committed ids before every proposal. Copies may be lost at any time: what is missing is said,
and sent again.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import ray
import torch

from outrider.actors.messages import Contexts, Law, LoadReport, Proposals, Sampling
from outrider.actors.model import Model
from outrider.actors.sampling import draw_rows, draw_with_law
from outrider.cluster.config import DraftModelSpec
from outrider.cluster.logs import log_to_terminal, reporter

_ALWAYS_READY = 65  # ids a decoding sequence may lag behind: the longest block and one


@dataclass
class _Copy:
    """A draft's copy of one sequence."""

    row: int
    committed: list[int] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)  # ids whose keys and values the row holds


@dataclass
class _Continuation:
    """One sequence of a call: what is drafted so far."""

    sequence: int
    epoch: int
    copy: _Copy
    position: int
    num_tokens: int
    sampling: Sampling
    ids: list[int] = field(default_factory=list)
    laws: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    @property
    def law(self) -> Law | None:
        if not self.laws:
            return None
        return Law(np.stack([ids for ids, _ in self.laws]), np.stack([p for _, p in self.laws]))


class Drafter:
    """Proposes ids with a model of the target's vocabulary. Knows neither Ray nor time.

    One call prefills no more than `max_num_batched_tokens` ids of long contexts, so that it never
    takes much longer than its neighbours wait; such a sequence gets its first proposal later.
    """

    def __init__(
        self, model: Model, num_rows: int, draft_top_k: int, max_num_batched_tokens: int = 512
    ) -> None:
        self._model = model
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
        drafting = self._prefill([c for c in asked if c.num_tokens > 0])
        while drafting:
            logits = self._forward(drafting)
            self._draw(logits, drafting, contexts.with_law)
            drafting = [c for c in drafting if len(c.ids) < c.num_tokens]
        return Proposals(
            sequence=[c.sequence for c in asked],
            epoch=[c.epoch for c in asked],
            base=[len(c.copy.committed) for c in asked],
            ids=[c.ids for c in asked],
            law=[c.law for c in asked],
            missing=missing,
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
                copy = copy or _Copy(self._take_row(contexts.sequence))
            self._copies[sequence] = copy
            copy.committed[start:] = ids
            room = self._model.max_model_len - len(copy.committed)
            asked.append(
                _Continuation(sequence, epoch, copy, position, min(num_tokens, room), sampling)
            )
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
            start = _common_prefix(c.copy.cached, c.copy.committed)
            num_pending = len(c.copy.committed) - start
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
                [copy.committed[start:end] for copy, start, end in parts],
                [0] * len(parts),
            )
        for copy, _, end in parts:
            copy.cached = copy.committed[:end]
        return ready

    def _forward(self, drafting: list[_Continuation]) -> torch.Tensor:
        """Run what each row has not cached yet; logits [len(drafting), V] of the last ids."""
        texts = [c.copy.committed + c.ids for c in drafting]
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

    def _draw(self, logits: torch.Tensor, drafting: list[_Continuation], with_law: bool) -> None:
        plain = [
            (i, c) for i, c in enumerate(drafting) if not with_law or c.sampling.temperature == 0
        ]
        if plain:
            rows = logits if len(plain) == len(drafting) else logits[[i for i, _ in plain]]
            drawn = draw_rows(
                rows, [c.sampling for _, c in plain], [c.position + len(c.ids) for _, c in plain]
            )
            for (_, c), id in zip(plain, drawn, strict=True):
                c.ids.append(id)
        if len(plain) < len(drafting):
            for c, row in zip(drafting, logits, strict=True):
                if c.sampling.temperature > 0:
                    id, *law = draw_with_law(
                        row, c.sampling, c.position + len(c.ids), self._draft_top_k
                    )
                    c.ids.append(id)
                    c.laws.append((law[0], law[1]))


def _common_prefix(a: list[int], b: list[int]) -> int:
    length = min(len(a), len(b))
    if a[:length] == b[:length]:
        return length
    return next(i for i in range(length) if a[i] != b[i])


class DraftWorker:
    """A draft actor; `compute` methods run one at a time, `control` ones beside them."""

    def __init__(self, spec: DraftModelSpec, index: int, num_rows: int, draft_top_k: int) -> None:
        log_to_terminal()
        self._spec = spec
        self._index = index
        self._num_rows = num_rows
        self._draft_top_k = draft_top_k
        self._drafter: Drafter | None = None

    @ray.method(concurrency_group="compute")
    async def load(self) -> LoadReport:
        """Resolve, load and check the model; ConfigError says what cannot work."""
        torch.set_num_threads(self._spec.threads)
        model = Model.load(
            self._spec,
            rows=self._num_rows,
            report=reporter(f"draft {self._spec.name} {self._index}"),
        )
        self._drafter = Drafter(model, self._num_rows, self._draft_top_k)
        return model.describe()

    @ray.method(concurrency_group="compute")
    async def propose(self, contexts: Contexts) -> Proposals:
        """Draft after each context."""
        begin = time.perf_counter()
        proposals = self._loaded.propose(contexts)
        return replace(proposals, seconds=time.perf_counter() - begin)

    @ray.method(concurrency_group="compute")
    async def free(self, sequences: list[int]) -> None:
        """Drop the copies of sequences that ended."""
        self._loaded.free(sequences)

    @ray.method(concurrency_group="compute")
    async def reset(self) -> None:
        """Drop every copy: a new life begins."""
        self._loaded.reset()

    @ray.method(concurrency_group="control")
    async def num_copies(self) -> int:
        """Sequences of which a copy is kept, for tests and operators."""
        return len(self._loaded)

    @property
    def _loaded(self) -> Drafter:
        assert self._drafter is not None, "load comes first"
        return self._drafter

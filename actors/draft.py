"""A neural draft as an actor: a thin shell around `Drafter`."""

import time
from dataclasses import replace

import ray
import torch

from outrider.actors.drafter import Drafter
from outrider.actors.messages import Contexts, LoadReport, Proposals
from outrider.actors.model import Model
from outrider.actors.pairing import PairReport, pair_up
from outrider.cluster.config import DraftModelSpec
from outrider.cluster.logs import log_to_terminal, reporter


class DraftWorker:
    """A draft actor; `compute` methods run one at a time, `control` ones beside them."""

    def __init__(self, spec: DraftModelSpec, index: int, num_rows: int, draft_top_k: int) -> None:
        log_to_terminal()
        self._spec = spec
        self._index = index
        self._num_rows = num_rows
        self._draft_top_k = draft_top_k
        self._model: Model | None = None
        self._drafter: Drafter | None = None

    @ray.method(concurrency_group="compute")
    async def load(self, target: LoadReport | None = None) -> LoadReport:
        """Resolve, load and check the model; ConfigError says what cannot work.

        With a `target`, another's in vocabulary, it is paired with that, too.
        """
        torch.set_num_threads(self._spec.threads)
        model = Model.load(
            self._spec,
            rows=self._num_rows,
            report=reporter(f"draft {self._spec.name} {self._index}"),
        )
        self._model = model
        self._drafter = Drafter(model, self._num_rows, self._draft_top_k)
        if target is not None:
            self._pair(target)
        return model.describe()

    @ray.method(concurrency_group="compute")
    async def pair(self, target: LoadReport) -> PairReport:
        """From now on draft for a target of another vocabulary; ConfigError if that cannot be."""
        return self._pair(target)

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

    def _pair(self, target: LoadReport) -> PairReport:
        assert self._model is not None, "load comes first"
        pair, report = pair_up(target, self._model.describe(), self._spec.vocabulary)
        self._drafter = Drafter(self._model, self._num_rows, self._draft_top_k, pair=pair)
        return report

    @property
    def _loaded(self) -> Drafter:
        assert self._drafter is not None, "load comes first"
        return self._drafter

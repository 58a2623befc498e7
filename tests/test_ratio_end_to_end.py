"""The ratio rule through scheduler, ledger, drafter and model: its acceptance is the theory's."""

import math

import numpy as np
import pytest

from outrider.actors.draft import Drafter
from outrider.actors.messages import Law, Outcomes, Rows, Sampling
from outrider.actors.model import Model
from outrider.actors.sampling import processed
from outrider.cluster.config import DraftModelSpec, TargetSpec

from .conftest import Folders
from .engine import Engine, EngineDraft, Job

FALSE_ALARM_Z = 4.9  # two-sided, 1e-6


@pytest.fixture(scope="module")
def target(folders: Folders) -> Model:
    return Model.load(TargetSpec(model=folders.target, dtype="float64"), rows=8)


def drafter(folder: str, k: int) -> Drafter:
    spec = DraftModelSpec(method="draft_model", model=folder, dtype="float64")
    return Drafter(Model.load(spec, rows=8), 8, k)


def jobs(sampling: Sampling) -> list[Job]:
    return [
        Job([3 + i % 100, 7, 3 + (5 * i) % 90], 40, sampling._replace(seed=i)) for i in range(64)
    ]


def test_a_draft_that_is_the_target_is_always_accepted_when_its_law_fits_the_wire(
    target: Model, folders: Folders
) -> None:
    engine = Engine(target, [EngineDraft("self", 4, drafter(folders.target, 20))], with_law=True)
    engine.run(jobs(Sampling(1.0, top_k=20)))
    counts = engine.stats.drafts["self"].counts
    assert counts.num_accepted_tokens == counts.num_draft_tokens > 1500


class _Watched(Engine):
    """Notes, at every verified position, the theory's acceptance and what happened."""

    def decide(self, rows: Rows) -> Outcomes:
        outcomes = super().decide(rows)
        at = 0
        logits = self.target.forward(
            rows.row, rows.start, rows.ids, [n + 1 for n in rows.num_drafted]
        )
        for i, drafted in enumerate(rows.num_drafted):
            law = rows.law[i]
            for j in range(min(drafted, outcomes.accepted[i] + 1)):
                assert law is not None
                beta = _overlap(processed(logits[at + j], rows.sampling[i]), law, j)
                self.expected += beta
                self.variance += beta * (1 - beta)
                self.accepted += j < outcomes.accepted[i]
            at += drafted + 1
        return outcomes

    expected = 0.0
    variance = 0.0
    accepted = 0


def _overlap(p: tuple[np.ndarray, np.ndarray], law: Law, j: int) -> float:
    """Sum of min(p, q)."""
    size = max(p[0].max(), law.ids[j].max()) + 1
    dense_p, dense_q = np.zeros(size), np.zeros(size)
    dense_p[p[0]] = p[1]
    np.add.at(dense_q, law.ids[j], law.probs[j])
    return float(np.minimum(dense_p, dense_q).sum())


@pytest.mark.parametrize(("k", "sampling"), [(8, Sampling(1.0)), (151, Sampling(0.7, top_p=0.9))])
def test_acceptance_is_the_overlap_of_both_laws(
    k: int, sampling: Sampling, target: Model, folders: Folders
) -> None:
    """Accepted minus expected is a martingale: its z-score is normal; false alarm 1e-6, seeded."""
    engine = _Watched(target, [EngineDraft("noisy", 4, drafter(folders.noisy, k))], with_law=True)
    engine.run(jobs(sampling))
    assert engine.variance > 100
    z = (engine.accepted - engine.expected) / math.sqrt(engine.variance)
    assert abs(z) < FALSE_ALARM_Z

"""Draft and ledger together: proposals are what a draft without memory would say, come what may."""

import random
from typing import cast

import numpy as np
import pytest
import torch

from outrider.actors.draft import Drafter
from outrider.actors.ledger import Ledger
from outrider.actors.messages import Contexts, Law, Proposals, Sampling
from outrider.actors.model import Model
from outrider.actors.sampling import draw, processed
from outrider.actors.sequence import Sequence, StopRules
from outrider.actors.stats import DraftStats
from outrider.actors.text import TextStream

VOCABULARY = 6
SAMPLINGS = [
    Sampling(temperature=0),
    Sampling(temperature=1, seed=5),
    Sampling(temperature=0.7, top_k=3, seed=6, choice=1),
    Sampling(temperature=1, top_p=0.8, seed=7),
]


def logits_after(ids: list[int]) -> torch.Tensor:
    """Logits [V], float64, a function of all ids before."""
    seed = random.Random(str(ids)).randrange(2**32)
    return torch.from_numpy(np.random.default_rng(seed).normal(size=VOCABULARY) * 2)


class FakeModel:
    """A model that knows of each row only what was run on it, and refuses gaps."""

    def __init__(self, num_rows: int, max_model_len: int = 1000) -> None:
        self.max_model_len = max_model_len
        self.rows: list[list[int]] = [[] for _ in range(num_rows)]
        self.num_ids = 0

    def forward(
        self, row: list[int], start: list[int], ids: list[list[int]], num_logits: list[int]
    ) -> torch.Tensor:
        assert len(set(row)) == len(row) == len(start) == len(ids)
        assert set(num_logits) <= {0, 1}
        for index, first, block in zip(row, start, ids, strict=True):
            held = self.rows[index]
            assert 0 <= first <= len(held), "a gap in the row"
            assert block, "nothing to run"
            assert first + len(block) <= self.max_model_len
            held[first:] = block
            self.num_ids += len(block)
        kept = [logits_after(self.rows[r]) for r, n in zip(row, num_logits, strict=True) if n]
        return torch.stack(kept) if kept else torch.empty(0, VOCABULARY)


def make_drafter(
    num_rows: int = 4, max_model_len: int = 1000, max_num_batched_tokens: int = 512
) -> tuple[Drafter, FakeModel]:
    model = FakeModel(num_rows, max_model_len)
    return Drafter(cast(Model, model), num_rows, 4, max_num_batched_tokens), model


def draft_plainly(committed: list[int], position: int, num: int, sampling: Sampling) -> list[int]:
    """What a draft without any memory says."""
    ids: list[int] = []
    for i in range(num):
        ids.append(draw(logits_after(committed + ids), sampling, position + i))
    return ids


def ask(
    *contexts: tuple[int, int, list[int]],
    position: int = 0,
    num_tokens: int = 3,
    sampling: Sampling = SAMPLINGS[1],
    with_law: bool = False,
) -> Contexts:
    count = len(contexts)
    return Contexts(
        sequence=[sequence for sequence, _, _ in contexts],
        epoch=[0] * count,
        start=[start for _, start, _ in contexts],
        ids=[ids for _, _, ids in contexts],
        position=[position] * count,
        num_tokens=[num_tokens] * count,
        sampling=[sampling] * count,
        with_law=with_law,
    )


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_proposal_is_the_models_own_continuation(sampling: Sampling) -> None:
    drafter, _ = make_drafter()
    proposals = drafter.propose(ask((7, 0, [1, 2]), position=4, sampling=sampling))
    assert proposals.sequence == [7]
    assert proposals.base == [2]
    assert proposals.ids == [draft_plainly([1, 2], 4, 3, sampling)]
    assert proposals.law == [None]
    assert proposals.missing == []


def test_only_what_the_row_lacks_is_run_after_a_rollback() -> None:
    drafter, model = make_drafter()
    first = drafter.propose(ask((7, 0, [1, 2, 3]))).ids[0]
    assert model.num_ids == 3 + 2
    # Two drafted ids were accepted; the target's own id follows.
    own = (first[2] + 1) % VOCABULARY
    second = drafter.propose(ask((7, 3, [*first[:2], own]), position=3)).ids[0]
    assert second == draft_plainly([1, 2, 3, *first[:2], own], 3, 3, SAMPLINGS[1])
    assert model.num_ids == 5 + 1 + 2


def test_the_same_context_again_gives_the_same_proposal() -> None:
    drafter, _ = make_drafter()
    contexts = ask((7, 0, [1, 2, 3]), (8, 0, [3]))
    first = drafter.propose(contexts)
    assert drafter.propose(contexts) == first


def test_a_context_whose_beginning_is_unknown_is_missing_and_the_others_are_served() -> None:
    drafter, _ = make_drafter()
    drafter.propose(ask((1, 0, [1, 2])))
    proposals = drafter.propose(ask((1, 3, [4]), (2, 1, [4]), (3, 0, [4])))
    assert (proposals.missing, proposals.sequence) == ([1, 2], [3])
    assert len(drafter) == 2
    assert drafter.propose(ask((1, 2, [4]))).missing == []


def test_zero_tokens_asked_for_are_none_proposed_but_the_ids_are_learnt() -> None:
    drafter, model = make_drafter()
    proposals = drafter.propose(ask((7, 0, [1, 2]), num_tokens=0))
    assert (proposals.ids, proposals.base, model.num_ids) == ([[]], [2], 0)
    assert drafter.propose(ask((7, 2, [3]))).missing == []


@pytest.mark.parametrize(("length", "num_ids"), [(5, 3), (6, 2), (8, 0), (9, 0)])
def test_a_draft_stops_at_its_own_context_end(length: int, num_ids: int) -> None:
    drafter, _ = make_drafter(max_model_len=8)
    (ids,) = drafter.propose(ask((7, 0, [1] * length))).ids
    assert ids == draft_plainly([1] * length, 0, num_ids, SAMPLINGS[1])


def test_a_long_context_is_prefilled_over_several_calls_while_short_ones_are_served() -> None:
    drafter, model = make_drafter(max_num_batched_tokens=100)
    long = [i % VOCABULARY for i in range(250)]
    for call in range(4):
        before = model.num_ids
        committed = [1, 2, *range(call)]
        start = 0 if call == 0 else len(committed) - 1
        known = 0 if call == 0 else len(long) - 1
        proposals = drafter.propose(ask((7, known, long[known:]), (8, start, committed[start:])))
        assert proposals.missing == []
        assert proposals.base == [250, len(committed)]
        assert proposals.ids[1] == draft_plainly(committed, 0, 3, SAMPLINGS[1])
        assert model.num_ids - before <= 100 + 65
        ready = draft_plainly(long, 0, 3, SAMPLINGS[1])
        assert proposals.ids[0] == (ready if call >= 2 else [])


def test_without_a_free_row_the_copy_not_asked_for_longest_goes() -> None:
    drafter, _ = make_drafter(num_rows=3)
    for sequence in (1, 2, 3, 1):
        drafter.propose(ask((sequence, 0, [sequence])))
    assert drafter.propose(ask((4, 0, [4]))).missing == []
    assert len(drafter) == 3
    assert drafter.propose(ask((1, 1, [1]), (2, 1, [1]), (3, 1, [1]))).missing == [2]


def test_a_newcomer_never_takes_the_row_of_a_sequence_in_the_same_call() -> None:
    """The newcomer came first in the call and took the row of one named after it."""
    drafter, _ = make_drafter(num_rows=2)
    drafter.propose(ask((1, 0, [1])))
    drafter.propose(ask((2, 0, [2])))  # ended since; its `free` was lost
    proposals = drafter.propose(ask((3, 0, [3]), (1, 1, [4])))
    assert (proposals.sequence, proposals.missing) == ([3, 1], [])
    assert proposals.ids[1] == draft_plainly([1, 4], 0, 3, SAMPLINGS[1])


def test_freed_and_reset_copies_give_their_rows_back() -> None:
    drafter, _ = make_drafter(num_rows=2)
    drafter.propose(ask((1, 0, [1]), (2, 0, [2])))
    drafter.free([1, 99])
    assert len(drafter) == 1
    assert drafter.propose(ask((3, 0, [3]), (2, 1, [1]))).missing == []
    drafter.reset()
    assert len(drafter) == 0
    assert drafter.propose(ask((2, 1, [1]))).missing == [2]
    assert drafter.propose(ask((4, 0, [3]), (5, 0, [1]))).missing == []


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_law_is_that_of_the_token_drawn(sampling: Sampling) -> None:
    drafter, _ = make_drafter()
    proposals = drafter.propose(ask((7, 0, [1, 2]), sampling=sampling, with_law=True))
    (ids,), (law,) = proposals.ids, proposals.law
    assert len(ids) == 3
    if sampling.temperature == 0:
        assert law is None
        return
    assert law is not None
    assert law.ids.shape == law.probs.shape == (3, 4)  # draft_top_k
    assert np.allclose(law.probs.sum(-1), 1, atol=1e-12)
    for i, id in enumerate(ids):
        (place,) = np.flatnonzero(law.ids[i] == id)
        assert law.probs[i, place] > 0
        support, probs = processed(logits_after([1, 2, *ids[:i]]), sampling)
        kept = [j for j in np.argsort(-probs)[:4]]
        want = {int(support[j]): probs[j] / probs[kept].sum() for j in kept}
        got = {int(k): p for k, p in zip(law.ids[i], law.probs[i], strict=True) if p > 0}
        assert got == pytest.approx(want)


def test_greedy_and_sampled_sequences_of_one_call_do_not_mix_under_the_ratio_rule() -> None:
    greedy, sampled = SAMPLINGS[0], SAMPLINGS[1]
    both = Contexts(
        [1, 2, 3], [0] * 3, [0] * 3, [[1], [2], [3]], [0] * 3, [2, 3, 1],
        [greedy, sampled, greedy], True,
    )  # fmt: skip
    together, _ = make_drafter()
    proposals = together.propose(both)
    for i, (sampling, count) in enumerate(zip(both.sampling, both.num_tokens, strict=True)):
        alone, _ = make_drafter()
        single = alone.propose(
            ask((9, 0, both.ids[i]), num_tokens=count, sampling=sampling, with_law=True)
        )
        assert proposals.ids[i] == single.ids[0]
        assert same_law(proposals.law[i], single.law[0])


def same_law(one: Law | None, other: Law | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(map(np.array_equal, one, other))


class Wire:
    """Coordinator and draft over a wire that loses, repeats and reorders messages."""

    def __init__(self, seed: int, num_rows: int = 4) -> None:
        self.random = random.Random(seed)
        self.num_rows = num_rows
        self.drafter, _ = make_drafter(num_rows)
        self.stats = DraftStats()
        self.ledger = Ledger("d", 3, VOCABULARY, self.stats, with_law=False)
        self.alive: dict[int, Sequence] = {}
        self.contexts: list[Contexts] = []  # on their way to the draft
        self.replies: list[Proposals] = []  # on their way back
        self.truth: dict[int, Sequence] = {}  # every sequence that ever was
        self.num_used = 0

    def begin(self) -> None:
        id = len(self.truth)
        prompt = [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(1, 5))]
        sampling = self.random.choice(SAMPLINGS)._replace(seed=id)
        text = TextStream(lambda ids: "x" * len(ids), prompt)
        self.alive[id] = self.truth[id] = Sequence(id, 0, prompt, sampling, StopRules(10**6), text)

    def end(self) -> None:
        id = self.random.choice(list(self.alive))
        del self.alive[id]
        held = self.ledger.forget([id])
        if self.random.random() < 0.7:  # else the message is lost
            self.drafter.free(held)

    def send(self) -> None:
        count = self.random.randint(1, len(self.alive))
        chosen = self.random.sample(list(self.alive.values()), count)
        self.contexts.append(self.ledger.contexts(chosen))

    def draft(self) -> None:
        contexts = self.random.choice(self.contexts)
        if self.random.random() < 0.8:  # else it will come again
            self.contexts.remove(contexts)
        proposals = self.drafter.propose(contexts)
        assert sorted(proposals.sequence + proposals.missing) == sorted(contexts.sequence)
        for sequence, base, ids in zip(
            proposals.sequence, proposals.base, proposals.ids, strict=True
        ):
            self.check(self.truth[sequence], base, ids)
        self.replies.append(proposals)

    def receive(self) -> None:
        proposals = self.random.choice(self.replies)
        if self.random.random() < 0.8:
            self.replies.remove(proposals)
        self.ledger.receive(proposals, self.alive)

    def lose(self) -> None:
        queue = self.random.choice([self.contexts, self.replies])
        if queue:
            queue.pop(self.random.randrange(len(queue)))

    def commit(self) -> None:
        """A pass: accepts what it likes of the proposal, then adds its own id."""
        sequence = self.random.choice(list(self.alive.values()))
        sequence.salvage()
        block = sequence.take_block()
        if block.ids:
            self.check(sequence, len(sequence.committed), block.ids)
            self.num_used += 1
        accepted = self.random.randint(0, len(block.ids))
        text = sequence.committed + block.ids[:accepted]
        own = draft_plainly(text, sequence.position + accepted, 1, sequence.sampling)[0]
        if self.random.random() < 0.3:  # the target is of another mind
            own = self.random.randrange(VOCABULARY)
        sequence.commit(block, accepted, own)

    def kill(self) -> None:
        """The actor dies and comes back empty; what was on its way to it is gone."""
        self.contexts.clear()
        self.drafter.reset()
        self.ledger.begin_epoch()

    def check(self, sequence: Sequence, base: int, ids: list[int]) -> None:
        position = base - sequence.num_prompt_ids
        committed = sequence.committed[:base]
        assert len(committed) == base
        assert ids == draft_plainly(committed, position, len(ids), sequence.sampling)

    def step(self) -> None:
        events = [self.begin] if len(self.alive) < self.num_rows else []
        if self.alive:
            events += [self.send] * 2 + [self.commit]
            events += [self.end] * (self.random.random() < 0.1)
        events += [self.draft] * 3 if self.contexts else []
        events += [self.receive] * 3 if self.replies else []
        events += [self.lose]
        events += [self.kill] * (self.random.random() < 0.05)
        self.random.choice(events)()
        assert len(self.drafter) <= self.num_rows
        assert len(self.ledger) <= len(self.alive)


@pytest.mark.parametrize("seed", range(8))
def test_proposals_stay_true_through_losses_repeats_deaths_and_ends(seed: int) -> None:
    wire = Wire(seed)
    for _ in range(800):
        wire.step()
    assert wire.num_used > 20  # else nothing was tested


@pytest.mark.parametrize("seed", range(4))
def test_after_the_last_sequence_nothing_is_left_on_a_wire_that_loses_no_free(seed: int) -> None:
    wire = Wire(seed)
    for _ in range(200):
        wire.step()
    wire.kill()
    for _ in range(2):  # a live round: everything is sent again, and known
        contexts = wire.ledger.contexts(wire.alive.values())
        wire.ledger.receive(wire.drafter.propose(contexts), wire.alive)
    assert len(wire.drafter) == len(wire.ledger) == len(wire.alive) > 0
    wire.drafter.free(wire.ledger.forget(wire.alive))
    assert len(wire.drafter) == len(wire.ledger) == 0


@pytest.mark.parametrize("seed", range(4))
def test_two_rounds_after_any_trouble_every_sequence_has_its_proposal(seed: int) -> None:
    wire = Wire(seed)
    for _ in range(200):
        wire.step()
    if not wire.alive:
        wire.begin()
    for sequence in wire.alive.values():
        sequence.proposal = None
    for _ in range(2):  # the first may say `missing`
        contexts = wire.ledger.contexts(s for s in wire.alive.values() if s.proposal is None)
        wire.ledger.receive(wire.drafter.propose(contexts), wire.alive)
    for sequence in wire.alive.values():
        assert sequence.proposal is not None
        assert sequence.proposal.base == len(sequence.committed)
        assert len(sequence.proposal.ids) == 3

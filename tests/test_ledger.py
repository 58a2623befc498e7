"""The ledger: only what an actor lacks is sent, and only what can be used is taken."""

import numpy as np
import pytest

from outrider.actors.ledger import Ledger
from outrider.actors.messages import Contexts, Law, Proposals, Sampling
from outrider.actors.sequence import NO_BLOCK, Proposal, Sequence, StopRules
from outrider.actors.stats import DraftStats
from outrider.actors.text import TextStream

VOCABULARY = 10


def make(id: int, prompt: list[int] | None = None, max_tokens: int = 20) -> Sequence:
    prompt = prompt or [1, 2, 3]
    text = TextStream(lambda ids: "x" * len(ids), prompt)
    return Sequence(id, 0, prompt, Sampling(seed=id), StopRules(max_tokens), text)


def grow(sequence: Sequence, *ids: int) -> None:
    for id in ids:
        sequence.commit(NO_BLOCK, 0, id)


def make_ledger(with_law: bool = False) -> tuple[Ledger, DraftStats]:
    stats = DraftStats()
    return Ledger("d", 4, VOCABULARY, stats, with_law=with_law), stats


def reply(contexts: Contexts, *ids: list[int], law: Law | None = None) -> Proposals:
    return Proposals(
        sequence=contexts.sequence,
        epoch=contexts.epoch,
        base=[s + len(i) for s, i in zip(contexts.start, contexts.ids, strict=True)],
        ids=list(ids),
        law=[law] * len(ids),
        seconds=0.5,
    )


def test_a_sequence_is_sent_whole_until_a_reply_then_only_what_is_new() -> None:
    ledger, _ = make_ledger()
    sequence = make(7)
    for _ in range(2):  # the first message, or its reply, was lost
        contexts = ledger.contexts([sequence])
        assert (contexts.start, contexts.ids) == ([0], [[1, 2, 3]])
    ledger.receive(reply(contexts, []), {7: sequence})
    grow(sequence, 4, 5)
    contexts = ledger.contexts([sequence])
    assert (contexts.sequence, contexts.start, contexts.ids) == ([7], [3], [[4, 5]])
    assert (contexts.position, contexts.num_tokens) == ([2], [4])
    assert contexts.sampling == [sequence.sampling]


def test_a_late_reply_acknowledges_no_more_than_it_was_sent() -> None:
    ledger, _ = make_ledger()
    sequence = make(7)
    contexts = ledger.contexts([sequence])
    grow(sequence, 4, 5)
    ledger.receive(reply(contexts, [4, 6]), {7: sequence})
    assert ledger.contexts([sequence]).ids == [[4, 5]]
    assert sequence.proposal == Proposal("d", 3, [4, 6])  # to be salvaged


def test_a_context_always_holds_at_least_the_last_id() -> None:
    ledger, _ = make_ledger()
    sequence = make(7)
    ledger.receive(reply(ledger.contexts([sequence]), []), {7: sequence})
    contexts = ledger.contexts([sequence])
    assert (contexts.start, contexts.ids) == ([2], [[3]])


@pytest.mark.parametrize(("max_tokens", "length"), [(20, 4), (3, 2), (1, 0)])
def test_no_more_is_asked_for_than_may_follow(max_tokens: int, length: int) -> None:
    ledger, _ = make_ledger()
    assert ledger.contexts([make(7, max_tokens=max_tokens)]).num_tokens == [length]


@pytest.mark.parametrize("with_law", [False, True])
def test_a_proposal_reaches_its_sequence_with_its_law(with_law: bool) -> None:
    ledger, stats = make_ledger(with_law)
    sequence = make(7)
    contexts = ledger.contexts([sequence])
    assert contexts.with_law == with_law
    law = Law(np.array([[1]]), np.array([[1.0]])) if with_law else None
    ledger.receive(reply(contexts, [4], law=law), {7: sequence})
    assert sequence.proposal == Proposal("d", 3, [4], law)
    assert stats.seconds == 0.5
    assert not stats.dropped


def test_a_missing_sequence_is_sent_whole_again() -> None:
    ledger, _ = make_ledger()
    sequence = make(7)
    ledger.receive(reply(ledger.contexts([sequence]), []), {7: sequence})
    ledger.receive(Proposals(missing=[7, 99]), {7: sequence})
    assert ledger.contexts([sequence]).start == [0]
    assert len(ledger) == 1


def test_a_new_epoch_sends_everything_again_and_drops_replies_of_the_old_one() -> None:
    ledger, stats = make_ledger()
    sequence = make(7)
    old = ledger.contexts([sequence])
    ledger.receive(reply(old, []), {7: sequence})
    ledger.begin_epoch()
    assert len(ledger) == 0
    ledger.receive(reply(old, [4]), {7: sequence})
    assert sequence.proposal is None
    assert stats.dropped == {"epoch": 1}
    contexts = ledger.contexts([sequence])
    assert (contexts.epoch, contexts.start) == ([1], [0])
    ledger.receive(reply(old, [4]), {7: sequence})  # nor may it count as an acknowledgement
    assert ledger.contexts([sequence]).start == [0]


def test_a_proposal_for_an_ended_sequence_is_dropped_and_leaves_nothing() -> None:
    ledger, stats = make_ledger()
    sequence = make(7)
    contexts = ledger.contexts([sequence])
    assert ledger.forget([7, 8]) == [7]
    ledger.receive(reply(contexts, [4]), {7: sequence})
    ledger.receive(reply(contexts, [4]), {})
    ledger.receive(Proposals(missing=[7]), {})
    assert stats.dropped == {"ended": 2}
    assert (sequence.proposal, len(ledger), ledger.forget([7])) == (None, 0, [])


@pytest.mark.parametrize("ids", [[VOCABULARY], [4, -1], [10**9]])
def test_ids_outside_the_vocabulary_are_dropped_whole(ids: list[int]) -> None:
    ledger, stats = make_ledger()
    sequence, other = make(7), make(8)
    contexts = ledger.contexts([sequence, other])
    ledger.receive(reply(contexts, ids, [VOCABULARY - 1]), {7: sequence, 8: other})
    assert sequence.proposal is None
    assert other.proposal == Proposal("d", 3, [VOCABULARY - 1])
    assert stats.dropped == {"invalid": 1}


def test_a_sequence_keeps_the_proposal_it_holds() -> None:
    ledger, stats = make_ledger()
    sequence = make(7)
    held = sequence.proposal = Proposal("other", 3, [5])
    ledger.receive(reply(ledger.contexts([sequence]), [4]), {7: sequence})
    assert sequence.proposal is held
    assert stats.dropped == {"surplus": 1}


def test_every_proposal_with_tokens_is_counted_once_whatever_becomes_of_it() -> None:
    ledger, stats = make_ledger()
    sequence, other = make(7), make(8)
    alive = {7: sequence, 8: other}
    contexts = ledger.contexts([sequence, other])
    ledger.receive(reply(contexts, [4], []), alive)
    assert (stats.proposals, stats.dropped.total()) == (1, 0)
    ledger.receive(reply(contexts, [4], [VOCABULARY]), alive)
    ledger.begin_epoch()
    ledger.receive(reply(contexts, [4], [5]), alive)
    assert stats.proposals == 5
    assert stats.dropped == {"surplus": 1, "invalid": 1, "epoch": 2}


def test_no_proposal_is_none_dropped() -> None:
    ledger, stats = make_ledger()
    sequence = make(7)
    contexts = ledger.contexts([sequence])
    for alive in ({7: sequence}, {}):
        ledger.receive(reply(contexts, []), alive)
    ledger.begin_epoch()
    ledger.receive(reply(contexts, []), {7: sequence})
    assert (sequence.proposal, stats.dropped.total()) == (None, 0)


def test_an_expected_sequence_is_accounted_for_before_anything_is_sent() -> None:
    ledger, _ = make_ledger()
    ledger.expect(7)
    ledger.expect(7)
    assert (len(ledger), ledger.forget([7])) == (1, [7])

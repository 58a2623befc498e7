"""Rounds: rows never leak, first come first served, and only the target's own text."""

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from outrider.actors.messages import Outcomes, Rows, Sampling
from outrider.actors.scheduler import Batch, Plan, Scheduler
from outrider.actors.sequence import Proposal, Sequence, StopRules
from outrider.actors.stats import DraftStats, Stats
from outrider.actors.text import TextStream
from outrider.cluster.errors import OverloadedError, RequestError

from .identities import check_identities

VOCABULARY = 3  # small, so that wrong proposals are often right in part
END_ID = 0
ROWS, QUEUE, BUDGET = 3, 4, 6


def next_id(ids: list[int], seed: int) -> int:
    """The simulated target: a function of the committed ids and the sampling alone."""
    return random.Random(str((seed, ids))).choices(range(VOCABULARY), (1, 6, 6))[0]


def continuation(prompt: list[int], seed: int, rules: StopRules) -> list[int]:
    """Plain decoding."""
    ids: list[int] = []
    while len(ids) < rules.max_tokens:
        ids.append(next_id(prompt + ids, seed))
        if ids[-1] in rules.end_ids:
            break
    return ids


class SimulatedTarget:
    """Runs rows as a KV cache does: only what it holds and what it is given is known to it."""

    def __init__(self) -> None:
        self.cache: dict[int, list[int]] = {}

    def verify(self, rows: Rows) -> Outcomes:
        assert len(set(rows.row)) == len(rows.row), "a row twice in one pass"
        assert all(0 <= row < ROWS for row in rows.row)
        accepted, next_ids = [], []
        for i, (row, start) in enumerate(zip(rows.row, rows.start, strict=True)):
            held = self.cache.setdefault(row, [])
            assert 0 <= start <= len(held), "a gap in the cache"
            assert rows.ids[i], "a row without tokens"
            held[start:] = rows.ids[i]
            if not rows.decides[i]:
                assert rows.num_drafted[i] == 0
                accepted.append(0)
                next_ids.append(-1)
                continue
            drafted = rows.ids[i][len(rows.ids[i]) - rows.num_drafted[i] :]
            known = held[: len(held) - len(drafted)]
            seed = rows.sampling[i].seed
            kept = 0
            while kept < len(drafted) and drafted[kept] == next_id(known + drafted[:kept], seed):
                kept += 1
            accepted.append(kept)
            next_ids.append(next_id(known + drafted[:kept], seed))
        return Outcomes(accepted, next_ids, [[] for _ in accepted], 0.5)


def decode(ids: list[int]) -> str:
    return "".join(chr(97 + id) for id in ids)


def make(id: int, prompt: list[int], max_tokens: int = 4, wanted: int | None = None) -> Sequence:
    return Sequence(
        id,
        0,
        prompt,
        Sampling(seed=id),
        StopRules(max_tokens, frozenset({END_ID})),
        TextStream(decode, prompt),
        num_speculative_tokens=wanted,
    )


def make_scheduler(
    rows: int = ROWS, queue: int = QUEUE, budget: int = BUDGET
) -> tuple[Scheduler, Stats]:
    stats = Stats(drafts={"d": DraftStats()})
    return (
        Scheduler(num_rows=rows, max_queued=queue, max_num_batched_tokens=budget, stats=stats),
        stats,
    )


def check_rows(batch: Batch) -> None:
    """Every row says what its sequence says."""
    rows = batch.rows
    for i, (sequence, block) in enumerate(zip(batch.sequences, batch.blocks, strict=True)):
        assert rows.row[i] == sequence.row
        assert rows.start[i] == sequence.num_cached
        assert rows.num_drafted[i] == len(block.ids)
        own = len(rows.ids[i]) - len(block.ids)
        assert own >= 1
        assert rows.ids[i] == sequence.committed[rows.start[i] :][:own] + block.ids
        assert rows.decides[i] == (rows.start[i] + own == len(sequence.committed))
        assert rows.position[i] == len(sequence.committed) - sequence.num_prompt_ids
        assert rows.sampling[i] == sequence.sampling
        assert len(block.ids) <= sequence.rules.max_tokens - sequence.position - 1


class Serving(RuleBasedStateMachine):
    """Requests come and go, drafts say anything at any time, the target may lose its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler, self.stats = make_scheduler()
        self.target = SimulatedTarget()
        self.alive: dict[int, Sequence] = {}  # in the order of their submission
        self.output: Counter[str] = Counter()
        self.num_made = 0
        self.plan: Plan | None = None
        self.batch: Batch | None = None

    @rule(
        lengths=st.lists(st.integers(1, 14), min_size=1, max_size=4),
        max_tokens=st.integers(1, 8),
    )
    def submit(self, lengths: list[int], max_tokens: int) -> None:
        new = []
        for length in lengths:
            prompt = [1 + (self.num_made + i) % 2 for i in range(length)]
            new.append(make(self.num_made, prompt, max_tokens))
            self.num_made += 1
        waiting = self.scheduler.num_waiting
        fits = waiting + len(new) - self.scheduler.num_free_rows <= QUEUE
        if fits:
            self.scheduler.submit(new)
            self.alive.update((s.id, s) for s in new)
            assert self.scheduler.num_waiting == waiting + len(new)
        else:
            with pytest.raises(OverloadedError):
                self.scheduler.submit(new)
            assert self.scheduler.num_waiting == waiting

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), back=st.integers(0, 4), length=st.integers(1, 5), kind=st.integers(0, 3))
    def attach(self, data: st.DataObject, back: int, length: int, kind: int) -> None:
        """A proposal: right, right at first, or garbage; in time or late."""
        sequence = self.alive[data.draw(st.sampled_from(sorted(self.alive)))]
        if sequence.proposal is not None:
            return
        base = max(sequence.num_prompt_ids, len(sequence.committed) - back)
        ids: list[int] = []
        for _ in range(length):
            ids.append(next_id(sequence.committed[:base] + ids, sequence.sampling.seed))
        if kind > 1:
            ids[-1] = (ids[-1] + 1) % VOCABULARY
        if kind > 2:
            ids[0] = (ids[0] + 1) % VOCABULARY
        sequence.proposal = Proposal("d", base, ids)
        self.stats.drafts["d"].proposals += 1

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        ids = data.draw(st.sets(st.sampled_from(sorted(self.alive)), min_size=1, max_size=2))
        self.scheduler.remove([*ids, 10**6])
        for id in ids:
            assert self.alive.pop(id).row is None

    @precondition(lambda self: self.plan is None and self.batch is None)
    @rule()
    def make_plan(self) -> None:
        waiting = [s.id for s in self.alive.values() if s.row is None]
        admitted = min(len(waiting), self.scheduler.num_free_rows)
        plan = self.scheduler.plan()
        # First come, first served, as many as rows are free.
        assert [s.id for s in self.alive.values() if s.row is None] == waiting[admitted:]
        prefill = [
            n for s, n in zip(plan.sequences, plan.num_ids, strict=True) if s.num_pending > 1
        ]
        budget = max(BUDGET - len(plan.decoding), BUDGET // 4, 1)
        prompts = [s.num_pending for s in self.alive.values() if s.row is not None]
        assert sum(prefill) == min(budget, sum(n for n in prompts if n > 1))
        assert len(plan.decoding) == prompts.count(1)
        self.plan = plan

    @precondition(lambda self: self.plan is not None)
    @rule(configured=st.integers(0, 4))
    def ask(self, configured: int) -> None:
        assert self.plan is not None
        wanting = self.scheduler.wanting(self.plan, configured)
        assert wanting == [
            s
            for s in self.plan.decoding
            if s.id in self.alive and s.proposal is None and s.draft_length(configured) > 0
        ]

    @precondition(lambda self: self.plan is not None)
    @rule()
    def make_batch(self) -> None:
        assert self.plan is not None
        self.batch = self.scheduler.batch(self.plan)
        assert self.batch.sequences == [s for s in self.plan.sequences if s.id in self.alive]
        check_rows(self.batch)
        assert all(s.proposal is None or s.num_pending > 1 for s in self.batch.sequences)
        self.plan = None

    @precondition(lambda self: self.batch is not None)
    @rule()
    def commit(self) -> None:
        assert self.batch is not None
        batch, self.batch = self.batch, None
        outcomes = self.target.verify(batch.rows)
        given_up = [s for s in batch.sequences if s.id not in self.alive]
        deltas = self.scheduler.commit(batch, outcomes)
        decided = [s for s, d in zip(batch.sequences, batch.rows.decides, strict=True) if d]
        assert [s for s, _ in deltas] == [s for s in decided if s not in given_up]
        for sequence, delta in deltas:
            if delta.finish_reason is not None:
                self.check_finished(self.alive.pop(sequence.id))

    @precondition(lambda self: self.plan is None)
    @rule()
    def lose_the_cache(self) -> None:
        """The target dies: a pass that runs has no outcomes."""
        if self.batch is not None:
            self.scheduler.abandon(self.batch)
        self.batch = None
        self.target.cache.clear()
        self.scheduler.forget_cache()

    def check_finished(self, sequence: Sequence) -> None:
        prompt, ids = (
            sequence.committed[: sequence.num_prompt_ids],
            sequence.committed[sequence.num_prompt_ids :],
        )
        assert ids == continuation(prompt, sequence.id, sequence.rules)
        assert sequence.row is None
        self.output["sequences"] += 1
        self.output["tokens"] += len(ids)

    @invariant()
    def no_row_is_lost_or_held_twice(self) -> None:
        held = [s.row for s in self.alive.values() if s.row is not None]
        assert len(set(held)) == len(held) == self.scheduler.num_running
        assert self.scheduler.num_running + self.scheduler.num_free_rows == ROWS
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(self.alive)
        assert self.scheduler.has_work == bool(self.alive)

    def teardown(self) -> None:
        """Whatever happened, those who are left are served to their end."""
        if self.plan is not None:
            self.make_batch()
        for _ in range(1000):
            if self.batch is not None:
                self.commit()
            if not self.alive:
                break
            self.make_plan()
            self.make_batch()
        assert not self.alive, "a sequence starves"
        assert self.scheduler.num_free_rows == ROWS
        assert self.stats.finished.total() == self.output["sequences"]
        given_up = self.stats.emitted_tokens - self.output["tokens"]
        assert given_up >= 0
        check_identities(self.stats)


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def run_round(scheduler: Scheduler, target: SimulatedTarget) -> Batch:
    batch = scheduler.batch(scheduler.plan())
    scheduler.commit(batch, target.verify(batch.rows))
    return batch


def test_more_answers_than_free_rows_wait_and_are_all_served() -> None:
    scheduler, stats = make_scheduler()
    sequences = [make(id, [1, 2]) for id in range(ROWS + QUEUE)]
    scheduler.submit(sequences)
    target = SimulatedTarget()
    run_round(scheduler, target)
    assert (scheduler.num_running, scheduler.num_waiting) == (ROWS, QUEUE)
    while scheduler.has_work:
        run_round(scheduler, target)
    for s in sequences:
        assert s.committed[2:] == continuation([1, 2], s.id, s.rules)
    assert stats.finished.total() == ROWS + QUEUE
    assert stats.emitted_tokens == sum(s.position for s in sequences)
    assert stats.verify_seconds == 0.5 * stats.num_rounds


def test_overload_refuses_a_request_whole_and_says_when_to_come_back() -> None:
    scheduler, _ = make_scheduler()
    scheduler.submit([make(id, [1]) for id in range(ROWS + QUEUE - 1)])
    with pytest.raises(OverloadedError, match="max_queued 4: try again later"):
        scheduler.submit([make(20, [1]), make(21, [1])])
    assert scheduler.num_waiting == ROWS + QUEUE - 1
    scheduler.submit([make(22, [1])])


def test_a_request_that_can_never_fit_is_the_clients_error() -> None:
    scheduler, _ = make_scheduler()
    with pytest.raises(RequestError, match="8 answers") as caught:
        scheduler.submit([make(id, [1]) for id in range(ROWS + QUEUE + 1)])
    assert caught.value.param == "n"
    assert not scheduler.has_work


def test_without_a_queue_free_rows_are_still_given() -> None:
    scheduler, _ = make_scheduler(queue=0)
    scheduler.submit([make(id, [1]) for id in range(ROWS)])
    with pytest.raises(OverloadedError):
        scheduler.submit([make(9, [1])])


def test_a_prompt_longer_than_a_pass_is_prefilled_in_chunks_beside_decoding_rows() -> None:
    scheduler, _ = make_scheduler(budget=8)
    target = SimulatedTarget()
    short, long = make(0, [1], 10), make(1, [1] * 20, 10)
    short.rules = StopRules(10)
    scheduler.submit([short, long])
    batches = [run_round(scheduler, target) for _ in range(4)]
    assert [b.rows.ids[1] for b in batches] == [[1] * 7, [1] * 7, [1] * 6, [long.committed[20]]]
    assert [b.rows.decides for b in batches] == [
        [True, False],
        [True, False],
        [True] * 2,
        [True] * 2,
    ]
    assert [b.rows.position[1] for b in batches] == [0, 0, 0, 1]
    assert short.position == 4


def test_a_full_batch_of_decoding_rows_does_not_starve_a_prompt() -> None:
    scheduler, _ = make_scheduler(rows=10, budget=4)
    scheduler.submit([make(id, [1]) for id in range(9)])
    scheduler.submit([make(9, [1] * 3)])
    plan = scheduler.plan()
    assert len(plan.decoding) == 9
    assert plan.num_ids == [1] * 10


def test_the_earlier_prompt_is_prefilled_first() -> None:
    scheduler, _ = make_scheduler(budget=6)
    scheduler.submit([make(0, [1] * 9), make(1, [1] * 9)])
    target = SimulatedTarget()
    assert run_round(scheduler, target).sequences[0].id == 0
    plan = scheduler.plan()
    assert [(s.id, n) for s, n in zip(plan.sequences, plan.num_ids, strict=True)] == [
        (0, 3),
        (1, 3),
    ]


def test_low_rows_are_used_first() -> None:
    scheduler, _ = make_scheduler()
    scheduler.submit([make(id, [1]) for id in range(3)])
    scheduler.plan()
    scheduler.remove([2, 0])
    scheduler.submit([make(5, [1])])
    assert {s.id: s.row for s in scheduler.plan().sequences} == {1: 1, 5: 0}


def test_a_sequence_given_up_while_a_pass_runs_gets_no_delta_and_its_row_serves_the_next() -> None:
    scheduler, stats = make_scheduler(rows=1)
    target = SimulatedTarget()
    gone, next_one = make(0, [1, 2]), make(1, [2])
    scheduler.submit([gone, next_one])
    batch = scheduler.batch(scheduler.plan())
    scheduler.remove([0])
    assert scheduler.commit(batch, target.verify(batch.rows)) == []
    assert gone.committed == [1, 2]
    assert stats.emitted_tokens == 0
    batch = run_round(scheduler, target)
    assert (batch.sequences, batch.rows.row, batch.rows.start) == ([next_one], [0], [0])


def test_a_draft_is_asked_only_for_decoding_sequences_without_a_proposal_and_with_room() -> None:
    scheduler, _ = make_scheduler(rows=5, budget=3)
    holding, wanting, last, plain, long = (
        make(0, [1]), make(1, [1]), make(2, [1], 1), make(3, [1], 4, wanted=0), make(4, [1] * 9),
    )  # fmt: skip
    scheduler.submit([holding, wanting, last, plain, long])
    plan = scheduler.plan()
    holding.proposal = Proposal("d", 1, [1])
    assert scheduler.wanting(plan, 4) == [wanting]
    assert scheduler.wanting(plan, 0) == []
    scheduler.remove([wanting.id])
    assert scheduler.wanting(plan, 4) == []


def test_drafts_are_counted_as_verified_and_late_ones_by_reason_only() -> None:
    scheduler, stats = make_scheduler()
    sequence = make(3, [1, 2], 6)
    sequence.rules = StopRules(6)
    scheduler.submit([sequence])
    target = SimulatedTarget()
    right = continuation([1, 2], 3, sequence.rules)
    wrong = [(right[0] + 1) % VOCABULARY, 1]
    sequence.proposal = Proposal("d", 2, [*right[:2], (right[2] + 1) % VOCABULARY])
    run_round(scheduler, target)
    assert sequence.committed == [1, 2, *right[:3]]
    sequence.proposal = Proposal("d", 2, wrong)  # from before the last pass
    run_round(scheduler, target)
    sequence.proposal = Proposal("d", 5, right[3:4])
    run_round(scheduler, target)
    draft = stats.drafts["d"]
    assert draft.dropped == {"mismatch": 1, "too_late": 1}
    assert (draft.counts.num_drafts, draft.counts.num_draft_tokens) == (1, 3)
    assert draft.counts.by_length == {3: [0, 0, 1, 0]}
    assert draft.counts == sequence.counts
    assert (stats.num_rounds, stats.emitted_tokens, sequence.num_passes) == (3, 5, 3)
    assert [stats.rounds[kind].num_rounds for kind in ("prompt", "block", "plain")] == [1, 0, 2]
    assert stats.emitted["plain"] == 2


def test_a_late_proposal_is_salvaged_once_and_a_held_one_ends_with_its_sequence() -> None:
    scheduler, stats = make_scheduler()
    sequence = make(3, [1, 2], 8)
    sequence.rules = StopRules(8)
    scheduler.submit([sequence])
    target = SimulatedTarget()
    run_round(scheduler, target)
    run_round(scheduler, target)
    right = continuation([1, 2], 3, sequence.rules)
    sequence.proposal = Proposal("d", 3, right[1:5])  # from before the second pass
    plan = scheduler.plan()
    assert scheduler.wanting(plan, 4) == scheduler.wanting(plan, 4) == []
    draft = stats.drafts["d"]
    assert (draft.salvaged, draft.counts.num_drafts) == (1, 0)
    batch = scheduler.batch(plan)
    scheduler.commit(batch, target.verify(batch.rows))
    assert (draft.salvaged, draft.counts.num_accepted_tokens) == (1, 3)
    sequence.proposal = Proposal("d", 8, right[6:])
    scheduler.remove([3])
    assert draft.dropped == {"ended": 1}


def test_what_stop_rules_cut_is_counted_by_source() -> None:
    stats = Stats()
    stats.record(drafted=4, accepted=3, emitted=2)  # two of the accepted went out
    assert stats.emitted == Counter(accepted=2)
    assert stats.cut == Counter(accepted=1, own=1)
    stats.record(drafted=4, accepted=3, emitted=3)
    stats.record(drafted=4, accepted=3, emitted=4)
    stats.record(drafted=0, accepted=0, emitted=1)
    assert stats.emitted == Counter(accepted=8, own=1, plain=1)
    assert stats.cut == Counter(accepted=1, own=2)
    assert stats.emitted_tokens == 10


def test_a_pass_without_outcomes_drops_its_blocks() -> None:
    scheduler, stats = make_scheduler()
    sequence = make(3, [1, 2], 8)
    scheduler.submit([sequence])
    target = SimulatedTarget()
    run_round(scheduler, target)
    sequence.proposal = Proposal("d", 3, [1])
    scheduler.abandon(scheduler.batch(scheduler.plan()))
    assert stats.drafts["d"].dropped == {"pass_lost": 1}
    assert stats.drafts["d"].counts.num_drafts == 0
    assert stats.num_rounds == 1


def test_answers_that_the_queue_refuses_are_counted() -> None:
    scheduler, stats = make_scheduler()
    scheduler.submit([make(id, [1]) for id in range(ROWS + QUEUE - 1)])
    with pytest.raises(OverloadedError):
        scheduler.submit([make(20, [1]), make(21, [1])])
    assert stats.rejected == 2


def test_rounds_are_counted_by_what_is_in_their_pass() -> None:
    scheduler, stats = make_scheduler()
    one, two = make(3, [1, 2], 8), make(5, [1], 8)
    target = SimulatedTarget()
    scheduler.submit([one])
    run_round(scheduler, target)  # its prompt
    one.proposal = Proposal("d", 3, [1])
    run_round(scheduler, target)
    run_round(scheduler, target)
    scheduler.submit([two])
    run_round(scheduler, target)  # a prompt of one token is one token of a row
    one.proposal = Proposal("d", len(one.committed), [1])
    run_round(scheduler, target)
    told = {kind: (each.num_rounds, each.num_rows) for kind, each in stats.rounds.items()}
    assert told == {"prompt": (1, 1), "block": (2, 3), "plain": (2, 3)}
    assert stats.num_rounds == 5
    assert stats.verify_seconds == sum(each.verify_seconds for each in stats.rounds.values()) == 2.5

"""What happened between two readings: exact numbers, None for no traffic, and a minute's memory."""

import copy
import math

import pytest

from outrider.actors.stats import Histogram, Levels, Pool, Snapshot
from outrider.deploy.glance import SPACING_S, SPAN_S, History, look, quantile, read
from outrider.deploy.metrics import parse, render
from outrider.deploy.status_page import render_status

from .snapshots import fresh, levels, make_settings, serve, snapshot


def served(*blocks: tuple[str, int, int]) -> Snapshot:
    """Of a coordinator that verified these blocks: (draft, drafted, accepted)."""
    stats = fresh()
    for name, drafted, accepted in blocks:
        stats.drafts[name].proposals += 1
        stats.drafts[name].record("token", drafted, accepted)
        stats.record(drafted, accepted, accepted + 1)
        stats.rounds["block"].seconds += 0.5
    return Snapshot(stats, levels())


BEFORE = served(("small", 4, 4), ("lookup", 2, 0))
AFTER = served(("small", 4, 4), ("lookup", 2, 0), ("small", 4, 1), ("small", 2, 2))


def test_rates_since_the_start_are_ratios_of_all_that_was_counted() -> None:
    glance = look(read(AFTER))
    assert glance.seconds is None and glance.tokens_per_s is None
    assert glance.acceptance_rate == 7 / 12
    assert glance.mean_acceptance_length == 1 + 7 / 4
    assert glance.tokens == 11
    assert glance.tokens_per_round_s == 11 / 2
    assert glance.share_from_drafts == 7 / 11
    assert (glance.drafted, glance.rejected) == (12, 5)


def test_rates_of_a_window_are_of_what_came_in_it() -> None:
    glance = look(read(AFTER), read(BEFORE), 4)
    assert glance.acceptance_rate == 3 / 6
    assert glance.mean_acceptance_length == 1 + 3 / 2
    assert (glance.tokens, glance.tokens_per_s, glance.tokens_per_round_s) == (5, 5 / 4, 5)
    assert glance.share_from_drafts == 3 / 5
    lookup, small = glance.drafts
    assert (lookup.name, lookup.drafts, lookup.acceptance_rate) == ("lookup", 0, None)
    assert lookup.mean_acceptance_length is None and lookup.acceptance_by_position == ()
    assert (small.name, small.drafts, small.acceptance_rate) == ("small", 2, 3 / 6)
    assert small.acceptance_by_position == (1.0, 0.5, 0.0, 0.0)  # over its drafts, as README says
    assert (small.living, small.replicas) == (3, 4)


def test_wasted_work_and_trouble_are_counted() -> None:
    stats = fresh()
    small = stats.drafts["small"]
    small.proposals, small.late, small.deaths, small.quarantines = 10, 3, 1, 2
    small.dropped.update(mismatch=2, epoch=1)
    small.fallbacks.update(deadline=4, lost=1)
    stats.cut.update(accepted=6, own=1)
    stats.finished.update(stop=9, error=2)
    stats.rebuilds, stats.rejected = 1, 5
    glance = look(read(Snapshot(stats, levels())))
    assert (glance.proposals, glance.late, glance.dropped, glance.fallbacks) == (10, 3, 3, 5)
    assert (glance.cut, glance.errors, glance.refused, glance.rebuilds) == (7, 2, 5, 1)
    assert (glance.deaths, glance.quarantines) == (1, 2)
    assert (glance.running, glance.waiting, glance.rows) == (3, 2, 16)
    assert (glance.living, glance.replicas) == (4, 5)


def test_without_traffic_there_are_no_rates() -> None:
    for glance in (look(read(Snapshot(fresh(), levels()))), look(read(AFTER), read(AFTER), 60)):
        assert glance.is_idle and glance.tokens_per_round_s is None
        assert glance.acceptance_rate is None and glance.mean_acceptance_length is None
        assert glance.share_from_drafts is None and glance.first_token_s is None
        assert all(draft.acceptance_rate is None for draft in glance.drafts)
    assert not look(read(AFTER)).is_idle


def test_what_cannot_be_divided_is_no_rate() -> None:
    stats = fresh()
    stats.drafts["small"].counts.drafted_at[0] = 5  # of no block
    glance = look(read(Snapshot(stats, Levels(pools={"small": Pool(0, 0)}))))
    small = glance.drafts[1]
    assert small.acceptance_by_position == () and small.mean_acceptance_length is None
    assert (small.living, small.replicas, glance.living) == (0, 0, 0)
    assert "0 of 0 living" in render_status("big", glance, None)


def test_after_a_restart_of_the_coordinator_all_counts_are_new() -> None:
    glance = look(read(BEFORE), read(AFTER), 10)
    assert glance.tokens == look(read(BEFORE)).tokens == 6
    assert glance.acceptance_rate == 4 / 6 and glance.tokens_per_s == 6 / 10


def test_a_draft_that_was_not_there_before_counts_from_zero() -> None:
    before = copy.deepcopy(BEFORE)
    del before.stats.drafts["small"]
    stats = copy.deepcopy(BEFORE.stats)
    glance = look(read(Snapshot(stats, levels())), read(before), 1)
    assert [draft.acceptance_rate for draft in glance.drafts] == [None, 1.0]


def test_quantiles_are_prometheus() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    assert quantile(histogram, 0.5) is None
    histogram.counts = [1, 0, 3, 0]
    assert quantile(histogram, 0.25) == 1.0
    assert quantile(histogram, 0.5) == 2 + 2 * 1 / 3
    histogram.counts = [0, 0, 0, 5]
    assert quantile(histogram, 0.5) == 4.0


@pytest.mark.parametrize("seed", range(5))
def test_a_scraped_page_is_read_as_the_snapshot_is(seed: int) -> None:
    now = snapshot(seed)
    settings = make_settings(vllm_names=True)
    model, counts = parse(render(settings, now).decode())
    assert model == "big"
    assert counts == read(now)
    then = read(Snapshot(fresh(), levels()))
    assert look(counts, then, 7.5) == look(read(now), then, 7.5)


@pytest.mark.parametrize("page", ["", "up 1\n", "<!doctype html>", "outrider_rounds_total\n"])
def test_a_page_without_counts_is_refused(page: str) -> None:
    with pytest.raises(ValueError):
        parse(page)


def test_history_looks_back_a_minute_and_keeps_few_readings() -> None:
    history, stats = History(), fresh()
    reading = read(Snapshot(stats, levels()))
    assert history.look(reading, 0) is None
    for second in range(1000):
        serve(stats, seed=second, num_rounds=1)
        reading = read(Snapshot(copy.deepcopy(stats), levels()))
        history.add(reading, float(second))
        assert len(history) <= math.ceil(SPAN_S / SPACING_S) + 1
    glance = history.look(reading, 999.0)
    assert glance is not None and glance.seconds is not None
    assert SPAN_S - SPACING_S <= glance.seconds <= SPAN_S
    assert history.look(reading, 999.0 + SPAN_S) is None, "what is old is not the last minute"


def test_history_says_nothing_of_readings_that_may_be_in_the_wrong_order() -> None:
    history, reading = History(), read(BEFORE)
    history.add(reading, 0)
    assert history.look(reading, 0.5) is None
    glance = history.look(reading, 1.0)
    assert glance is not None and glance.seconds == 1.0

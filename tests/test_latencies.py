"""Latencies in vLLM's sense, from clock readings alone."""

import pytest

from outrider.actors.latencies import Latencies
from outrider.actors.stats import Histogram, Stats


def test_a_histogram_counts_at_most_the_bound_and_sums_exactly() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 1]
    assert histogram.sum == 14.0


def test_each_latency_is_measured_between_its_two_events() -> None:
    stats = Stats()
    latencies = Latencies(stats)
    latencies.arrive([7, 8], now=10.0)
    latencies.admit([7], now=10.5)
    latencies.emit(7, 3, now=11.0, is_last=False)
    latencies.emit(7, 1, now=11.25, is_last=False)
    latencies.emit(7, 2, now=13.0, is_last=True)
    assert stats.queue_s.sum == 0.5
    assert stats.first_token_s.sum == 1.0
    assert stats.inter_token_s.sum == 0.25 + 1.75
    assert stats.end_to_end_s.sum == 3.0
    assert stats.per_output_token_s.sum == pytest.approx(2.0 / 5)  # 6 tokens, the first at 11.0
    counted = (stats.queue_s, stats.first_token_s, stats.inter_token_s, stats.end_to_end_s)
    assert [sum(histogram.counts) for histogram in counted] == [1, 1, 2, 1]
    assert len(latencies) == 1, "the other still waits"


def test_an_answer_of_one_token_has_no_time_per_further_token() -> None:
    stats = Stats()
    latencies = Latencies(stats)
    latencies.arrive([1], now=0.0)
    latencies.admit([1], now=0.0)
    latencies.emit(1, 1, now=2.0, is_last=True)
    assert sum(stats.per_output_token_s.counts) == 0
    assert (stats.first_token_s.sum, stats.end_to_end_s.sum) == (2.0, 2.0)


def test_nothing_is_kept_of_what_was_given_up() -> None:
    stats = Stats()
    latencies = Latencies(stats)
    latencies.arrive([1, 2], now=0.0)
    latencies.admit([1], now=1.0)
    latencies.forget([1, 2, 99])
    assert len(latencies) == 0
    assert sum(stats.end_to_end_s.counts) == 0

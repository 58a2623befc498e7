"""Deadlines of drafts: three recent medians for as much work, never under 50 ms."""

import pytest

from outrider.actors.pace import Pace


def paced(num_ids: int, *seconds: float) -> Pace:
    pace = Pace(30.0)
    for each in seconds:
        pace.record(num_ids, each)
    return pace


def test_before_anything_is_measured_the_first_limit_holds() -> None:
    assert Pace(30.0).deadline_s(5) == 30.0


def test_a_deadline_is_three_medians() -> None:
    assert paced(5, 0.1, 0.2, 0.4).deadline_s(5) == pytest.approx(0.6)


def test_one_slow_call_does_not_move_the_deadline() -> None:
    assert paced(5, 0.1, 0.1, 60.0).deadline_s(5) == pytest.approx(0.3)


def test_a_fast_draft_still_gets_50_ms() -> None:
    assert paced(5, 0.001).deadline_s(5) == 0.05


def test_only_the_last_32_calls_count() -> None:
    assert paced(5, *[9.0] * 40, *[0.1] * 32).deadline_s(5) == pytest.approx(0.3)
    assert paced(5, *[9.0] * 17, *[0.1] * 15).deadline_s(5) == pytest.approx(27)


def test_as_much_work_means_the_same_power_of_two() -> None:
    pace = paced(4, 0.1)
    pace.record(256, 1.0)
    assert pace.deadline_s(7) == pytest.approx(0.3)
    assert pace.deadline_s(300) == pytest.approx(3.0)


def test_more_work_than_was_measured_gets_more_time_in_proportion() -> None:
    pace = paced(4, 0.1)
    assert pace.deadline_s(8) == pytest.approx(0.6)
    assert pace.deadline_s(64) == pytest.approx(4.8)


def test_less_work_than_was_measured_gets_no_less_time_than_the_nearest() -> None:
    pace = paced(64, 1.0)
    assert pace.deadline_s(1) == pytest.approx(3.0)
    pace.record(4, 0.1)
    assert pace.deadline_s(16) == pytest.approx(3.0)  # as near to 4 as to 64: the longer
    assert pace.deadline_s(0) == pytest.approx(0.3)

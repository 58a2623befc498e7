"""Ray's metrics are told every growth once, and what they cannot do never touches serving."""

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from outrider.actors.stats import Histogram, Snapshot
from outrider.deploy.instruments import INSTRUMENTS, Instrument
from outrider.deploy.metrics import chosen_instruments
from outrider.deploy.ray_metrics import MetricClasses, RaySink, make_sinks
from outrider.deploy.vllm_names import VLLM_INSTRUMENTS

from .snapshots import fresh, levels, make_settings, serve, snapshot


class FakeMetric:
    """Keeps what it is told as Ray's classes would, and is as strict as they are."""

    made: dict[str, "FakeMetric"]

    def __init__(self, name: str, description: str = "", *, tag_keys: tuple[str, ...]) -> None:
        assert isinstance(tag_keys, tuple) and ":" not in name
        assert name not in self.made, "made twice"
        self.name, self.tag_keys = name, tag_keys
        self.values: dict[tuple[str, ...], Any] = {}
        self.made[name] = self

    def key(self, tags: dict[str, str]) -> tuple[str, ...]:
        assert tuple(tags) == self.tag_keys
        assert all(isinstance(value, str) and value.isascii() for value in tags.values())
        return tuple(tags.values())


class FakeCounter(FakeMetric):
    is_broken = False

    def inc(self, value: float = 1.0, tags: dict[str, str] | None = None) -> None:
        if self.is_broken:
            raise OSError("no agent")
        assert value > 0, "Ray refuses zero"
        key = self.key(tags or {})
        self.values[key] = self.values.get(key, 0) + value


class FakeGauge(FakeMetric):
    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        self.values[self.key(tags or {})] = value


class FakeHistogram(FakeMetric):
    def __init__(
        self,
        name: str,
        description: str = "",
        boundaries: list[float] | None = None,
        *,
        tag_keys: tuple[str, ...],
    ) -> None:
        super().__init__(name, description, tag_keys=tag_keys)
        self.bounds = tuple(boundaries or ())

    def observe(self, value: float, tags: dict[str, str] | None = None) -> None:
        self.values.setdefault(self.key(tags or {}), Histogram(self.bounds)).observe(value)


def fake_classes() -> tuple[dict[str, Any], MetricClasses]:
    """One process: what was made in it, by name, and the classes that make more."""
    made: dict[str, Any] = {}
    kinds = [type(kind.__name__, (kind,), {"made": made}) for kind in (
        FakeCounter, FakeGauge, FakeHistogram,
    )]  # fmt: skip
    return made, MetricClasses(*kinds)


def check_told(instrument: Instrument, told: Any, now: Snapshot) -> None:
    """Ray knows what the snapshot says, and of a counter at zero that there is one."""
    expected = {("big", *labels): v for labels, v in instrument.read(now).items()}
    assert told.tag_keys == instrument.labels
    if instrument.kind == "histogram":
        for key, value in told.values.items():
            assert value.counts == expected[key].counts
            inner = expected[key].counts[:-1]
            widths = [high - low for low, high in pairwise((0.0, *instrument.buckets))]
            slack = sum(n * width for n, width in zip(inner, widths, strict=True))
            if not expected[key].counts[-1]:
                assert abs(value.sum - expected[key].sum) <= slack
    elif instrument.kind == "counter":
        assert told.values == pytest.approx(expected, abs=1e-200)
    else:
        assert told.values == expected


def test_every_instrument_has_the_snapshots_value() -> None:
    made, classes = fake_classes()
    instruments = INSTRUMENTS + VLLM_INSTRUMENTS
    RaySink("big", instruments, classes).write(now := snapshot())
    assert made.keys() == {instrument.name.replace(":", "_") for instrument in instruments}
    for instrument in instruments:
        told = made[instrument.name.replace(":", "_")]
        assert told.values, instrument.name
        check_told(instrument, told, now)


def test_names_in_other_alphabets_are_told_as_escapes() -> None:
    made, classes = fake_classes()
    RaySink("modèle 千", INSTRUMENTS, classes).write(snapshot())
    for instrument in INSTRUMENTS:
        for model, *_ in made[instrument.name].values:
            assert model == r"mod\xe8le \u5343"


def test_growth_is_told_once_however_often_it_is_written() -> None:
    made, classes = fake_classes()
    sink = RaySink("big", INSTRUMENTS, classes)
    stats = fresh()
    for seed in range(5):
        sink.write(Snapshot(stats, levels()))
        serve(stats, seed)
        sink.write(Snapshot(stats, levels()))
    for instrument in INSTRUMENTS:
        check_told(instrument, made[instrument.name], Snapshot(stats, levels()))


def test_what_failed_is_told_the_next_time() -> None:
    made, classes = fake_classes()
    sink = RaySink("big", INSTRUMENTS, classes)
    made["outrider_rounds"].is_broken = True
    with pytest.raises(OSError):
        sink.write(now := snapshot())
    for instrument in INSTRUMENTS:  # the others are told
        if instrument.name != "outrider_rounds":
            check_told(instrument, made[instrument.name], now)
    made["outrider_rounds"].is_broken = False
    sink.write(now := snapshot())
    for instrument in INSTRUMENTS:
        check_told(instrument, made[instrument.name], now)


def test_totals_of_several_coordinators_and_lives_add_up() -> None:
    """Each life is a process of its own, with its own series; sums over series are the truth."""
    told: Counter[tuple[str, ...]] = Counter()
    true: Counter[tuple[str, ...]] = Counter()
    name = "outrider_spec_decode_num_accepted_tokens"
    for life in range(4):
        made, classes = fake_classes()
        sink, stats = RaySink("big", INSTRUMENTS, classes), fresh()
        for part in range(3):
            serve(stats, 10 * life + part)
            sink.write(Snapshot(stats, levels()))
        told.update(made[name].values)
        for draft, drafted in stats.drafts.items():
            for method, counts in drafted.methods.items():
                true["big", draft, method] += counts.num_accepted_tokens
    assert told == true, "exactly: what a series begins with is lost in its first sum"


def test_settings_choose_the_sink_and_the_names() -> None:
    assert make_sinks(make_settings(ray=False)) == []
    assert chosen_instruments(make_settings().metrics) == INSTRUMENTS
    both = chosen_instruments(make_settings(vllm_names=True).metrics)
    assert both == INSTRUMENTS + VLLM_INSTRUMENTS


async def test_rays_own_classes_take_it_without_an_agent() -> None:
    """No Ray runs here: nothing is shown, and nothing goes wrong."""
    (sink,) = make_sinks(make_settings(vllm_names=True))
    await asyncio.to_thread(sink.write, snapshot())

"""Ray's own metrics as a sink: its agents serve them on every node, without a port of ours.

Ray adds up what it is told, so it is told growth only, each unit once. Where no agent runs, nothing
happens.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

from ray.util import metrics as ray_metrics

from outrider.actors.stats import Histogram, Sink, Snapshot
from outrider.cluster.config import Settings
from outrider.deploy.instruments import Instrument
from outrider.deploy.metrics import chosen_instruments

_Tags = dict[str, str]

# A counter has to exist before its first event, else that is no growth to Prometheus. Ray's cannot
# be told zero; the first real sum swallows this.
_ALMOST_ZERO = 1e-300


def make_sinks(settings: Settings) -> list[Sink]:
    """The sinks that the settings name, beside what is read at scrapes."""
    if not settings.metrics.ray:
        return []
    return [RaySink(settings.model_name, chosen_instruments(settings.metrics))]


@dataclass(frozen=True)
class MetricClasses:
    """What makes Ray's three kinds of metrics, with a name, a description and tag keys."""

    counter: Callable[..., Any] = ray_metrics.Counter
    gauge: Callable[..., Any] = ray_metrics.Gauge
    histogram: Callable[..., Any] = ray_metrics.Histogram


class RaySink:
    """Tells Ray how every instrument has grown since the snapshot before."""

    def __init__(
        self,
        model: str,
        instruments: Iterable[Instrument],
        classes: MetricClasses = MetricClasses(),
    ) -> None:
        self._model = model
        self._tellers = [(each, _make_teller(each, classes)) for each in instruments]

    def write(self, snapshot: Snapshot) -> None:
        """Tell what is new. What fails is left for the next time, and the first error raised."""
        errors = []
        for instrument, teller in self._tellers:
            try:
                for values, value in instrument.read(snapshot).items():
                    names = map(_in_ascii, (self._model, *values))
                    teller.tell(value, dict(zip(instrument.labels, names, strict=True)))
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]


def _in_ascii(name: str) -> str:
    """The name with every other letter as its escape: Ray takes no others in a tag."""
    return name.encode("ascii", "backslashreplace").decode("ascii")


class _Teller(Protocol):
    """Tells one metric of Ray's the values of one instrument."""

    def tell(self, value: Any, tags: _Tags) -> None: ...


def _make_teller(instrument: Instrument, classes: MetricClasses) -> _Teller:
    # Ray deprecates colons; vLLM under Ray writes its names in the same way.
    words = (instrument.name.replace(":", "_"), instrument.help)
    if instrument.kind == "counter":
        return _CounterTeller(classes.counter(*words, tag_keys=instrument.labels))
    if instrument.kind == "gauge":
        return _GaugeTeller(classes.gauge(*words, tag_keys=instrument.labels))
    bounds = list(instrument.buckets)
    return _HistogramTeller(classes.histogram(*words, bounds, tag_keys=instrument.labels))


class _CounterTeller:
    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._told: dict[tuple[str, ...], float] = {}

    def tell(self, value: float, tags: _Tags) -> None:
        key = tuple(tags.values())
        if key not in self._told:
            self._metric.inc(_ALMOST_ZERO, tags)
            self._told[key] = 0.0
        if value > self._told[key]:
            self._metric.inc(value - self._told[key], tags)
            self._told[key] = value


class _GaugeTeller:
    def __init__(self, metric: Any) -> None:
        self._metric = metric

    def tell(self, value: float, tags: _Tags) -> None:
        self._metric.set(value, tags)


class _HistogramTeller:
    """Tells the middle of the bucket for each observation: Ray's own sum is made of these too."""

    def __init__(self, metric: Any) -> None:
        self._metric = metric
        self._told: dict[tuple[str, ...], list[int]] = {}

    def tell(self, value: Histogram, tags: _Tags) -> None:
        told = self._told.setdefault(tuple(tags.values()), [0] * len(value.counts))
        edges = (0.0, *value.bounds, 2 * value.bounds[-1])
        for i, (low, high) in enumerate(pairwise(edges)):
            while told[i] < value.counts[i]:
                self._metric.observe((low + high) / 2, tags)
                told[i] += 1

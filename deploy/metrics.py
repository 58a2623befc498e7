"""The instruments in Prometheus' text format: read from a snapshot at every scrape."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from outrider.actors.stats import Histogram, Snapshot
from outrider.cluster.config import MetricsSpec, Settings
from outrider.cluster.errors import ConfigError
from outrider.deploy.instruments import INSTRUMENTS, Instrument
from outrider.deploy.vllm_names import VLLM_INSTRUMENTS

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"

ReadSnapshot = Callable[[], Snapshot]

_FAMILIES = {
    "counter": CounterMetricFamily,
    "gauge": GaugeMetricFamily,
    "histogram": HistogramMetricFamily,
}


def chosen_instruments(metrics: MetricsSpec) -> tuple[Instrument, ...]:
    """What the settings want shown."""
    return INSTRUMENTS + VLLM_INSTRUMENTS * metrics.vllm_names


class SnapshotCollector(Collector):
    """Shows what `read` returns at each scrape, in the scrape's thread."""

    def __init__(self, model: str, instruments: Iterable[Instrument], read: ReadSnapshot) -> None:
        self._model = model
        self._instruments = instruments
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """Yield every family once, all of the same snapshot."""
        snapshot = self._read()
        for instrument in self._instruments:
            yield _family(instrument, self._model, snapshot)


def _family(instrument: Instrument, model: str, snapshot: Snapshot) -> Metric:
    family: Any = _FAMILIES[instrument.kind](
        instrument.name, instrument.help, labels=instrument.labels
    )
    for values, value in instrument.read(snapshot).items():
        if isinstance(value, Histogram):
            bounds = map(floatToGoString, (*value.bounds, math.inf))
            buckets = list(zip(bounds, accumulate(value.counts), strict=True))
            family.add_metric([model, *values], buckets, value.sum)
        else:
            family.add_metric([model, *values], value)
    shown: Metric = family
    return shown


def render(settings: Settings, snapshot: Snapshot) -> bytes:
    """The page that a scrape gets."""
    return generate_latest(_registry(settings, lambda: snapshot))


@dataclass(frozen=True)
class MetricsServer:
    """Serves the metrics in a thread until it is closed."""

    port: int
    server: WSGIServer
    thread: Thread

    def close(self) -> None:
        """Stop serving and free the port."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def serve_metrics(settings: Settings, read: ReadSnapshot) -> MetricsServer | None:
    """Serve /metrics where the settings say; None if they say nowhere. Close what it returns.

    `read` is called in the thread of each scrape, which fails if it raises. Raises ConfigError if
    the port cannot be had.
    """
    host, port = settings.metrics.host, settings.metrics.port
    if port is None:
        return None
    try:
        server, thread = start_http_server(port, host, _registry(settings, read))
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"metrics: cannot serve on {host}:{port}: {reason}") from error
    return MetricsServer(server.server_port, server, thread)


def _registry(settings: Settings, read: ReadSnapshot) -> CollectorRegistry:
    registry = CollectorRegistry()
    instruments = chosen_instruments(settings.metrics)
    registry.register(SnapshotCollector(settings.model_name, instruments, read))
    return registry

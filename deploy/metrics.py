"""The instruments in Prometheus' text format: read from a snapshot at every scrape, and back."""

import errno
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from socketserver import ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from outrider.actors.stats import Histogram, Snapshot
from outrider.cluster.config import MetricsSpec, Settings
from outrider.cluster.errors import ConfigError
from outrider.deploy.glance import Counts
from outrider.deploy.instruments import BY_NAME, INSTRUMENTS, Instrument
from outrider.deploy.readings import Value
from outrider.deploy.vllm_names import VLLM_INSTRUMENTS

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"

_SENTENCE = "text/plain; charset=utf-8"
_POLL_S = 0.2
_MOST = 2.0**53  # a float counts no further

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
    """Shows one snapshot."""

    def __init__(self, model: str, instruments: Iterable[Instrument], snapshot: Snapshot) -> None:
        self._model = model
        self._instruments = instruments
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield every family once."""
        for instrument in self._instruments:
            yield _family(instrument, self._model, self._snapshot)


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
    return generate_latest(_registry(settings, snapshot))


def parse(page: str) -> tuple[str, Counts]:
    """The model's name and the reading that a scraped page shows; ValueError if it shows none."""
    models: set[str] = set()
    counts: dict[str, dict[tuple[str, ...], Value]] = {}
    for family in _families(page):
        if (instrument := BY_NAME.get(family.name)) is None:
            continue
        values = counts[instrument.name] = {}
        for sample in family.samples:
            if missing := set(instrument.labels) - sample.labels.keys():
                raise ValueError(f"{sample.name} has no label {min(missing)!r}")
            model, *labels = (sample.labels[label] for label in instrument.labels)
            models.add(model)
            _take(values, tuple(labels), instrument, sample)
        for value in values.values():
            if isinstance(value, Histogram):
                value.counts = [b - a for a, b in pairwise([0, *value.counts])]
                if min(value.counts) < 0:
                    raise ValueError(f"the buckets of {instrument.name} do not add up")
    if not models:
        raise ValueError("nothing on it is named so")
    if len(models) > 1:
        raise ValueError(f"its counts are of {len(models)} models, not of one")
    return models.pop(), counts


def _families(page: str) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(page))
    except (ValueError, LookupError, ArithmeticError) as error:
        raise ValueError("it is not in Prometheus' text format") from error


def _take(
    values: dict[tuple[str, ...], Value],
    labels: tuple[str, ...],
    instrument: Instrument,
    sample: Sample,
) -> None:
    """Put one sample in its place; buckets as they come, the sum of all up to each."""
    value = sample.value
    may_be_broken = instrument.unit == "s" or instrument.kind == "histogram"
    if not 0 <= value <= _MOST or not (may_be_broken or value == int(value)):  # NaN is not either
        raise ValueError(f"{sample.name} is {value:g}")
    if instrument.kind != "histogram":
        values[labels] = value
        return
    histogram = values.setdefault(labels, Histogram(instrument.buckets))
    assert isinstance(histogram, Histogram)
    if sample.name.endswith("_bucket"):
        bounds = (*instrument.buckets, math.inf)
        try:
            place = bounds.index(float(sample.labels["le"]))
        except (ValueError, KeyError):
            raise ValueError(f"{sample.name} has other bounds than ours") from None
        histogram.counts[place] = int(value)
    elif sample.name.endswith("_sum"):
        histogram.sum = value


@dataclass(frozen=True)
class MetricsServer:
    """Serves the metrics in a thread until it is closed."""

    port: int
    server: WSGIServer
    thread: Thread

    @property
    def url(self) -> str:
        """Of the page."""
        host = str(self.server.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving and free the port."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def serve_metrics(
    settings: Settings, read: ReadSnapshot, patience_s: float = 0.0
) -> MetricsServer | None:
    """Serve /metrics where the settings say; None if they say nowhere. Close what it returns.

    `read` is called in the thread of each scrape, which is answered by 503 and a sentence if it
    raises. Raises ConfigError if the port cannot be had, or is still taken after `patience_s`.
    """
    host, port = settings.metrics.host, settings.metrics.port
    if port is None:
        return None
    end = time.monotonic() + patience_s
    while True:
        try:
            server = _Server(host, port, _app(settings, read))
            break
        except (OSError, UnicodeError) as error:  # the latter for hosts such as a..b
            is_taken = isinstance(error, OSError) and error.errno == errno.EADDRINUSE
            if not is_taken or time.monotonic() >= end:
                reason = getattr(error, "strerror", None) or error
                raise ConfigError(f"metrics: cannot serve on {host}:{port}: {reason}") from error
        time.sleep(_POLL_S)
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()
    return MetricsServer(server.server_port, server, thread)


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds for a client that says nothing: its thread is ours

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads a line for each scrape."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, app: "WSGIApplication") -> None:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = found[0]  # a host may have IPv6 only
        super().__init__((str(address[0]), port), _Handler)
        self.set_app(app)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no news; what fails in the app, wsgiref tells before."""


def _app(settings: Settings, read: ReadSnapshot) -> "WSGIApplication":
    def app(environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        try:
            snapshot = read()
        except Exception as error:
            sentence = " ".join(str(error).split()) or type(error).__name__
            start_response("503 Service Unavailable", [("Content-Type", _SENTENCE)])
            return [f"{sentence}\n".encode()]
        # In the format that the scraper asks for.
        show: WSGIApplication = make_wsgi_app(_registry(settings, snapshot))
        return show(environ, start_response)

    return app


def _registry(settings: Settings, snapshot: Snapshot) -> CollectorRegistry:
    registry = CollectorRegistry()
    instruments = chosen_instruments(settings.metrics)
    registry.register(SnapshotCollector(settings.model_name, instruments, snapshot))
    return registry

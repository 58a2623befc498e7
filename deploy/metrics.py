"""The coordinator's counts in Prometheus' format: read at every scrape, no second bookkeeping.

Names are vLLM's stems behind `outrider_`. Only sums are shown: every rate is a ratio of two of
them, taken in PromQL. Series of the drafts in the settings exist from the start, at zero, but for
those by reason, which begin with the first event.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from threading import Thread
from typing import NamedTuple
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from outrider.actors.stats import DraftStats, Stats
from outrider.cluster.config import Settings
from outrider.cluster.errors import ConfigError


class Gauge(NamedTuple):
    """A number that goes up and down: what it means, and how to read it now."""

    help: str
    read: Callable[[], float]


class _Family(NamedTuple):
    """A counter with one label (or none) besides `model` and `draft`."""

    name: str
    help: str
    label: str | None
    read: Callable[[DraftStats], Iterable[tuple[object, float]]]  # label's value, count


def _one(value: float) -> list[tuple[object, float]]:
    return [("", value)]


def _by_reason(counts: Counter[str]) -> list[tuple[object, float]]:
    return list(counts.copy().items())  # the coordinator goes on counting meanwhile


def _by_position(counts: list[int]) -> list[tuple[object, float]]:
    return list(enumerate(counts.copy()))


DRAFT_FAMILIES = (
    _Family(
        "spec_decode_num_drafts",
        "Blocks verified that had at least one drafted token.",
        None,
        lambda draft: _one(draft.counts.num_drafts),
    ),
    _Family(
        "spec_decode_num_draft_tokens",
        "Drafted tokens verified.",
        None,
        lambda draft: _one(draft.counts.num_draft_tokens),
    ),
    _Family(
        "spec_decode_num_accepted_tokens",
        "Drafted tokens accepted.",
        None,
        lambda draft: _one(draft.counts.num_accepted_tokens),
    ),
    _Family(
        "spec_decode_num_draft_tokens_per_pos",
        "Drafted tokens verified, by position in their block.",
        "position",
        lambda draft: _by_position(draft.counts.drafted_at),
    ),
    _Family(
        "spec_decode_num_accepted_tokens_per_pos",
        "Drafted tokens accepted, by position in their block.",
        "position",
        lambda draft: _by_position(draft.counts.accepted_at),
    ),
    _Family(
        "fallbacks",
        "Rounds of a sequence without a proposal of this draft, by reason.",
        "reason",
        lambda draft: _by_reason(draft.fallbacks),
    ),
    _Family(
        "dropped_proposals",
        "Proposals that were never verified, by reason.",
        "reason",
        lambda draft: _by_reason(draft.dropped),
    ),
    _Family(
        "draft_seconds", "Time in calls that propose.", None, lambda draft: _one(draft.seconds)
    ),
    _Family("draft_deaths", "Draft workers lost.", None, lambda draft: _one(draft.deaths)),
)


class StatsCollector(Collector):
    """Shows the `stats` of the coordinator that serves the model of `settings`, and `gauges`."""

    def __init__(
        self, settings: Settings, stats: Stats, gauges: Mapping[str, Gauge] | None = None
    ) -> None:
        self._model = settings.model_name
        self._lengths = {draft.name: draft.num_speculative_tokens for draft in settings.drafts}
        self._stats = stats
        self._gauges = gauges or {}

    def collect(self) -> Iterator[Metric]:
        """Yield every family once. Called in the thread of the scrape."""
        stats = self._stats
        yield self._total("rounds", "Passes of the target.", stats.rounds)
        yield self._total("generation_tokens", "Tokens emitted.", stats.emitted_tokens)
        yield self._total("prompt_tokens", "Tokens of the prompts taken in.", stats.prompt_tokens)
        yield self._total("verify_seconds", "Time in passes of the target.", stats.verify_seconds)
        requests = CounterMetricFamily(
            "outrider_requests", "Sequences that ended, by reason.", labels=["model", "reason"]
        )
        for reason, count in _by_reason(stats.finished):
            requests.add_metric([self._model, str(reason)], count)
        yield requests
        drafts = {name: DraftStats() for name in self._lengths} | stats.drafts.copy()
        for family in DRAFT_FAMILIES:
            yield self._of_drafts(family, drafts)
        for name, gauge in self._gauges.items():
            shown = GaugeMetricFamily(f"outrider_{name}", gauge.help, labels=["model"])
            shown.add_metric([self._model], gauge.read())
            yield shown

    def _total(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(f"outrider_{name}", help, labels=["model"])
        family.add_metric([self._model], value)
        return family

    def _of_drafts(self, family: _Family, drafts: Mapping[str, DraftStats]) -> Metric:
        extra = [] if family.label is None else [family.label]
        labels = ["model", "draft", *extra]
        shown = CounterMetricFamily(f"outrider_{family.name}", family.help, labels=labels)
        for name, draft in drafts.items():
            counts = dict(family.read(draft))
            if family.label == "position":
                counts = dict.fromkeys(range(self._lengths.get(name, 0)), 0.0) | counts
            for key, count in counts.items():
                values = [self._model, name, str(key)]
                shown.add_metric(values[: len(labels)], count)
        return shown


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


def serve_metrics(
    settings: Settings, stats: Stats, gauges: Mapping[str, Gauge] | None = None
) -> MetricsServer | None:
    """Serve /metrics where the settings say; None if they say nowhere. Close what it returns.

    Raises ConfigError if the port cannot be had.
    """
    host, port = settings.metrics.host, settings.metrics.port
    if port is None:
        return None
    registry = CollectorRegistry()
    registry.register(StatsCollector(settings, stats, gauges))
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"metrics: cannot serve on {host}:{port}: {reason}") from error
    return MetricsServer(server.server_port, server, thread)

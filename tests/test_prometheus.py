"""A real Prometheus scrapes two coordinators: its totals are the truth, and every query has data.

Every target is scraped twice, the second time with `ray_` before each name, so that the
queries for Ray's metrics are tried as well.
"""

import contextlib
import dataclasses
import json
import math
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider.actors.requests import SpeculationCounts
from outrider.actors.stats import Histogram, Levels, Pool, Snapshot, Stats
from outrider.deploy.instruments import INSTRUMENTS, Instrument
from outrider.deploy.metrics import serve_metrics
from outrider.deploy.rules import make_rules

from .queries import PREFIXES, panel_queries, rule_queries, substituted
from .snapshots import DRAFTS, METHODS, fresh, levels, make_settings, serve

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(
    PROMETHEUS is None, reason="prometheus is not installed (Debian: prometheus)"
)
DEADLINE_S = 60.0
WINDOW = "5m"  # longer than the test: everything is in it
STEM = "outrider_spec_decode_num"

# Blocks (drafted, accepted) of each draft, over and over: the acceptance of any whole number of
# them is the same, whenever Prometheus looks.
BLOCKS = {
    "lookup": [(2, 2), (2, 0), (1, 1), (2, 1)],
    "small": [(4, 4), (4, 3), (4, 1), (4, 0), (3, 3), (2, 1)],
}


def acceptance(draft: str) -> float:
    return sum(a for _, a in BLOCKS[draft]) / sum(d for d, _ in BLOCKS[draft])


def acceptance_at(draft: str, position: int, *, where_drafted: bool) -> float:
    blocks = [(d, a) for d, a in BLOCKS[draft] if d > position or not where_drafted]
    return sum(a > position for _, a in blocks) / len(blocks)


@dataclass
class Coordinator:
    """What one coordinator counts; after a restart, from zero."""

    levels: Levels
    lives: list[Stats] = field(default_factory=lambda: [fresh()])

    def read(self) -> Snapshot:
        return Snapshot(self.lives[-1], self.levels)

    def work(self, seed: int, num_periods: int) -> None:
        """Count whole periods of blocks, and some of everything else, in one moment."""
        stats = fresh()
        serve(stats, seed)
        for name, draft in stats.drafts.items():
            draft.counts, draft.methods = SpeculationCounts(), {}
            draft.expect(METHODS[name], DRAFTS[name])
            for drafted, accepted in BLOCKS[name] * num_periods:
                for method in METHODS[name]:
                    draft.record(method, drafted, accepted)
                    draft.spend(method, 1000.0)  # which nothing can pay for
        self.lives[-1] = stats

    def restart(self) -> None:
        self.lives.append(fresh())


class Prometheus:
    """A running server, asked over HTTP."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=DEADLINE_S) as page:
            return json.load(page)["data"]

    def ask(self, query: str, *labels: str) -> dict[tuple[str, ...], float]:
        """The values of an expression now, by these labels."""
        return {
            tuple(series["metric"].get(label, "") for label in labels): float(series["value"][1])
            for series in self.get("query", query=query)["result"]
        }

    def growth(self, name: str, labels: tuple[str, ...]) -> Counter[tuple[str, ...]]:
        """What a counter grew by in all of its samples, of all coordinators.

        As Prometheus defines it, without its guess about the time around the samples: a value
        below the one before means that the counter began again at zero.
        """
        total: Counter[tuple[str, ...]] = Counter()
        for series in self.get("query", query=f'{name}{{job="outrider"}}[{WINDOW}]')["result"]:
            key = tuple(series["metric"][label] for label in labels)
            values = [float(value) for _, value in series["values"]]
            total[key] += sum(b - a if b >= a else b for a, b in pairwise(values))
        return total

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            with contextlib.suppress(urllib.error.URLError):
                if is_so():
                    return
            assert time.monotonic() < deadline, what
            time.sleep(0.1)

    def wait_for_rounds(self, coordinators: Iterable[Coordinator]) -> None:
        """Until it has seen the present counts of every coordinator, under both names."""
        expected = sorted(each.lives[-1].rounds for each in coordinators)

        def is_seen() -> bool:
            seen = [self.ask(f"{prefix}outrider_rounds_total", "instance") for prefix in PREFIXES]
            return all(sorted(values.values()) == expected for values in seen)

        self.wait(is_seen, f"rounds never became {expected}")


def configuration(ports: Iterable[int]) -> str:
    targets = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
    renamed = {
        "source_labels": ["__name__"],
        "regex": "(outrider_.+)",
        "target_label": "__name__",
        "replacement": "ray_$1",
    }
    return yaml.safe_dump(
        {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": ["rules.yml"],
            "scrape_configs": [
                {"job_name": "outrider", "static_configs": targets},
                {"job_name": "ray", "static_configs": targets, "metric_relabel_configs": [renamed]},
            ],
        }
    )


@contextlib.contextmanager
def running_prometheus(folder: Path, ports: Iterable[int]) -> Iterator[Prometheus]:
    assert PROMETHEUS is not None
    (folder / "prometheus.yml").write_text(configuration(ports))
    (folder / "rules.yml").write_text(make_rules(""))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                PROMETHEUS,
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    try:
        yield Prometheus(port)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)


@dataclass(frozen=True)
class Scene:
    """Two coordinators that have served, one of them restarted, and who watched them."""

    prometheus: Prometheus
    coordinators: list[Coordinator]


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    well = levels()
    pools = {**well.pools, "small": Pool(4, 0)}
    first = Coordinator(well)
    second = Coordinator(dataclasses.replace(well, waiting=60, pools=pools))
    both = [first, second]
    with contextlib.ExitStack() as stack:
        ports = []
        for each in both:
            server = serve_metrics(make_settings(), each.read)
            assert server is not None
            stack.callback(server.close)
            ports.append(server.port)
        folder = tmp_path_factory.mktemp("prometheus")
        prometheus = stack.enter_context(running_prometheus(folder, ports))
        prometheus.wait_for_rounds(
            both
        )  # zeros: what is there before the first sample is no growth
        first.work(1, num_periods=100)
        second.work(2, num_periods=300)
        prometheus.wait_for_rounds(both)
        second.restart()
        prometheus.wait_for_rounds(both)
        second.work(3, num_periods=100)
        prometheus.wait_for_rounds(both)
        yield Scene(prometheus, both)


def truth(instrument: Instrument, coordinators: Iterable[Coordinator]) -> Counter[tuple[str, ...]]:
    total: Counter[tuple[str, ...]] = Counter()
    for coordinator in coordinators:
        for life in coordinator.lives:
            for labels, value in instrument.read(Snapshot(life, coordinator.levels)).items():
                assert not isinstance(value, Histogram)
                total[labels] += value  # type: ignore[assignment]
    return total


@pytest.mark.parametrize(
    "instrument", [i for i in INSTRUMENTS if i.kind == "counter"], ids=lambda i: i.name
)
def test_totals_over_coordinators_and_restarts_are_the_truth(
    scene: Scene, instrument: Instrument
) -> None:
    told = scene.prometheus.growth(instrument.series, instrument.labels[1:])
    assert told == pytest.approx(truth(instrument, scene.coordinators), rel=1e-12)


def test_prometheus_sees_the_restart_and_adds_the_lives_up(scene: Scene) -> None:
    resets = scene.prometheus.ask(f"resets(outrider_rounds_total[{WINDOW}])", "instance")
    assert sorted(resets.values()) == [0, 1]
    increase = scene.prometheus.ask(
        f"sum by (draft) (increase({STEM}_accepted_tokens_total[{WINDOW}]))", "draft"
    )
    for (draft,), value in increase.items():
        exact = sum(
            life.drafts[draft].counts.num_accepted_tokens
            for each in scene.coordinators
            for life in each.lives
        )
        # `increase` adds what may have been around the samples; without the reset it were half.
        assert 1 <= value / exact < 1.7


@pytest.mark.parametrize("prefix", PREFIXES, ids=("ray", "plain"))
def test_the_dashboards_acceptance_is_the_truth(scene: Scene, prefix: str) -> None:
    queries = {title: substituted(query, WINDOW) for title, query in panel_queries(prefix)}
    ask = scene.prometheus.ask
    by_draft = ask(queries["By draft"], "draft")
    assert by_draft == pytest.approx({(draft,): acceptance(draft) for draft in BLOCKS}, abs=1e-6)
    length = {(d,): 1 + sum(a for _, a in b) / len(b) for d, b in BLOCKS.items()}
    assert ask(queries["Mean acceptance length by draft"], "draft") == pytest.approx(
        length, abs=1e-6
    )
    for title, whole in (
        ("By position, where drafted", True),
        ("By position, of all blocks", False),
    ):
        expected = {
            (draft, str(position)): acceptance_at(draft, position, where_drafted=whole)
            for draft, num_tokens in DRAFTS.items()
            for position in range(num_tokens)
        }
        assert ask(queries[title], "draft", "position") == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("prefix", PREFIXES, ids=("ray", "plain"))
def test_every_query_of_every_panel_has_data(scene: Scene, prefix: str) -> None:
    for title, query in panel_queries(prefix):
        values = scene.prometheus.ask(substituted(query, WINDOW))
        assert values, f"{title}: no data for {query}"
        assert all(map(math.isfinite, values.values())), f"{title}: {values}"


@pytest.mark.parametrize("prefix", PREFIXES, ids=("ray", "plain"))
def test_every_query_of_every_rule_has_data(scene: Scene, prefix: str) -> None:
    for name, query in rule_queries(prefix):
        if name == "OutriderAcceptanceCollapsed":  # its day is as long as its five minutes here
            query = query.replace(" < 0.5 * ", " + ")
        scene.prometheus.wait(
            lambda query=query: bool(scene.prometheus.ask(query)), f"{name}: no data for {query}"
        )


def test_prometheus_evaluates_the_rules_and_would_alert(scene: Scene) -> None:
    expected = {
        ("OutriderDraftSlowsDown", "lookup"),
        ("OutriderDraftSlowsDown", "small"),
        ("OutriderDraftsGone", "small"),
        ("OutriderQueueFull", ""),
        ("OutriderTargetLost", ""),
    }

    def active() -> set[tuple[str, str]]:
        labels = [alert["labels"] for alert in scene.prometheus.get("alerts")["alerts"]]
        return {(each["alertname"], each.get("draft", "")) for each in labels}

    scene.prometheus.wait(lambda: active() == expected, f"the alerts never became {expected}")
    groups = scene.prometheus.get("rules")["groups"]
    assert {rule["health"] for group in groups for rule in group["rules"]} == {"ok"}

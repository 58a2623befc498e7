"""A real Prometheus scrapes two coordinators: its totals are the truth, and every query has data.

Every target is scraped twice, the second time with `ray_` before each name, so that the queries
for Ray's metrics are tried as well; tests.acceptance.ray_metrics tries them on Ray's own agents.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from outrider.actors.stats import Pool
from outrider.deploy.instruments import INSTRUMENTS, Instrument
from outrider.deploy.metrics import serve_metrics

from .queries import PREFIXES, panel_queries, rule_queries, substituted
from .snapshots import DRAFTS, levels, make_settings
from .watched import (
    BLOCKS,
    PROMETHEUS,
    WINDOW,
    Coordinator,
    Prometheus,
    acceptance,
    acceptance_at,
    running_prometheus,
    truth,
)

pytestmark = pytest.mark.skipif(
    PROMETHEUS is None, reason="prometheus is not installed (Debian: prometheus)"
)
STEM = "outrider_spec_decode_num"


def scrape_configs(ports: Iterable[int]) -> list[dict[str, Any]]:
    """One job for our names, one for the same under Ray's prefix."""
    targets = [{"targets": [f"127.0.0.1:{port}" for port in ports]}]
    renamed = {
        "source_labels": ["__name__"],
        "regex": "(outrider_.+)",
        "target_label": "__name__",
        "replacement": "ray_$1",
    }
    return [
        {"job_name": "outrider", "static_configs": targets},
        {"job_name": "ray", "static_configs": targets, "metric_relabel_configs": [renamed]},
    ]


def wait_until_seen(prometheus: Prometheus, coordinators: Iterable[Coordinator]) -> None:
    """Until it has the present counts of every coordinator, under both names."""
    expected = sorted(each.lives[-1].num_rounds for each in coordinators)

    def is_seen() -> bool:
        seen = [
            prometheus.ask(f"sum by (instance) ({prefix}outrider_rounds_total)", "instance")
            for prefix in PREFIXES
        ]
        return all(sorted(values.values()) == expected for values in seen)

    prometheus.wait(is_seen, f"rounds never became {expected}")


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
        prometheus = stack.enter_context(running_prometheus(folder, "", scrape_configs(ports)))
        wait_until_seen(prometheus, both)  # zeros: only what comes after a first sample is growth
        first.work(1, num_periods=100)
        second.work(2, num_periods=300)
        wait_until_seen(prometheus, both)
        second.restart()
        wait_until_seen(prometheus, both)
        second.work(3, num_periods=100)
        wait_until_seen(prometheus, both)
        yield Scene(prometheus, both)


@pytest.mark.parametrize(
    "instrument", [i for i in INSTRUMENTS if i.kind == "counter"], ids=lambda i: i.name
)
def test_totals_over_coordinators_and_restarts_are_the_truth(
    scene: Scene, instrument: Instrument
) -> None:
    told = scene.prometheus.growth(instrument.series, instrument.labels[1:])
    assert told == pytest.approx(truth(instrument, scene.coordinators), rel=1e-12)


def test_prometheus_sees_the_restart_and_adds_the_lives_up(scene: Scene) -> None:
    resets = scene.prometheus.ask(
        f"resets(outrider_rounds_total{{kind='block'}}[{WINDOW}])", "instance"
    )
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
        if name == "OutriderSlowerThanPlain":  # it is not
            query = query.replace(" < 1 and ", " > 1 and ")
        if name == "OutriderGone":  # none is
            query = query.replace(" unless ", " and ")
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

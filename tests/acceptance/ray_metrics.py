"""The dashboard on Ray's own metrics, by hand: `python -m tests.acceptance.ray_metrics`.

Half a minute. Two nodes with their agents, two coordinators of known acceptance, one of them killed
and back. A real Prometheus finds the agents through a file, as in production.
"""

import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Before Ray is imported.
os.environ.update(RAY_AUTH_MODE="disabled", RAY_metrics_report_interval_ms="1000")

import ray
from ray.cluster_utils import Cluster

from outrider.actors.stats import ROUND_KINDS, Stats
from outrider.deploy.instruments import INSTRUMENTS
from outrider.deploy.ray_metrics import make_sinks

from ..queries import panel_queries, rule_queries, substituted
from ..snapshots import DRAFTS, levels, make_settings
from ..watched import (
    BLOCKS,
    WINDOW,
    Coordinator,
    Prometheus,
    acceptance,
    acceptance_at,
    running_prometheus,
    truth,
)

QUIET = {  # what did not happen
    "OutriderAcceptanceCollapsed",
    "OutriderDraftsGone",
    "OutriderGone",
    "OutriderSlowerThanPlain",
}


class Process:
    """One life of a coordinator: counts, and tells Ray every second."""

    def __init__(self) -> None:
        self._coordinator = Coordinator(levels())
        (self._sink,) = make_sinks(make_settings())
        threading.Thread(target=self._tell, daemon=True).start()

    def _tell(self) -> None:
        while True:
            self._sink.write(self._coordinator.read())
            time.sleep(1)

    def work(self, seed: int) -> Stats:
        """Work once more; all that was counted."""
        self._coordinator.work(seed, num_periods=100)
        return self._coordinator.lives[-1]


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=node("one"))
    cluster.add_node(**node("two"))
    ray.init(cluster.address, log_to_driver=False)
    try:
        with tempfile.TemporaryDirectory() as folder:
            discovery = Path(folder) / "agents.json"
            agents = [f"{n['NodeManagerAddress']}:{n['MetricsExportPort']}" for n in ray.nodes()]
            discovery.write_text(json.dumps([{"targets": agents}]))
            job = {"job_name": "ray", "file_sd_configs": [{"files": [str(discovery)]}]}
            with running_prometheus(Path(folder), "ray_", [job]) as prometheus:
                watch(prometheus)
    finally:
        ray.shutdown()
        cluster.shutdown()


def node(name: str) -> dict[str, Any]:
    return {"num_cpus": 1, "include_dashboard": False, "resources": {name: 1}}


def start(name: str) -> Any:
    return ray.remote(num_cpus=0, resources={name: 0.1})(Process).remote()


def watch(prometheus: Prometheus) -> None:
    first, second = start("one"), start("two")
    wait_for_births(prometheus, 2)
    ray.get(
        [first.work.remote(1), second.work.remote(2)]
    )  # growth of counters, births of histograms
    wait_for_rounds(prometheus, 80)
    lives = ray.get([first.work.remote(3), second.work.remote(4)])
    wait_for_rounds(prometheus, 160)
    ray.kill(second)
    second = start("two")
    wait_for_births(prometheus, 3)
    lives.append(ray.get(second.work.remote(5)))
    wait_for_rounds(prometheus, 200)
    check_totals(prometheus, Coordinator(levels(), lives))
    check_acceptance(prometheus)
    check_data(prometheus)


def wait_for_births(prometheus: Prometheus, lives: int) -> None:
    """Until the series of so many lives are there: what is counted from now on is growth."""
    query = f"count(max_over_time(ray_outrider_rounds_total[{WINDOW}]))"
    expected = lives * len(ROUND_KINDS)
    prometheus.wait(lambda: prometheus.ask(query).get(()) == expected, f"no {expected} series")


def wait_for_rounds(prometheus: Prometheus, expected: int) -> None:
    """Until all lives, the dead one too, have so many rounds."""
    query = f"sum(max_over_time(ray_outrider_rounds_total[{WINDOW}]))"
    prometheus.wait(lambda: prometheus.ask(query).get(()) == expected, f"no {expected} rounds")


def check_totals(prometheus: Prometheus, all_lives: Coordinator) -> None:
    """Each life is a series of its own, which ends at its last count."""
    counters = [instrument for instrument in INSTRUMENTS if instrument.kind == "counter"]
    for instrument in counters:
        by = ", ".join(instrument.labels)
        query = f"sum by ({by}) (max_over_time(ray_{instrument.series}[{WINDOW}]))"
        told = prometheus.ask(query, *instrument.labels[1:])
        check(f"totals of {instrument.name}", told, truth(instrument, [all_lives]), is_equal)
    print(f"totals of {len(counters)} counters: the truth")


def is_equal(told: float, expected: float) -> bool:
    return math.isclose(told, expected, abs_tol=1e-200)  # what is zero begins a little above it


def check_acceptance(prometheus: Prometheus) -> None:
    def is_near(told: float, expected: float) -> bool:
        return abs(told - expected) <= 1e-6

    queries = {title: substituted(query, WINDOW) for title, query in panel_queries("ray_")}
    told = prometheus.ask(queries["By draft"], "draft")
    check("acceptance", told, {(draft,): acceptance(draft) for draft in BLOCKS}, is_near)
    told = prometheus.ask(queries["By position, where drafted"], "draft", "position")
    expected = {
        (draft, str(position)): acceptance_at(draft, position, where_drafted=True)
        for draft, num_tokens in DRAFTS.items()
        for position in range(num_tokens)
    }
    check("acceptance by position", told, expected, is_near)
    print("acceptance by draft and by position: the truth within 1e-6")


def check_data(prometheus: Prometheus) -> None:
    queries = [*panel_queries("ray_"), *rule_queries("ray_")]
    told = [(name, prometheus.ask(substituted(query, WINDOW))) for name, query in queries]
    assert all(math.isfinite(value) for _, values in told for value in values.values())
    silent = {name for name, values in told if not values}
    assert silent == QUIET, silent
    print(f"{len(queries)} queries: all have data but {', '.join(sorted(silent))}")


def check(
    what: str,
    told: dict[tuple[str, ...], float],
    expected: dict[tuple[str, ...], float],
    is_same: Callable[[float, float], bool],
) -> None:
    assert told.keys() == expected.keys(), f"{what}: {told}, not {expected}"
    assert all(is_same(told[key], expected[key]) for key in told), f"{what}: {told}, not {expected}"


if __name__ == "__main__":
    main()

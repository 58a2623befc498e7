"""Coordinators of known acceptance, and a real Prometheus that watches them."""

import contextlib
import copy
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from outrider.actors.stats import Histogram, Levels, Snapshot, Stats
from outrider.deploy.instruments import Instrument
from outrider.deploy.rules import make_rules

from .snapshots import METHODS, fresh, serve

PROMETHEUS = shutil.which("prometheus")
DEADLINE_S = 60.0
WINDOW = "5m"  # longer than a test: everything is in it

# Blocks (drafted, accepted) of each draft, over and over: the acceptance of any whole number of
# them is the same, whenever Prometheus looks.
BLOCKS = {
    "lookup": [(2, 2), (2, 0), (1, 1), (2, 1)],
    "small": [(4, 4), (4, 3), (4, 1), (4, 0), (3, 2), (2, 1)],
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
        before = self.lives[-1]
        stats = copy.deepcopy(before)
        serve(stats, seed)
        for name, draft in stats.drafts.items():
            draft.counts = copy.deepcopy(before.drafts[name].counts)
            draft.methods = dict(before.drafts[name].methods)
            for drafted, accepted in BLOCKS[name] * num_periods:
                for method in METHODS[name]:
                    draft.record(method, drafted, accepted)
                    draft.spend(method, 1000.0)  # which nothing can pay for
        self.lives[-1] = stats

    def restart(self) -> None:
        self.lives.append(fresh())


def truth(
    instrument: Instrument, coordinators: Iterable[Coordinator]
) -> dict[tuple[str, ...], float]:
    total: dict[tuple[str, ...], float] = defaultdict(float)
    for coordinator in coordinators:
        for life in coordinator.lives:
            for labels, value in instrument.read(Snapshot(life, coordinator.levels)).items():
                assert not isinstance(value, Histogram)
                total[labels] += value
    return total


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

    def growth(self, name: str, labels: tuple[str, ...]) -> dict[tuple[str, ...], float]:
        """What a counter grew by in all of its samples, of all coordinators.

        As Prometheus defines it, without its guess about the time around the samples: a value
        below the one before means that the counter began again at zero.
        """
        total: dict[tuple[str, ...], float] = defaultdict(float)
        for series in self.get("query", query=f"{name}[{WINDOW}]")["result"]:
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


@contextlib.contextmanager
def running_prometheus(
    folder: Path, prefix: str, scrape_configs: list[dict[str, Any]]
) -> Iterator[Prometheus]:
    """Prometheus with the rules of this prefix, until the block is left."""
    assert PROMETHEUS is not None
    configuration = {
        "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
        "rule_files": ["rules.yml"],
        "scrape_configs": scrape_configs,
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    (folder / "rules.yml").write_text(make_rules(prefix))
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

"""What a scrape shows is what the coordinator counted."""

import math
import re
import socket
import struct
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.actors.requests import SpeculationCounts
from outrider.actors.stats import Histogram, Snapshot
from outrider.cluster.config import Settings
from outrider.cluster.errors import ConfigError, UnavailableError
from outrider.deploy.instruments import INSTRUMENTS
from outrider.deploy.metrics import MetricsServer, ReadSnapshot, render, serve_metrics
from outrider.deploy.vllm_names import VLLM_INSTRUMENTS

from .snapshots import fresh, levels, make_settings, serve, snapshot

Scraped = dict[tuple[object, ...], float]


def parse(text: str) -> Scraped:
    """Every sample by name and labels, as a Prometheus server reads it."""
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scrape(server: MetricsServer) -> Scraped:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as page:
        return parse(page.read().decode())


def key(name: str, **labels: str) -> tuple[object, ...]:
    return (f"outrider_{name}", *sorted({"model": "big", **labels}.items()))


Serve = Callable[[ReadSnapshot], MetricsServer]


@pytest.fixture
def served() -> Iterator[Serve]:
    """Serves snapshots; the server is closed after the test."""
    servers = []

    def start(read: ReadSnapshot) -> MetricsServer:
        server = serve_metrics(make_settings(), read)
        assert server is not None
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


def test_a_scrape_shows_every_instrument_with_the_snapshots_value() -> None:
    now = snapshot()
    seen = parse(render(make_settings(vllm_names=True), now).decode())
    for instrument in INSTRUMENTS + VLLM_INSTRUMENTS:
        for values, value in instrument.read(now).items():
            labels = dict(zip(instrument.labels, ("big", *values), strict=True))
            where = sorted(labels.items())
            if isinstance(value, Histogram):
                assert seen.pop((f"{instrument.name}_sum", *where)) == value.sum
                assert seen.pop((f"{instrument.name}_count", *where)) == sum(value.counts)
                for bound, count in zip(
                    (*value.bounds, math.inf), accumulate(value.counts), strict=True
                ):
                    le = str(bound).replace("inf", "+Inf")
                    place = sorted({**labels, "le": le}.items())
                    assert seen.pop((f"{instrument.name}_bucket", *place)) == count
            else:
                assert seen.pop((instrument.series, *where)) == value
    assert not seen, "and nothing else"


def test_vllms_names_are_there_only_when_asked_for() -> None:
    assert b"vllm" not in render(make_settings(), snapshot())


def bench_serve_reads(text: str) -> dict[str, float]:
    """The figures of `vllm bench serve`, which reads /metrics line by line, without a parser."""
    sums: dict[str, float] = {"drafts": 0, "drafted": 0, "accepted": 0}
    for line in map(str.strip, text.split("\n")):
        if line.startswith("vllm:spec_decode"):
            labelled, value = line.split(None, 1)
            name = labelled.split("{")[0]
            if not name.endswith("_total"):
                continue
            if "num_drafts" in name:
                sums["drafts"] += int(float(value))
            elif "num_draft_tokens" in name:
                sums["drafted"] += int(float(value))
            elif "num_accepted_tokens_per_pos" in name:
                start = line.index('position="') + len('position="')
                position = str(int(line[start : line.index('"', start)]))
                sums[position] = sums.get(position, 0) + int(float(value))
            elif "num_accepted_tokens" in name:
                sums["accepted"] += int(float(value))
    return sums


def test_vllms_benchmark_finds_our_rates_between_two_scrapes() -> None:
    settings, stats = make_settings(vllm_names=True), fresh()
    serve(stats, 1)
    before = bench_serve_reads(render(settings, Snapshot(stats, levels())).decode())
    meanwhile = fresh()
    serve(meanwhile, 2)
    serve(stats, 2)
    after = bench_serve_reads(render(settings, Snapshot(stats, levels())).decode())
    told = {name: after[name] - before[name] for name in after}
    ours = SpeculationCounts()
    for draft in meanwhile.drafts.values():
        ours.add(draft.counts)
    assert told["accepted"] / told["drafted"] == ours.num_accepted_tokens / ours.num_draft_tokens
    assert 1 + told["accepted"] / told["drafts"] == 1 + ours.num_accepted_tokens / ours.num_drafts
    for position, accepted in enumerate(ours.accepted_at):
        assert told[str(position)] == accepted
    assert told.keys() == {"drafts", "drafted", "accepted", "0", "1", "2", "3"}


def test_a_scrape_reads_the_counts_of_its_moment(served: Serve) -> None:
    stats = fresh()
    server = served(lambda: Snapshot(stats, levels()))
    assert scrape(server)[key("rounds_total", kind="plain")] == 0
    stats.rounds["plain"].num_rounds += 5
    assert scrape(server)[key("rounds_total", kind="plain")] == 5


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (UnavailableError("the coordinator has not\nstarted"), "the coordinator has not started\n"),
        (TimeoutError(), "TimeoutError\n"),
    ],
)
def test_a_scrape_of_what_cannot_be_read_gets_a_sentence_and_prints_nothing(
    served: Serve, capfd: pytest.CaptureFixture[str], error: Exception, sentence: str
) -> None:
    """A page of old numbers would look like a coordinator that idles."""
    now: list[Snapshot] = []

    def read() -> Snapshot:
        if not now:
            raise error
        return now[0]

    server = served(read)
    with httpx.Client(trust_env=False) as client:
        refused = client.get(server.url)
        assert (refused.status_code, refused.text) == (503, sentence)
        assert refused.headers["content-type"] == "text/plain; charset=utf-8"
        now.append(snapshot())
        assert client.get(server.url).status_code == 200, "and then it goes on"
    assert capfd.readouterr() == ("", "")


def test_a_scraper_that_goes_away_prints_nothing(
    served: Serve, capfd: pytest.CaptureFixture[str]
) -> None:
    server = served(snapshot)
    for sent in (b"", b"GET /metrics HTTP/1.0\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(sent)
            reset_at_close = struct.pack("ii", 1, 0)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset_at_close)
    scrape(server)
    assert capfd.readouterr() == ("", "")


def test_metrics_have_no_port_by_default() -> None:
    assert Settings.model_validate({"target": {"model": "a/b"}}).metrics.port is None
    assert serve_metrics(make_settings(port=None), snapshot) is None


def test_a_port_that_is_taken_is_one_sentence(served: Serve) -> None:
    port = served(snapshot).port
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        serve_metrics(make_settings(port=port), snapshot)


def test_a_port_is_waited_for_as_long_as_patience_lasts(served: Serve) -> None:
    before = served(snapshot)
    settings = make_settings(port=before.port)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(serve_metrics, settings, snapshot, 60)
        with pytest.raises(ConfigError, match="in use"):
            serve_metrics(settings, snapshot, 0.01)
        assert not waiting.done()
        before.close()
        server = waiting.result()
    assert server is not None and server.port == before.port
    server.close()


@pytest.mark.parametrize(
    ("host", "shown"), [("localhost", r"(127.0.0.1|\[::1\])"), ("::1", r"\[::1\]")]
)
def test_a_server_tells_where_it_is(host: str, shown: str) -> None:
    settings = Settings.model_validate(
        {"target": {"model": "a/b"}, "metrics": {"host": host, "port": 0}}
    )
    server = serve_metrics(settings, snapshot)
    assert server is not None
    assert re.fullmatch(rf"http://{shown}:{server.port}/metrics", server.url)
    assert httpx.get(server.url, trust_env=False).status_code == 200
    server.close()


def test_a_closed_server_frees_its_port() -> None:
    first = serve_metrics(make_settings(), snapshot)
    assert first is not None
    first.close()
    assert not first.thread.is_alive()
    second = serve_metrics(make_settings(port=first.port), snapshot)
    assert second is not None
    second.close()


def test_counts_add_up_in_any_split() -> None:
    blocks = [(4, 1), (2, 2), (3, 0), (5, 5), (1, 0), (4, 4)]
    whole, left, right = SpeculationCounts(), SpeculationCounts(), SpeculationCounts()
    for index, block in enumerate(blocks):
        whole.record(*block)
        (left if index % 2 else right).record(*block)
    left.add(right)
    assert left == whole
    assert whole.by_length[4] == [0, 1, 0, 0, 1]

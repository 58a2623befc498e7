"""What a scrape shows is what the coordinator counted."""

import urllib.request
from collections import Counter

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.actors.requests import SpeculationCounts
from outrider.actors.stats import DraftStats, Stats
from outrider.cluster.config import parse_settings
from outrider.cluster.errors import ConfigError
from outrider.deploy.metrics import Gauge, serve_metrics

DRAFTS = [
    {"method": "prompt_lookup", "name": "lookup", "num_speculative_tokens": 2},
    {"method": "draft_model", "name": "small", "model": "a/b", "num_speculative_tokens": 4},
]


def settings(port=0):
    return parse_settings(
        {"target": {"model": "org/big"}, "drafts": DRAFTS, "metrics": {"port": port}}
    )


def scrape(server):
    """Every sample by name and labels, as a Prometheus server reads it."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as page:
        text = page.read().decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def key(name, **labels):
    return (f"outrider_{name}", *sorted({"model": "big", **labels}.items()))


@pytest.fixture
def served():
    """Serves stats and gauges; the server is closed after the test."""
    servers = []

    def serve(stats, gauges=None):
        servers.append(serve_metrics(settings(), stats, gauges))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


def test_a_scrape_shows_every_count(served):
    lookup, small = DraftStats(), DraftStats(seconds=1.5, deaths=2)
    for drafted, accepted in ((4, 1), (2, 2), (3, 0)):
        small.counts.record(drafted, accepted)
    small.dropped.update(mismatch=3)
    small.fallbacks.update(deadline=5, dead=1)
    stats = Stats(
        rounds=7, emitted_tokens=20, prompt_tokens=30, verify_seconds=2.5,
        finished=Counter(stop=2, length=1), drafts={"lookup": lookup, "small": small},
    )  # fmt: skip
    seen = scrape(served(stats, {"num_requests_running": Gauge("Running.", lambda: 3)}))

    assert seen[key("rounds_total")] == 7
    assert seen[key("generation_tokens_total")] == 20
    assert seen[key("prompt_tokens_total")] == 30
    assert seen[key("verify_seconds_total")] == 2.5
    assert seen[key("requests_total", reason="stop")] == 2
    assert seen[key("num_requests_running")] == 3
    of_small = {"draft": "small"}
    assert seen[key("spec_decode_num_drafts_total", **of_small)] == 3
    assert seen[key("spec_decode_num_draft_tokens_total", **of_small)] == 9
    assert seen[key("spec_decode_num_accepted_tokens_total", **of_small)] == 3
    assert seen[key("draft_seconds_total", **of_small)] == 1.5
    assert seen[key("draft_deaths_total", **of_small)] == 2
    assert seen[key("dropped_proposals_total", reason="mismatch", **of_small)] == 3
    assert seen[key("fallbacks_total", reason="deadline", **of_small)] == 5
    for position, (drafted, accepted) in enumerate(zip([3, 3, 2, 1], [2, 1, 0, 0], strict=True)):
        place = {"position": str(position), **of_small}
        assert seen[key("spec_decode_num_draft_tokens_per_pos_total", **place)] == drafted
        assert seen[key("spec_decode_num_accepted_tokens_per_pos_total", **place)] == accepted


def test_positions_sum_to_the_totals(served):
    small = DraftStats()
    for drafted in range(1, 7):
        small.counts.record(drafted, drafted // 2)
    seen = scrape(served(Stats(drafts={"small": small})))
    for stem in ("draft_tokens", "accepted_tokens"):
        by_position = sum(
            value
            for (name, *labels), value in seen.items()
            if name == f"outrider_spec_decode_num_{stem}_per_pos_total"
            and ("draft", "small") in labels
        )
        total = seen[key(f"spec_decode_num_{stem}_total", draft="small")]
        assert by_position == total > 0


def test_series_of_every_draft_are_there_at_zero_before_any_request(served):
    seen = scrape(served(Stats()))
    for draft, length in (("lookup", 2), ("small", 4)):
        assert seen[key("spec_decode_num_drafts_total", draft=draft)] == 0
        for position in range(length):
            place = {"draft": draft, "position": str(position)}
            assert seen[key("spec_decode_num_accepted_tokens_per_pos_total", **place)] == 0
        too_far = {"draft": draft, "position": str(length)}
        assert key("spec_decode_num_accepted_tokens_per_pos_total", **too_far) not in seen


def test_a_scrape_reads_the_counts_of_its_moment(served):
    stats = Stats()
    server = served(stats)
    assert scrape(server)[key("rounds_total")] == 0
    stats.rounds += 5
    assert scrape(server)[key("rounds_total")] == 5


def test_metrics_are_off_without_a_port():
    assert serve_metrics(settings(port=None), Stats()) is None


def test_a_port_that_is_taken_is_one_sentence(served):
    port = served(Stats()).port
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
        serve_metrics(settings(port=port), Stats())


def test_a_closed_server_frees_its_port():
    first = serve_metrics(settings(), Stats())
    first.close()
    assert not first.thread.is_alive()
    second = serve_metrics(settings(port=first.port), Stats())
    second.close()


def test_counts_add_up_in_any_split():
    blocks = [(4, 1), (2, 2), (3, 0), (5, 5), (1, 0), (4, 4)]
    whole, left, right = SpeculationCounts(), SpeculationCounts(), SpeculationCounts()
    for index, block in enumerate(blocks):
        whole.record(*block)
        (left if index % 2 else right).record(*block)
    left.add(right)
    assert left == whole
    assert whole.by_length[4] == [0, 1, 0, 0, 1]

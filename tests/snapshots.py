"""Snapshots of coordinators that drafted at random, for tests of what is shown of them."""

import random

from outrider.actors.messages import Method
from outrider.actors.stats import DraftStats, Levels, Pool, Snapshot, Stats
from outrider.cluster.config import Settings, parse_settings
from outrider.deploy.instruments import DROP_REASONS, FALLBACK_REASONS, FINISH_REASONS

DRAFTS = {"lookup": 2, "small": 4}
METHODS: dict[str, tuple[Method, ...]] = {
    "lookup": ("prompt_lookup",),
    "small": ("string", "token"),
}


def make_settings(*, port: int | None = 0, vllm_names: bool = False, ray: bool = True) -> Settings:
    """A model "big" with both drafts."""
    lookup, small = DRAFTS.items()
    return parse_settings(
        {
            "target": {"model": "org/big"},
            "drafts": [
                {"method": "prompt_lookup", "name": lookup[0], "num_speculative_tokens": lookup[1]},
                {
                    "method": "draft_model",
                    "name": small[0],
                    "model": "a/b",
                    "num_speculative_tokens": small[1],
                },
            ],
            "metrics": {"port": port, "vllm_names": vllm_names, "ray": ray},
        }
    )


def fresh() -> Stats:
    """What a coordinator that has just started counted."""
    stats = Stats(drafts={name: DraftStats() for name in DRAFTS})
    for name, num_tokens in DRAFTS.items():
        stats.drafts[name].expect(METHODS[name], num_tokens)
    return stats


def serve(stats: Stats, seed: int, num_rounds: int = 40) -> None:
    """Count some rounds as a coordinator would."""
    coin = random.Random(seed)
    for _ in range(num_rounds):
        drafted = coin.randint(0, 4)
        rounds = stats.rounds["block" if drafted else "plain"]
        rounds.num_rounds += 1
        rounds.num_rows += 1
        rounds.seconds += 0.5
        rounds.draft_wait_seconds += 0.125
        rounds.verify_seconds += 0.25
        accepted = coin.randint(0, drafted)
        stats.record(drafted, accepted, coin.randint(1, accepted + 1))
        if not drafted:
            continue
        name = "small" if drafted > 2 else coin.choice(list(DRAFTS))
        draft, method = stats.drafts[name], coin.choice(METHODS[name])
        draft.proposals += 1
        draft.spend(method, 0.0625)
        draft.record(method, drafted, accepted)
        if coin.random() < 0.2:
            draft.proposals += 1
            draft.late += 1
            draft.dropped[coin.choice(DROP_REASONS)] += 1
        draft.salvaged += coin.random() < 0.1
        draft.fallbacks[coin.choice(FALLBACK_REASONS)] += coin.randint(1, 3)
    stats.prompt_tokens += 100
    stats.rejected += 1
    stats.rebuilds += 1
    small = stats.drafts["small"]
    small.quarantines, small.deaths = small.quarantines + 2, small.deaths + 1
    for reason in FINISH_REASONS:
        stats.finished[reason] += coin.randint(1, 5)
    for histogram in (
        stats.first_token_s, stats.inter_token_s, stats.per_output_token_s, stats.end_to_end_s,
        stats.queue_s, stats.prompt_length, stats.output_length,
    ):  # fmt: skip
        for _ in range(20):
            histogram.observe(coin.expovariate(1 / coin.choice((0.01, 1, 100, 10_000))))


def levels() -> Levels:
    """Something is held."""
    return Levels(
        waiting=2,
        max_waiting=64,
        running=3,
        rows=16,
        cached_tokens=256,
        cache_tokens=1024,
        pools={"lookup": Pool(), "small": Pool(4, 3)},
    )


def snapshot(seed: int = 0) -> Snapshot:
    """Of a coordinator that has served."""
    stats = fresh()
    serve(stats, seed)
    return Snapshot(stats, levels())

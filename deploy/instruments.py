"""Every metric in one table: what it is called, what it means, and how a snapshot tells it.

The sinks, the dashboards and the README's table follow it. Only sums and levels are shown: every
rate is a ratio of two sums, taken in PromQL. Series of what the settings name exist from the
start, at zero. Labels have few values: nothing here grows with the number of requests.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from outrider.actors.stats import FIRST_TOKEN_S, NUM_TOKENS, PER_TOKEN_S, REQUEST_S, Snapshot
from outrider.deploy.readings import (
    Reading,
    Values,
    by,
    of_drafts,
    of_drafts_by,
    of_methods,
    of_pools,
    of_positions,
    of_rounds,
    whole,
)

Kind = Literal["counter", "gauge", "histogram"]
Unit = Literal["", "s", "tokens"]

SOURCES = ("accepted", "own", "plain")
FINISH_REASONS = ("stop", "length", "abort", "error")
FALLBACK_REASONS = ("empty", "deadline", "busy", "lost", "no_draft")
DROP_REASONS = (
    "mismatch", "too_late", "no_room", "epoch", "ended", "surplus", "invalid", "pass_lost",
)  # fmt: skip


@dataclass(frozen=True)
class Instrument:
    """One metric; its first label is the model's name."""

    name: str  # without the `_total` that Prometheus wants after a counter's
    kind: Kind
    labels: tuple[str, ...]
    unit: Unit
    help: str  # one sentence
    read: Callable[[Snapshot], Values]  # by the values of all labels but the first
    buckets: tuple[float, ...] = ()  # upper bounds, of a histogram

    @property
    def series(self) -> str:
        """The name in PromQL on the prometheus-client sink; Ray's has `ray_` before it.

        Of a histogram, `_bucket`, `_sum` and `_count` follow.
        """
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _counter(name: str, unit: Unit, help: str, reading: Reading) -> Instrument:
    labels = ("model", *reading.labels)
    return Instrument(f"outrider_{name}", "counter", labels, unit, help, reading.read)


def _gauge(name: str, unit: Unit, help: str, reading: Reading) -> Instrument:
    labels = ("model", *reading.labels)
    return Instrument(f"outrider_{name}", "gauge", labels, unit, help, reading.read)


def _histogram(
    name: str, unit: Unit, help: str, buckets: tuple[float, ...], reading: Reading
) -> Instrument:
    labels = ("model", *reading.labels)
    return Instrument(f"outrider_{name}", "histogram", labels, unit, help, reading.read, buckets)


INSTRUMENTS = (
    # Speculation. The stems after `outrider_` are vLLM's, so that its queries fit.
    _counter(
        "spec_decode_num_drafts", "",
        "Blocks verified that had at least one drafted token.",
        of_methods(lambda method: method.num_drafts),
    ),
    _counter(
        "spec_decode_num_draft_tokens", "tokens",
        "Drafted tokens verified.",
        of_methods(lambda method: method.num_draft_tokens),
    ),
    _counter(
        "spec_decode_num_accepted_tokens", "tokens",
        "Drafted tokens accepted, before stop rules cut them.",
        of_methods(lambda method: method.num_accepted_tokens),
    ),
    _counter(
        "spec_decode_num_draft_tokens_per_pos", "tokens",
        "Drafted tokens verified, by their position in the block, from 0.",
        of_positions(lambda draft: draft.counts.drafted_at),
    ),
    _counter(
        "spec_decode_num_accepted_tokens_per_pos", "tokens",
        "Drafted tokens accepted, by their position in the block, from 0.",
        of_positions(lambda draft: draft.counts.accepted_at),
    ),
    # Proposals: verified or dropped, each once; fallbacks are proposals that were missing.
    _counter(
        "proposals", "",
        "Proposals that came with at least one token.",
        of_drafts(lambda draft: draft.proposals),
    ),
    _counter(
        "late_proposals", "",
        "Proposals that came after the deadline of their call.",
        of_drafts(lambda draft: draft.late),
    ),
    _counter(
        "salvaged_proposals", "",
        "Proposals cut to what still continued the tokens committed meanwhile.",
        of_drafts(lambda draft: draft.salvaged),
    ),
    _counter(
        "dropped_proposals", "",
        "Proposals that were never verified.",
        of_drafts_by("reason", DROP_REASONS, lambda draft: draft.dropped),
    ),
    _counter(
        "fallbacks", "",
        "Turns of a sequence at which this draft was asked and brought nothing in time.",
        of_drafts_by("reason", FALLBACK_REASONS, lambda draft: draft.fallbacks),
    ),
    _counter(
        "draft_calls", "",
        "Batched calls that propose.",
        of_methods(lambda method: method.num_calls),
    ),
    _counter(
        "draft_seconds", "s",
        "Time in calls that propose, as the draft measured it.",
        of_methods(lambda method: method.seconds),
    ),
    # Output.
    _counter(
        "generation_tokens", "tokens",
        "Tokens emitted: accepted from a draft, the target's own after a block, or plain.",
        by("source", SOURCES, lambda now: now.stats.emitted),
    ),
    _counter(
        "cut_tokens", "tokens",
        "Tokens decided but not emitted, because a rule ended the answer before them.",
        by("source", SOURCES, lambda now: now.stats.cut),
    ),
    _counter(
        "prompt_tokens", "tokens",
        "Tokens of the prompts of all answers.",
        whole(lambda now: now.stats.prompt_tokens),
    ),
    # Rounds by kind. What is left of their time without drafts and pass is the overhead.
    _counter(
        "rounds", "",
        "Passes of the target that came to an end.",
        of_rounds(lambda rounds: rounds.num_rounds),
    ),
    _counter(
        "round_rows", "",
        "Sequences in those passes.",
        of_rounds(lambda rounds: rounds.num_rows),
    ),
    _counter(
        "round_seconds", "s",
        "Time of whole rounds.",
        of_rounds(lambda rounds: rounds.seconds),
    ),
    _counter(
        "draft_wait_seconds", "s",
        "Time of rounds until their proposals were there or given up.",
        of_rounds(lambda rounds: rounds.draft_wait_seconds),
    ),
    _counter(
        "verify_seconds", "s",
        "Time in passes, as the target measured it.",
        of_rounds(lambda rounds: rounds.verify_seconds),
    ),
    # Health.
    _counter(
        "requests", "",
        "Answers that ended.",
        by("reason", FINISH_REASONS, lambda now: now.stats.finished),
    ),
    _counter(
        "rejected_requests", "",
        "Answers refused because the queue was full.",
        whole(lambda now: now.stats.rejected),
    ),
    _counter(
        "draft_quarantines", "",
        "Times a replica stopped answering and left its pool.",
        of_drafts(lambda draft: draft.quarantines),
    ),
    _counter(
        "draft_deaths", "",
        "Replicas given up for lost, for which another is made.",
        of_drafts(lambda draft: draft.deaths),
    ),
    _counter(
        "target_rebuilds", "",
        "Times the target was lost and had to be made anew.",
        whole(lambda now: now.stats.rebuilds),
    ),
    _gauge(
        "target_ready", "",
        "Whether the target is loaded and answers: 1, or 0 while it is lost.",
        whole(lambda now: int(now.levels.is_ready)),
    ),
    _gauge(
        "draft_replicas", "",
        "Replicas configured.",
        of_pools(lambda pool: pool.size),
    ),
    _gauge(
        "draft_replicas_living", "",
        "Replicas that answer.",
        of_pools(lambda pool: pool.living),
    ),
    _gauge(
        "num_requests_running", "",
        "Answers in the making, each in a row of the cache.",
        whole(lambda now: now.levels.running),
    ),
    _gauge(
        "num_requests_waiting", "",
        "Answers that wait for a row.",
        whole(lambda now: now.levels.waiting),
    ),
    _gauge(
        "max_requests_waiting", "",
        "Answers that may wait; more are refused.",
        whole(lambda now: now.levels.max_waiting),
    ),
    _gauge(
        "cache_rows", "",
        "Rows of the target's cache.",
        whole(lambda now: now.levels.rows),
    ),
    _gauge(
        "cache_rows_used", "",
        "Rows in use.",
        whole(lambda now: now.levels.running),
    ),
    _gauge(
        "cache_tokens", "tokens",
        "Tokens that all rows could hold.",
        whole(lambda now: now.levels.cache_tokens),
    ),
    _gauge(
        "cache_tokens_used", "tokens",
        "Tokens that the rows in use hold.",
        whole(lambda now: now.levels.cached_tokens),
    ),
    # Latency, as the coordinator sees it. Whole answers are those that ended by stop or length.
    _histogram(
        "time_to_first_token_seconds", "s",
        "From a request's arrival to the first tokens of an answer.",
        FIRST_TOKEN_S,
        whole(lambda now: now.stats.first_token_s),
    ),
    _histogram(
        "inter_token_latency_seconds", "s",
        "Between two deliveries of an answer's tokens, of which each may bring several.",
        PER_TOKEN_S,
        whole(lambda now: now.stats.inter_token_s),
    ),
    _histogram(
        "request_time_per_output_token_seconds", "s",
        "Mean time between tokens of an answer: after the first delivery, over tokens less one.",
        PER_TOKEN_S,
        whole(lambda now: now.stats.per_output_token_s),
    ),
    _histogram(
        "e2e_request_latency_seconds", "s",
        "From a request's arrival to the end of an answer.",
        REQUEST_S,
        whole(lambda now: now.stats.end_to_end_s),
    ),
    _histogram(
        "request_queue_time_seconds", "s",
        "From a request's arrival until an answer got its row.",
        REQUEST_S,
        whole(lambda now: now.stats.queue_s),
    ),
    _histogram(
        "request_prompt_tokens", "tokens",
        "Length of an answer's prompt.",
        NUM_TOKENS,
        whole(lambda now: now.stats.prompt_length),
    ),
    _histogram(
        "request_generation_tokens", "tokens",
        "Length of an answer.",
        NUM_TOKENS,
        whole(lambda now: now.stats.output_length),
    ),
)  # fmt: skip

BY_NAME = {instrument.name: instrument for instrument in INSTRUMENTS}

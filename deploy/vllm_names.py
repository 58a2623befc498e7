"""The same numbers under vLLM's names and labels, for its benchmark and its dashboards.

vLLM knows one draft and no sources: series that differ only in other labels are added up.
"""

from typing import Any

from outrider.actors.stats import Snapshot
from outrider.deploy.instruments import BY_NAME, Instrument
from outrider.deploy.readings import Values

_ENGINE = "0"
_LABELS = {"position": "position", "reason": "finished_reason"}  # ours that vLLM has, and its word
_SAME = (
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
    "generation_tokens",
    "prompt_tokens",
    "num_requests_running",
    "num_requests_waiting",
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)


def _renamed(instrument: Instrument, name: str) -> Instrument:
    kept = [label for label in instrument.labels if label in _LABELS]
    places = [instrument.labels.index(label) - 1 for label in kept]

    def read(snapshot: Snapshot) -> Values:
        sums: dict[tuple[str, ...], Any] = {}
        for values, value in instrument.read(snapshot).items():
            key = (_ENGINE, *(values[place] for place in places))
            sums[key] = sums[key] + value if key in sums else value
        return sums

    labels = ("model_name", "engine", *(_LABELS[label] for label in kept))
    return Instrument(
        f"vllm:{name}",
        instrument.kind,
        labels,
        instrument.unit,
        instrument.help,
        read,
        instrument.buckets,
    )


def _cache_usage(snapshot: Snapshot) -> Values:
    levels = snapshot.levels
    return {(_ENGINE,): levels.cached_tokens / max(1, levels.cache_tokens)}


VLLM_INSTRUMENTS = (
    *(_renamed(BY_NAME[f"outrider_{name}"], name) for name in _SAME),
    _renamed(BY_NAME["outrider_requests"], "request_success"),
    Instrument(
        "vllm:kv_cache_usage_perc",
        "gauge",
        ("model_name", "engine"),
        "",
        "Share of the target's cache in use; 1 means all of it.",
        _cache_usage,
    ),
)

"""The table of instruments obeys Prometheus, shows every count, and adds up."""

import dataclasses
import re
from collections import Counter
from pathlib import Path

import pytest

from outrider.actors.stats import (
    DraftStats,
    Histogram,
    Levels,
    MethodStats,
    Pool,
    RoundStats,
    Snapshot,
    Stats,
)
from outrider.deploy.instruments import BY_NAME, INSTRUMENTS, Instrument
from outrider.deploy.vllm_names import VLLM_INSTRUMENTS

from .identities import check_draft
from .snapshots import DRAFTS, fresh, levels, serve, snapshot

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
LABELS = {"model", "draft", "method", "position", "reason", "source", "kind"}
EVERY = [*INSTRUMENTS, *VLLM_INSTRUMENTS]
by_name = pytest.mark.parametrize("instrument", EVERY, ids=lambda instrument: instrument.name)


@by_name
def test_names_labels_and_help_obey_prometheus(instrument: Instrument) -> None:
    assert re.fullmatch(r"(outrider_|vllm:)[a-z][a-z0-9_]*", instrument.name)
    assert not re.search(r"_(total|count|sum|bucket|created|info)$", instrument.name)
    assert len(set(instrument.labels)) == len(instrument.labels)
    assert all(re.fullmatch(r"[a-z][a-z0-9_]*", label) for label in instrument.labels)
    assert re.fullmatch(r"[A-Z][^.]*\.?[^.]*\.", instrument.help), "one sentence"
    assert (instrument.kind == "histogram") == bool(instrument.buckets)
    assert list(instrument.buckets) == sorted(set(instrument.buckets))
    assert all(bound > 0 for bound in instrument.buckets), "Ray refuses others"
    if "seconds" in instrument.name:
        assert instrument.unit == "s"


def test_labels_of_ours_are_bounded_and_begin_with_the_model() -> None:
    for instrument in INSTRUMENTS:
        assert instrument.labels[0] == "model"
        assert set(instrument.labels) <= LABELS
    for instrument in VLLM_INSTRUMENTS:
        assert instrument.labels[:2] == ("model_name", "engine")


def test_names_are_unique() -> None:
    assert max(Counter(instrument.series for instrument in EVERY).values()) == 1
    assert len(BY_NAME) == len(INSTRUMENTS)


@by_name
def test_values_fit_labels_and_kind(instrument: Instrument) -> None:
    values = instrument.read(snapshot())
    assert values
    for labels, value in values.items():
        assert len(labels) == len(instrument.labels) - 1
        assert all(isinstance(label, str) and label for label in labels)
        if isinstance(value, Histogram):
            assert instrument.kind == "histogram" and value.bounds == instrument.buckets
        else:
            assert instrument.kind != "histogram" and value >= 0


@by_name
def test_series_are_there_from_the_start_at_zero(instrument: Instrument) -> None:
    before = instrument.read(Snapshot(fresh(), levels()))
    after = instrument.read(snapshot())
    assert before.keys() == after.keys(), "nothing appears only with its first event"
    if instrument.kind == "counter":
        assert not any(before.values())
        assert any(after.values()), "and everything is counted by a coordinator that serves"


def test_every_count_has_its_instrument() -> None:
    """Changing any field of the stats changes something that is shown."""
    hidden = {"by_length"}  # each answer tells it
    for kind in (Stats, RoundStats, DraftStats, MethodStats, Levels, Pool):
        names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        for name in names - {"rounds", "drafts", "methods", "pools", "counts"} - hidden:
            source = (Path(__file__).parents[1] / "deploy/instruments.py").read_text("utf-8")
            assert re.search(rf"\.{name}\b", source), f"{kind.__name__}.{name} is never shown"


def test_counts_add_up_over_positions_methods_and_sources() -> None:
    def total(name: str) -> float:
        return sum(v for v in BY_NAME[name].read(now).values() if not isinstance(v, Histogram))

    now = snapshot()
    for draft in now.stats.drafts.values():
        check_draft(draft)
    stem = "outrider_spec_decode_num"
    accepted, drafts = total(f"{stem}_accepted_tokens"), total(f"{stem}_drafts")
    assert accepted == total(f"{stem}_accepted_tokens_per_pos") > 0
    assert total(f"{stem}_draft_tokens") == total(f"{stem}_draft_tokens_per_pos")
    emitted = BY_NAME["outrider_generation_tokens"].read(now)
    decided = accepted + drafts + now.stats.rounds["plain"].num_rows
    assert total("outrider_generation_tokens") == decided - total("outrider_cut_tokens")
    assert emitted["plain",] == now.stats.rounds["plain"].num_rows


def test_vllms_names_add_up_ours_over_drafts() -> None:
    now = snapshot()
    vllm = {instrument.name: instrument.read(now) for instrument in VLLM_INSTRUMENTS}
    counts = [draft.counts for draft in now.stats.drafts.values()]
    assert vllm["vllm:spec_decode_num_drafts"] == {("0",): sum(c.num_drafts for c in counts)}
    assert vllm["vllm:generation_tokens"] == {("0",): now.stats.emitted_tokens}
    for position in range(max(DRAFTS.values())):
        accepted = sum(c.accepted_at[position] for c in counts if position < len(c.accepted_at))
        shown = vllm["vllm:spec_decode_num_accepted_tokens_per_pos"]
        assert shown["0", str(position)] == accepted
    assert vllm["vllm:kv_cache_usage_perc"] == {("0",): 0.25}
    assert vllm["vllm:request_success"]["0", "stop"] == now.stats.finished["stop"]


def test_the_readme_has_the_table() -> None:
    begin, end = "<!-- instruments -->\n", "<!-- /instruments -->"
    table = README[README.index(begin) + len(begin) : README.index(end)]
    assert table == readme_table()


def test_counting_goes_on_from_where_it_was() -> None:
    stats = fresh()
    serve(stats, 1)
    before = {i.name: i.read(Snapshot(stats, levels())) for i in INSTRUMENTS if i.kind == "counter"}
    serve(stats, 2)
    for name, values in before.items():
        for labels, value in BY_NAME[name].read(Snapshot(stats, levels())).items():
            assert value >= values[labels]  # type: ignore[operator]


def readme_table() -> str:
    """What stands in the README, made from the instruments."""
    lines = ["| name | labels beside `model` | meaning |", "|---|---|---|"]
    for instrument in INSTRUMENTS:
        labels = ", ".join(f"`{label}`" for label in instrument.labels[1:])
        kind = " (histogram)" if instrument.kind == "histogram" else ""
        lines.append(f"| `{instrument.series}`{kind} | {labels} | {instrument.help} |")
    return "\n".join(lines) + "\n"

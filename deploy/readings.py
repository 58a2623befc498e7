"""How a snapshot tells the values of one metric: which labels it has, and a value for each.

The words in which the table of instruments is written. The first label is always the model, whose
name the sinks know.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from outrider.actors.stats import DraftStats, Histogram, MethodStats, Pool, RoundStats, Snapshot

Value = float | Histogram
Values = Mapping[tuple[str, ...], Value]  # by the values of all labels but the model


@dataclass(frozen=True)
class Reading:
    """The labels after `model`, and the values of a snapshot under them."""

    labels: tuple[str, ...]
    read: Callable[[Snapshot], Values]


def whole(pick: Callable[[Snapshot], Value]) -> Reading:
    """One value."""
    return Reading((), lambda snapshot: {(): pick(snapshot)})


def by(label: str, keys: Iterable[str], pick: Callable[[Snapshot], Mapping[str, int]]) -> Reading:
    """A value for each of `keys`, counted or not."""
    zeros = {(key,): 0 for key in keys}
    return Reading((label,), lambda snapshot: zeros | _tupled(pick(snapshot)))


def of_drafts(pick: Callable[[DraftStats], float]) -> Reading:
    """A value for each draft."""
    return _per_draft((), lambda draft: {(): pick(draft)})


def of_drafts_by(
    label: str, keys: Iterable[str], pick: Callable[[DraftStats], Mapping[str, int]]
) -> Reading:
    """A value for each draft and each of `keys`, counted or not."""
    zeros = {(key,): 0 for key in keys}
    return _per_draft((label,), lambda draft: zeros | _tupled(pick(draft)))


def of_methods(pick: Callable[[MethodStats], float]) -> Reading:
    """A value for each draft and each method that it uses."""
    return _per_draft(
        ("method",), lambda draft: {(name,): pick(method) for name, method in draft.methods.items()}
    )


def of_positions(pick: Callable[[DraftStats], list[int]]) -> Reading:
    """A value for each draft and each position of its blocks, from 0."""
    return _per_draft(
        ("position",), lambda draft: {(str(i),): count for i, count in enumerate(pick(draft))}
    )


def of_rounds(pick: Callable[[RoundStats], float]) -> Reading:
    """A value for each kind of rounds."""
    return Reading(
        ("kind",),
        lambda snapshot: {(kind,): pick(each) for kind, each in snapshot.stats.rounds.items()},
    )


def of_pools(pick: Callable[[Pool], int]) -> Reading:
    """A level for each draft."""
    return Reading(
        ("draft",),
        lambda snapshot: {(name,): pick(pool) for name, pool in snapshot.levels.pools.items()},
    )


def _per_draft(
    labels: tuple[str, ...], pick: Callable[[DraftStats], Mapping[tuple[str, ...], float]]
) -> Reading:
    def read(snapshot: Snapshot) -> Values:
        return {
            (name, *values): value
            for name, draft in snapshot.stats.drafts.items()
            for values, value in pick(draft).items()
        }

    return Reading(("draft", *labels), read)


def _tupled(counts: Mapping[str, int]) -> dict[tuple[str, ...], int]:
    return {(key,): count for key, count in counts.items()}

"""Placement: the actors a configuration needs, what each asks of Ray, and whether nodes hold them.

Pure arithmetic over settings and node descriptions; knows neither Ray nor time. A shortage is
reported only when it is certain: from what nodes have in total, never from what is free right now.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from outrider.cluster.config import DraftModelSpec, Settings

_UNITS = 10_000  # Ray counts resources in steps of 1/10,000
_NAMES = ("CPU", "GPU")


@dataclass(frozen=True, slots=True)
class Placement:
    """One actor: what it is, and what it asks of Ray."""

    role: str  # "target rank 0", "draft small 0"
    num_cpus: float
    num_gpus: float
    labels: Mapping[str, str] = field(default_factory=dict)  # Ray label selector

    @property
    def resources(self) -> dict[str, float]:
        """What the actor asks, in Ray's words, without zeros."""
        asked = {"CPU": float(self.num_cpus), "GPU": float(self.num_gpus)}
        return {name: amount for name, amount in asked.items() if amount > 0}


@dataclass(frozen=True, slots=True)
class Node:
    """One living node: its labels and everything it offers, used or not."""

    labels: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, float] = field(default_factory=dict)


def plan(settings: Settings) -> tuple[Placement, ...]:
    """Every actor that asks for resources: target ranks in order, then the drafts in file order.

    Prompt lookup is no actor; coordinator and ingress ask for nothing.
    """
    target = settings.target
    ranks = [
        Placement(f"target rank {rank}", target.num_cpus, target.num_gpus, target.labels)
        for rank in range(target.tensor_parallel_size)
    ]
    drafts = [
        Placement(f"draft {draft.name} {replica}", draft.num_cpus, draft.num_gpus, draft.labels)
        for draft in settings.drafts
        if isinstance(draft, DraftModelSpec)
        for replica in range(draft.replicas)
    ]
    return (*ranks, *drafts)


def total(placements: Iterable[Placement]) -> dict[str, float]:
    """What the actors ask together, without zeros."""
    units = _sum(placement.resources for placement in placements)
    return {name: amount / _UNITS for name, amount in units.items()}


def num_logical_cpus(settings: Settings) -> int:
    """CPUs that a Ray started for this configuration alone must have: at least 1."""
    return max(1, math.ceil(total(plan(settings)).get("CPU", 0)))


def target_bundles(settings: Settings) -> tuple[list[dict[str, float]], list[dict[str, str]]]:
    """Bundles of the target's placement group and their label selectors, one per rank.

    Both are empty when a rank asks for nothing: Ray refuses empty bundles. Bundle 0 also holds the
    coordinator, which asks for nothing.
    """
    ranks = plan(settings)[: settings.target.tensor_parallel_size]
    if not ranks[0].resources:
        return [], []
    return [rank.resources for rank in ranks], [dict(rank.labels) for rank in ranks]


def bundle_order(bundles_to_node: Mapping[int, str]) -> list[int]:
    """Bundle indices in rank order: node by node, bundle 0's node first, ascending within a node.

    Ray's PACK strategy gives bundles no order, and ranks that alternate between nodes make every
    ring of the collective cross the network (ray issues 59547, 51117).
    """
    first: dict[str, int] = {}
    for bundle in sorted(bundles_to_node):
        first.setdefault(bundles_to_node[bundle], bundle)
    return sorted(bundles_to_node, key=lambda bundle: (first[bundles_to_node[bundle]], bundle))


def living_nodes(records: Iterable[Mapping[str, object]]) -> tuple[Node, ...]:
    """Nodes from the records of `ray.nodes()`; dead ones are left out."""
    return tuple(
        Node(
            labels=dict(cast(Mapping[str, str], record.get("Labels") or {})),
            resources=dict(cast(Mapping[str, float], record.get("Resources") or {})),
        )
        for record in records
        if record.get("Alive", True)
    )


def shortage(placements: Iterable[Placement], nodes: Sequence[Node]) -> str | None:
    """One sentence on what can never be placed on `nodes`, or None when nothing is provably wrong.

    Three proofs are tried: an actor that fits no node; more actors of one kind than the nodes have
    room for; actors that together ask for more than all the nodes they may use offer.
    """
    actors = tuple(placements)
    kinds: dict[object, list[Placement]] = {}
    for actor in actors:
        kind = (frozenset(actor.resources.items()), frozenset(actor.labels.items()))
        kinds.setdefault(kind, []).append(actor)
    for alike in kinds.values():
        if sentence := _shortage_of_kind(alike, nodes):
            return sentence
    return _shortage_together(actors, nodes)


def _shortage_of_kind(alike: Sequence[Placement], nodes: Sequence[Node]) -> str | None:
    actor = alike[0]
    matching = [node for node in nodes if _matches(actor.labels, node)]
    if not matching:
        reason = _unmatched(actor.labels, nodes)
        return f"{actor.role} cannot be placed: it asks for {_ask(actor)}, but {reason}"
    asked = +_units(actor.resources)  # + drops what Ray rounds to nothing
    if not asked:
        return None
    offers = [_units(node.resources) for node in matching]
    room = sum(min(offer[name] // units for name, units in asked.items()) for offer in offers)
    if room >= len(alike):
        return None
    need = f"it asks for {_ask(actor)}"
    if room > 0:
        need = f"{len(alike)} actors ask for {_ask(actor)} each and {room} would fit"
    return f"{alike[room].role} cannot be placed: {need}, but {_offer(matching, actor.labels)}"


def _shortage_together(actors: Sequence[Placement], nodes: Sequence[Node]) -> str | None:
    homes = [
        frozenset(index for index, node in enumerate(nodes) if _matches(actor.labels, node))
        for actor in actors
    ]
    for allowed in dict.fromkeys(homes):
        confined = [actor for actor, home in zip(actors, homes, strict=True) if home <= allowed]
        available = [nodes[index] for index in sorted(allowed)]
        asked = _sum(actor.resources for actor in confined)
        offered = _sum(node.resources for node in available)
        if any(units > offered[name] for name, units in asked.items()):
            roles = ", ".join(actor.role for actor in confined)
            labels = next(
                a.labels for a, home in zip(actors, homes, strict=True) if home == allowed
            )
            return (
                f"{roles} cannot be placed together: they ask for {_amounts(total(confined))}, "
                f"but {_offer(available, labels)}"
            )
    return None


def _matches(selector: Mapping[str, str], node: Node) -> bool:
    """Apply Ray's label selectors: `value`, `!value`, `in(a, b)`, `!in(a, b)`."""
    for key, condition in selector.items():
        wanted = condition.removeprefix("!")
        listed = wanted[3:-1].split(",") if wanted.startswith("in(") else [wanted]
        is_among = node.labels.get(key) in {value.strip() for value in listed}
        if is_among == condition.startswith("!"):  # a missing label satisfies a negation
            return False
    return True


def _units(resources: Mapping[str, float]) -> Counter[str]:
    return Counter({name: round(amount * _UNITS) for name, amount in resources.items()})


def _sum(resources: Iterable[Mapping[str, float]]) -> Counter[str]:
    units: Counter[str] = Counter()
    for one in resources:
        units.update(_units(one))
    return units


def _ask(actor: Placement) -> str:
    where = f" on a node with {_labels(actor.labels)}" if actor.labels else ""
    return _amounts(actor.resources) + where


def _offer(nodes: Sequence[Node], labels: Mapping[str, str]) -> str:
    alike = Counter(
        _amounts({name: node.resources.get(name, 0) for name in _NAMES}) for node in nodes
    )
    offers = " and ".join(
        f"{count} node{'s' * (count > 1)} with {amounts}" for amounts, count in alike.items()
    )
    return f"what is there{f' with {_labels(labels)}' if labels else ''} is {offers}"


def _unmatched(labels: Mapping[str, str], nodes: Sequence[Node]) -> str:
    if not nodes:
        return "there is no living node"
    absent = {
        key: condition
        for key, condition in labels.items()
        if not any(_matches({key: condition}, node) for node in nodes)
    }
    seen = {f"{key}={node.labels[key]}" for node in nodes for key in labels if key in node.labels}
    found = f"the nodes have {', '.join(sorted(seen))}" if seen else "no node has any such label"
    return f"no node has {_labels(absent or labels)} ({found})"


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={condition}" for key, condition in labels.items())


def _amounts(resources: Mapping[str, float]) -> str:
    said = [
        f"{resources[name]:g} {name}{'s' * (resources[name] != 1)}"
        for name in _NAMES
        if resources.get(name)
    ]
    return " and ".join(said) or "no CPU or GPU"

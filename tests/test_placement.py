"""Placement: what is asked of Ray, and that a shortage is reported exactly when it is certain."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cluster.config import Settings, parse_settings
from outrider.cluster.placement import (
    Node,
    Placement,
    bundle_order,
    living_nodes,
    num_logical_cpus,
    plan,
    shortage,
    target_bundles,
    total,
)


def settings(target: dict[str, object] | None = None, *drafts: dict[str, object]) -> Settings:
    target = {"model": "/models/big", "num_cpus": 0.5, **(target or {})}
    return parse_settings({"target": target, "drafts": list(drafts)})


def node(cpus: float = 0, gpus: float = 0, **labels: str) -> Node:
    return Node(labels, {"CPU": cpus, "GPU": gpus})


def neural(name: str = "small", **keys: object) -> dict[str, object]:
    return {"name": name, "method": "draft_model", "model": "/models/small", **keys}


def test_plan_has_one_entry_per_rank_and_replica_and_none_for_prompt_lookup() -> None:
    chosen = settings(
        {"tensor_parallel_size": 2, "num_gpus": 1, "labels": {"pool": "target"}},
        {"name": "lookup", "method": "prompt_lookup"},
        neural(replicas=2, num_cpus=1, num_gpus=0.25, labels={"pool": "draft"}),
    )
    assert plan(chosen) == (
        Placement("target rank 0", 0.5, 1, {"pool": "target"}),
        Placement("target rank 1", 0.5, 1, {"pool": "target"}),
        Placement("draft small 0", 1, 0.25, {"pool": "draft"}),
        Placement("draft small 1", 1, 0.25, {"pool": "draft"}),
    )
    assert total(plan(chosen)) == {"CPU": 3, "GPU": 2.5}


def test_zero_resources_are_never_named() -> None:
    assert Placement("x", 0, 1).resources == {"GPU": 1}
    assert Placement("x", 0, 0).resources == {}
    assert target_bundles(settings({"num_cpus": 0, "labels": {"pool": "a"}})) == ([], [])


def test_target_bundles_hold_the_ranks_alone_with_their_labels() -> None:
    chosen = settings({"tensor_parallel_size": 2, "num_gpus": 1, "labels": {"a": "b"}}, neural())
    assert target_bundles(chosen) == ([{"CPU": 0.5, "GPU": 1}] * 2, [{"a": "b"}] * 2)
    assert target_bundles(settings({"num_gpus": 0})) == ([{"CPU": 0.5}], [{}])


@pytest.mark.parametrize(
    ("target_cpus", "draft_cpus", "replicas", "expected"),
    [(0, 0, 1, 1), (0.5, 0.5, 1, 1), (0.5, 0.5, 2, 2), (0.7, 0.1, 3, 1), (1, 0.1, 10, 2)],
)
def test_a_local_ray_gets_the_cpus_of_the_plan_rounded_up_once(
    target_cpus: float, draft_cpus: float, replicas: int, expected: int
) -> None:
    chosen = settings({"num_cpus": target_cpus}, neural(num_cpus=draft_cpus, replicas=replicas))
    assert num_logical_cpus(chosen) == expected


def test_bundle_order_keeps_nodes_together_and_starts_with_bundle_zero() -> None:
    assert bundle_order({0: "b", 1: "a", 2: "b", 3: "a"}) == [0, 2, 1, 3]
    assert bundle_order({3: "a", 2: "c", 1: "c", 0: "z"}) == [0, 1, 2, 3]
    assert bundle_order({}) == []


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=8))
def test_bundle_order_is_a_permutation_contiguous_per_node(nodes: list[str]) -> None:
    order = bundle_order(dict(enumerate(nodes)))
    assert sorted(order) == list(range(len(nodes)))
    assert order[0] == 0
    runs = [list(run) for _, run in itertools.groupby(order, key=lambda bundle: nodes[bundle])]
    assert len(runs) == len(set(nodes))
    assert all(run == sorted(run) for run in runs)


def test_a_gpu_that_nobody_has_is_told_with_actor_ask_and_offer() -> None:
    sentence = shortage(plan(settings({"num_gpus": 1})), [node(2), node(2)])
    assert sentence == (
        "target rank 0 cannot be placed: it asks for 0.5 CPUs and 1 GPU, "
        "but what is there is 2 nodes with 2 CPUs"
    )


def test_labels_that_match_no_node_are_named() -> None:
    wanted = {"ray.io/accelerator-type": "A100", "zone": "eu"}
    actors = [Placement("target rank 0", 1, 0, wanted)]
    nodes = [Node({"ray.io/accelerator-type": "L4", "zone": "eu"}, {"CPU": 8})]
    assert shortage(actors, nodes) == (
        "target rank 0 cannot be placed: it asks for 1 CPU on a node with "
        "ray.io/accelerator-type=A100, zone=eu, but no node has ray.io/accelerator-type=A100 "
        "(the nodes have ray.io/accelerator-type=L4, zone=eu)"
    )
    assert "no node has pool=x (no node has any such label)" in str(
        shortage([Placement("draft a 0", 0, 0, {"pool": "x"})], [node(1)])
    )
    assert "there is no living node" in str(shortage([Placement("draft a 0", 1, 0)], []))


def test_too_many_actors_of_one_kind_name_the_first_that_has_no_room() -> None:
    actors = [Placement(f"target rank {rank}", 0, 1) for rank in range(3)]
    sentence = shortage(actors, [node(8, 1), node(8, 1)])
    assert sentence is not None
    assert sentence.startswith("target rank 2 cannot be placed: 3 actors ask for 1 GPU each")
    assert shortage(actors, [node(8, 1), node(8, 2)]) is None


def test_fragments_of_nodes_do_not_add_up_to_one_actor() -> None:
    assert shortage([Placement("target rank 0", 2, 0)], [node(1), node(1)]) is not None


def test_different_actors_that_fit_alone_but_not_together_are_told() -> None:
    actors = [Placement("target rank 0", 2, 0), Placement("draft small 0", 1, 0)]
    sentence = shortage(actors, [node(2)])
    assert sentence == (
        "target rank 0, draft small 0 cannot be placed together: they ask for 3 CPUs, "
        "but what is there is 1 node with 2 CPUs"
    )
    assert shortage(actors, [node(3)]) is None


def test_actors_confined_by_labels_are_summed_over_their_own_nodes() -> None:
    both = [Placement("a", 2, 0, {"pool": "x"}), Placement("b", 1, 0, {"pool": "x"})]
    assert shortage(both, [node(2, pool="x"), node(9, pool="y")]) is not None
    assert shortage([both[0], Placement("b", 1, 0)], [node(2, pool="x"), node(9)]) is None


@pytest.mark.parametrize(
    ("condition", "value", "fits"),
    [
        ("A100", "A100", True),
        ("A100", "L4", False),
        ("A100", None, False),
        ("!A100", "L4", True),
        ("!A100", None, True),
        ("!A100", "A100", False),
        ("in(A100, H100)", "H100", True),
        ("in(A100,H100)", "L4", False),
        ("!in(A100,H100)", "H100", False),
        ("!in(A100,H100)", None, True),
    ],
)
def test_label_conditions_mean_what_they_mean_to_ray(
    condition: str, value: str | None, fits: bool
) -> None:
    labels = {} if value is None else {"gpu": value}
    sentence = shortage([Placement("a", 1, 0, {"gpu": condition})], [node(1, **labels)])
    assert (sentence is None) == fits


def test_an_ask_below_rays_resolution_fits_anywhere() -> None:
    assert shortage([Placement("a", 0.00001, 0)], [node(1)]) is None


def test_tenths_add_up_without_rounding_errors() -> None:
    actors = [Placement(f"draft small {i}", 0.1, 0) for i in range(10)]
    assert shortage(actors, [node(1)]) is None
    assert shortage([*actors, Placement("one more", 0.1, 0)], [node(1)]) is not None


resources = st.tuples(st.integers(0, 3), st.integers(0, 2))


@given(
    st.lists(st.tuples(resources, st.sampled_from(["", "x", "y"])), max_size=4),
    st.lists(st.tuples(resources, st.sampled_from(["x", "y"])), max_size=3),
)
def test_a_shortage_is_never_claimed_when_some_assignment_works(
    asks: list[tuple[tuple[int, int], str]], offers: list[tuple[tuple[int, int], str]]
) -> None:
    actors = [
        Placement(f"a{i}", cpus, gpus, {"pool": pool} if pool else {})
        for i, ((cpus, gpus), pool) in enumerate(asks)
    ]
    nodes = [node(cpus, gpus, pool=pool) for (cpus, gpus), pool in offers]

    def works(assignment: tuple[int, ...]) -> bool:
        left = [list(offer) for offer, _ in offers]
        for ((cpus, gpus), pool), home in zip(asks, assignment, strict=True):
            left[home][0] -= cpus
            left[home][1] -= gpus
            if pool not in ("", offers[home][1]):
                return False
        return all(amount >= 0 for pair in left for amount in pair)

    possible = any(map(works, itertools.product(range(len(nodes)), repeat=len(actors))))
    sentence = shortage(actors, nodes)
    assert sentence is None or not possible


def test_dead_nodes_offer_nothing() -> None:
    records = [
        {"Alive": True, "Labels": {"a": "b"}, "Resources": {"CPU": 2.0, "memory": 1.0}},
        {"Alive": False, "Labels": {}, "Resources": {"CPU": 64.0}},
        {"Alive": True, "Resources": {}},
    ]
    assert living_nodes(records) == (Node({"a": "b"}, {"CPU": 2.0, "memory": 1.0}), Node())

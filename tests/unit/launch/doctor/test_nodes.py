"""One report about several nodes, and the node that differs."""

from __future__ import annotations

import json

import pytest
import torch.distributed as dist

from megatron_wrap.errors import PlatformError
from megatron_wrap.launch.doctor.checks import Answer, NodeAnswers, merged
from megatron_wrap.parallel import nodes
from megatron_wrap.parallel.nodes import Node, check_versions, differing_indices


def test_the_node_that_differs_is_named() -> None:
    answers = [
        NodeAnswers(f"node {index} (host{index})", [Answer("torch", version, "ok", "error")])
        for index, version in enumerate(["2.13", "2.13", "2.12", "2.13"])
    ]
    assert [tuple(item) for item in merged(answers)] == [
        ("error", "torch", "node 2 (host2) has 2.12, the others 2.13; install the same on all")
    ]
    assert [tuple(item) for item in merged(answers[:2])] == [("ok", "torch", "2.13")]
    assert differing_indices(["a", "b"]) == [0, 1]
    assert differing_indices(["a", "a", "b", "b"]) == [0, 1, 2, 3]
    assert differing_indices(["a"]) == []


def test_only_the_nodes_with_an_error_are_named() -> None:
    good, bad = Answer("open files", "a process may open 20,000", "ok"), Answer("open files", "too few", "error")
    of_nodes = [NodeAnswers("node 0", [good]), NodeAnswers("node 1", [bad]), NodeAnswers("node 2", [bad])]
    assert [tuple(item) for item in merged(of_nodes)] == [("error", "open files", "node 1, node 2: too few")]
    assert [tuple(item) for item in merged(of_nodes[1:])] == [("error", "open files", "too few")]
    assert [tuple(item) for item in merged(of_nodes[1:2])] == [("error", "open files", "too few")]


def test_measurements_may_differ() -> None:
    speeds = [NodeAnswers(f"node {index}", [Answer("write speed", f"{index} GB/s", "ok")]) for index in range(6)]
    (item,) = merged(speeds)
    assert item.status == "ok"
    assert item.text.startswith("node 0: 0 GB/s; node 1: 1 GB/s")
    assert item.text.endswith("2 more nodes")


def test_a_run_does_not_begin_on_nodes_with_different_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every process raises; here one after the other, as node 0 is the last to come."""
    store, versions = dist.HashStore(), nodes.installed_versions()
    for index, core in ((1, "0.15.0"), (2, versions["Megatron-Core"])):
        store.set(f"versions/{index}", json.dumps([f"node {index} (b)", {**versions, "Megatron-Core": core}]))
    for rank in (0, 1):
        with pytest.raises(PlatformError, match=r"of Megatron-Core: node 1 \(b\) has 0\.15\.0, the others "):
            check_versions(store, rank, Node(rank, 3, rank))
    check_versions(store, 0, Node(0, 1, 0))


def test_nodes_with_the_same_packages_begin() -> None:
    store = dist.HashStore()
    store.set("versions/1", json.dumps(["node 1 (b)", nodes.installed_versions()]))
    check_versions(store, 0, Node(0, 2, 0))

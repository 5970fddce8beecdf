"""The nodes of a run, and whether they have the same packages."""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from megatron_wrap.errors import PlatformError
from megatron_wrap.platform.base.machine import installed_versions

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True)
class Node:
    """The node of this process among those of the run, from torchrun's environment."""

    index: int
    count: int
    local_rank: int

    @property
    def name(self) -> str:
        """Index and host of the node."""
        return f"node {self.index} ({socket.gethostname()})"


def this_node() -> Node:
    """The node of this process; the only one without torchrun."""
    values = (int(os.environ.get(name, default)) for name, default in _VARIABLES.items())
    return Node(*values)


_VARIABLES = {"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "LOCAL_RANK": "0"}


def differing_indices(values: Sequence[T]) -> list[int]:
    """Indices of the values that differ from the value of more than half of them; all indices if no value has such a
    majority."""
    (most, count), *others = Counter(values).most_common()
    if not others:
        return []
    return [index for index, value in enumerate(values) if value != most or 2 * count <= len(values)]


def check_versions(store: dist.Store, rank: int, node: Node) -> None:
    """Compare the packages of all nodes; called on every rank, before the processes connect.

    Raises:
        PlatformError: on every rank, if a node has another version than the others.
    """
    if node.count == 1:
        return
    if node.local_rank == 0:
        store.set(f"versions/{node.index}", json.dumps([node.name, installed_versions()]))
    if rank == 0:
        of_nodes = [json.loads(store.get(f"versions/{index}")) for index in range(node.count)]
        store.set("versions", _differences(*zip(*of_nodes, strict=True)))
    differences = store.get("versions").decode()
    if differences:
        raise PlatformError(differences)


def _differences(nodes: Sequence[str], versions: Sequence[Mapping[str, str | None]]) -> str:
    """The sentence about the first package of which the nodes have different versions; empty: there is none."""
    for package in versions[0]:
        difference = difference_of(nodes, [of_node.get(package) for of_node in versions])
        if difference is not None:
            return f"the nodes have different versions of {package}: {difference}"
    return ""


def difference_of(nodes: Sequence[str], values: Sequence[str | None]) -> str | None:
    """Text about the nodes whose value differs from that of most nodes, and what to do; None: all have the same
    value."""
    differing = differing_indices(values)
    if not differing:
        return None
    parts = [f"{nodes[index]} has {values[index] or 'none'}" for index in differing]
    if len(differing) < len(values):
        usual = next(value for index, value in enumerate(values) if index not in differing)
        parts.append(f"the other{'' if len(values) - len(differing) == 1 else 's'} {usual or 'none'}")
    return f"{', '.join(parts)}; install the same on all"

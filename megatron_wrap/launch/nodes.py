"""Nodes and processes of a run, from the command line, torchrun's variables and the configuration."""

from __future__ import annotations

import os
from dataclasses import dataclass

from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema.derived import processes_needed
from megatron_wrap.errors import LayoutError
from megatron_wrap.launch.contract import Rendezvous
from megatron_wrap.platform.base.machine import visible_gpus

MEETING_PORT = 29500
"""Port of node 0 at which the nodes meet, torchrun's default."""


@dataclass(frozen=True)
class Nodes:
    """Nodes and processes of a run, and the address at which the nodes meet."""

    processes_per_node: int
    num_nodes: int
    node_rank: int
    master_address: str
    master_port: int
    rendezvous_id: str | None = None
    """Name under which the nodes find each other by torchrun's rendezvous c10d at the address; None: the first node
    listens there, and each node knows its number."""

    @property
    def world_size(self) -> int:
        """Processes of the whole run."""
        return self.processes_per_node * self.num_nodes

    @property
    def ranks(self) -> range:
        """Global ranks of the processes of this node."""
        first = self.node_rank * self.processes_per_node
        return range(first, first + self.processes_per_node)


def nodes_of(
    config: RunConfig | None,
    processes_per_node: int | None = None,
    num_nodes: int | None = None,
    rendezvous: Rendezvous | None = None,
    *,
    starts: bool = True,
) -> Nodes:
    """Nodes and processes of a run, from the command line, else the environment, else the configuration.

    Args:
        config: the run's configuration; None: there is none, and the default is a process for each GPU, or one on each
            node.
        processes_per_node, num_nodes, rendezvous: values of the command line.
        starts: whether the processes will be started; False: they are only counted.

    Raises:
        LayoutError: a variable is missing, or is not a whole number.
    """
    num_nodes = num_nodes or _integer("NNODES", (config and config.launch.nodes) or 1)
    gpus = visible_gpus() if config is None or config.init.platform != "cpu" else 0
    fewest = 1 if config is None else -(-processes_needed(config) // num_nodes)
    default = (config and config.launch.gpus_per_node) or gpus or fewest
    address, port = _variable("MASTER_ADDR"), _integer("MASTER_PORT", 0)
    if rendezvous is not None:
        address, port = rendezvous.address()
    # as for torchrun, node 0 needs no number where it names its own address
    if starts and num_nodes > 1 and (not address or (rendezvous is not None and not _variable("NODE_RANK"))):
        raise LayoutError(
            f"the run has {num_nodes} nodes; on each, set MASTER_ADDR (and MASTER_PORT) to those of node 0, or give "
            "--rdzv-endpoint HOST:PORT, and set NODE_RANK to the number of the node"
        )
    return Nodes(
        processes_per_node=processes_per_node or _integer("GPUS_PER_NODE", default),
        num_nodes=num_nodes,
        node_rank=_integer("NODE_RANK", 0),
        master_address=address or "127.0.0.1",
        master_port=port,
        rendezvous_id=None if rendezvous is None else rendezvous.id,
    )


_PREFIXED = {"GPUS_PER_NODE": "PET_NPROC_PER_NODE"}
"""Variable -> torchrun's own name of it; the own names of other variables are PET_NNODES, PET_NODE_RANK, ..."""


def _variable(name: str) -> str:
    """The value of a variable, else of torchrun's own one, which Kubeflow Trainer sets in pods; empty: neither is
    set."""
    return os.environ.get(name) or os.environ.get(_PREFIXED.get(name, f"PET_{name}"), "")


def _integer(variable: str, default: int) -> int:
    text = _variable(variable)
    if not text:
        return default
    if not text.isdigit() or (variable in ("GPUS_PER_NODE", "NNODES") and int(text) < 1):
        raise LayoutError(f"environment variable {variable} is {text!r}; it must be a whole number")
    return int(text)

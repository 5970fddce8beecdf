"""The interface of the programs that start a run (torchrun's agent, Ray, the schedulers of clusters), and the nodes and
processes of a run."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema.derived import processes_needed
from megatron_wrap.errors import LayoutError
from megatron_wrap.platform.base.machine import visible_gpus

LAUNCHED_BY = "MEGATRON_WRAP_LAUNCHER"
"""Environment variable: name of the launcher whose job runs `megatron-wrap ... --launcher local` on this node."""


@dataclass(frozen=True)
class Program:
    """The work of each process of a run: a script, or a function of this package."""

    words: tuple[str, ...]
    """Arguments of the program."""
    script: str | None = None
    """Path of the user's script, run as `__main__`; None: examples/train.py, unless there is a function."""
    function: Callable[..., None] | None = None
    """Function that is imported by its name and called with the words; None: a script runs."""


@dataclass(frozen=True)
class Rendezvous:
    """Torchrun's rendezvous c10d, by which the nodes of a run find each other."""

    endpoint: str
    """HOST:PORT of the first node."""
    id: str = "megatron-wrap"
    """Name of the run at that address."""

    def address(self) -> tuple[str, int]:
        """(host, port) of the endpoint.

        Raises:
            LayoutError: the endpoint is not HOST:PORT.
        """
        host, _, port = self.endpoint.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 2**16:
            raise LayoutError(f"--rdzv-endpoint {self.endpoint}: must be HOST:PORT of the first node")
        return host, int(port)


@dataclass(frozen=True)
class Launch:
    """A run to be started."""

    config: RunConfig
    command: tuple[str, ...]
    """Arguments of `megatron-wrap` without those of launchers, which start the same run elsewhere."""
    program: Program
    num_nodes: int | None = None
    """Number of nodes on the command line; None: not given."""
    processes_per_node: int | None = None
    """Number of processes on each node on the command line; None: not given."""
    rendezvous: Rendezvous | None = None
    """Rendezvous on the command line, for the processes of this node only; None: not given."""

    def layout(self) -> tuple[int, int]:
        """(nodes, processes on each node) where torchrun's environment is not read: from the command line, else the
        configuration, else the fewest that can run it."""
        nodes = self.num_nodes or self.config.launch.nodes or 1
        per_node = self.processes_per_node or self.config.launch.gpus_per_node
        return nodes, per_node or -(-processes_needed(self.config) // nodes)


class Ended(NamedTuple):
    """The end of a run."""

    exit_code: int
    finished: bool
    """Whether the run did all that it was asked for, and this command shows what to do next."""


class Job(Protocol):
    """A run that is started, or will be started by `wait`."""

    @property
    def announcement(self) -> str:
        """Name of the submitted job, and the command that follows it; empty: the run ends with this command, which
        therefore always waits."""

    def wait(self) -> Ended:
        """Show the run's console until it ends.

        Raises:
            MegatronWrapError: an error of the user, which the run has not printed.
        """


class Launcher(Protocol):
    """Starts runs in one way."""

    def world_size(self, launch: Launch) -> int:
        """Processes of the run, over all nodes; by default those of `launch.layout()`.

        Raises:
            LayoutError: a variable of the environment is missing or wrong.
        """
        return math.prod(launch.layout())

    def preview(self, launch: Launch) -> str:
        """The command or job that `start` would run or submit; nothing is started. On Kubernetes the manifest is
        written."""

    def start(self, launch: Launch) -> Job:
        """Submit the run.

        Raises:
            MegatronWrapError: the launcher is not installed, or refuses the run.
        """


def show_from(log: Path, position: int) -> int:
    """Write what a file has after the first `position` bytes to stderr; returns the number of bytes shown so far."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(position)
        text = file.read()
        sys.stderr.buffer.write(text)
        sys.stderr.flush()
        position += len(text)
    return position


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

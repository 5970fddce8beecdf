"""The interface of the programs that start a run: torchrun's agent, Ray and the schedulers of clusters."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema.derived import processes_needed
from megatron_wrap.errors import LayoutError

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

"""`--launcher local`: the processes of a run on this node, under torchrun's agent."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from megatron_wrap.config import RunConfig
from megatron_wrap.launch.agent import LauncherSignals, launch_processes, python_call, python_statement
from megatron_wrap.launch.doctor.checks import Subject
from megatron_wrap.launch.doctor.node import quick_answers
from megatron_wrap.launch.interface import MEETING_PORT, Ended, Launch, Nodes, Program, nodes_of
from megatron_wrap.metrics.number_format import counted

_RUN_FILE = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
"""Program that runs a file with the working directory on sys.path, as `python -m` does, so that it can import
my_module:MyFlow."""


def warn_about_node(config: RunConfig, nodes: Nodes) -> None:
    """Print the warnings about this node, before a run is started on it.

    Raises:
        PlatformError: the run cannot succeed here.
    """
    subject = Subject(config, nodes.processes_per_node, nodes.world_size, nodes.num_nodes)
    for warning in quick_answers(subject):
        sys.stderr.write(f"warning: {warning.name}: {warning.text}\n")


class LocalLauncher:
    """Starts torchrun's agent on this node. With several nodes, the agents find each other by torchrun's variables."""

    def world_size(self, launch: Launch) -> int:
        """See `Launcher`; the address of the first node may still be missing."""
        return _nodes(launch, starts=False).world_size

    def preview(self, launch: Launch) -> str:
        """The command of torchrun that starts the same processes."""
        nodes, program = _nodes(launch), launch.program
        where = ["--standalone"]
        if nodes.num_nodes > 1:
            address = f"--master-addr {nodes.master_address} --master-port {nodes.master_port or MEETING_PORT}"
            if nodes.rendezvous_id is not None:
                address = f"--rdzv-backend c10d --rdzv-endpoint {nodes.master_address}:{nodes.master_port}"
                address += f" --rdzv-id {nodes.rendezvous_id}"
            where = [f"--nnodes {nodes.num_nodes} --node-rank {nodes.node_rank} {address}"]
        if program.function is not None:
            processes = counted(nodes.processes_per_node, "process")
            return f"megatron-wrap {shlex.join(launch.command)}, in {processes} on this node"
        words = shlex.join([program.script or str(_default_script()), *program.words])
        return " ".join(["torchrun", *where, f"--nproc-per-node {nodes.processes_per_node}", words])

    def start(self, launch: Launch) -> LocalJob:
        """See `Launcher`; prints warnings about this node.

        Raises:
            PlatformError: the run cannot succeed on this node.
        """
        nodes = _nodes(launch)
        warn_about_node(launch.config, nodes)
        return LocalJob(launch, nodes)


class LocalJob:
    """A run of which this process is torchrun's agent."""

    announcement = ""

    def __init__(self, launch: Launch, nodes: Nodes) -> None:
        self._launch, self._nodes = launch, nodes

    def wait(self) -> Ended:
        """See `Job`."""
        config, nodes = self._launch.config, self._nodes
        program, own_exit_codes = _python_arguments(self._launch.program), self._launch.program.script is not None
        with LauncherSignals(config.train.stop_within_seconds) as signals:
            exit_code = launch_processes(nodes, program, config, signals, own_exit_codes=own_exit_codes)
            return Ended(exit_code, exit_code == 0 and not signals.stopped and nodes.node_rank == 0)


def _nodes(launch: Launch, starts: bool = True) -> Nodes:
    return nodes_of(launch.config, launch.processes_per_node, launch.num_nodes, launch.rendezvous, starts=starts)


def _python_arguments(program: Program) -> list[str]:
    if program.function is not None:
        return [*python_call(program.function), *program.words]
    if program.script is not None:
        return [program.script, *program.words]
    return [*python_statement(_RUN_FILE), str(_default_script()), *program.words]


def _default_script() -> Path:
    """examples/train.py of the installed package; in a checkout, the file next to the package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "examples" / "train.py"
    return installed if installed.is_file() else package.parent / "examples" / "train.py"

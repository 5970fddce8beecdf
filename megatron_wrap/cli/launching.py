"""Arguments of the commands that start runs, and their use of launchers."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import get_args, get_type_hints

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.cli.arguments import count
from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema.launch import LaunchConfig
from megatron_wrap.core.local_copies import with_local_copies
from megatron_wrap.hidden_secrets import hide_secrets
from megatron_wrap.launch.interface import LAUNCHED_BY, Ended, Launch, Launcher, Program, Rendezvous
from megatron_wrap.launch.local import LocalLauncher


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what starts the processes and how many there are, and describes torchrun's variables."""
    parser.add_argument(
        "--launcher",
        choices=get_args(get_type_hints(LaunchConfig)["launcher"]),
        help="what starts the processes (docs/cluster.md; default: megatron_wrap.launch.common.launcher)",
    )
    parser.add_argument("--nodes", type=count, metavar="N", help="number of nodes (default: 1)")
    parser.add_argument(
        "--gpus-per-node",
        "--nproc-per-node",
        type=count,
        metavar="G",
        help="processes on each node (default: one per GPU; without GPUs as many as the layout needs)",
    )
    parser.add_argument(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="with --launcher local on several nodes: the first node, where they find each other by torchrun's "
        "rendezvous c10d (instead of MASTER_ADDR)",
    )
    parser.add_argument("--rdzv-id", metavar="ID", help="name of the run at that address (default: megatron-wrap)")
    parser.add_argument_group(
        "environment of --launcher local",
        "GPUS_PER_NODE  the same as --gpus-per-node, which precedes it\n"
        "NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT  of a run on several nodes, as for torchrun",
    )


def add_start_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares --dry-run and --wait."""
    parser.add_argument("--dry-run", action="store_true", help="check the run, and print what would be started")
    parser.add_argument(
        "--wait",
        action="store_true",
        help="follow a submitted job to its end, and exit with its code; other launchers always do",
    )


def launcher_of(config: RunConfig, arguments: argparse.Namespace) -> Launcher:
    """The launcher that the command line selects, else the one of the configuration."""
    name = _launcher_name(config, arguments)
    if name == "ray":
        from megatron_wrap.launch.ray import RayLauncher

        return RayLauncher()
    if name == "kubernetes":
        from megatron_wrap.launch.kubernetes import KubernetesLauncher

        return KubernetesLauncher()
    if name == "slurm":
        from megatron_wrap.launch.slurm import SlurmLauncher

        return SlurmLauncher()
    return LocalLauncher()


def _launcher_name(config: RunConfig, arguments: argparse.Namespace) -> str:
    return str(arguments.launcher or config.launch.launcher)


def shares_files(config: RunConfig, arguments: argparse.Namespace) -> bool:
    """Whether the processes see the files of this machine; pods see only the files of their image and their volumes."""
    return _launcher_name(config, arguments) != "kubernetes"


def read_for_launch(arguments: argparse.Namespace, overrides: Sequence[str]) -> RunConfig:
    """The run's configuration, with local copies of its remote files where the processes would see them.

    Raises:
        MegatronWrapError: the configuration cannot be read, or a file cannot be copied.
    """
    config = read_run(arguments.config, overrides)
    return with_local_copies(config) if shares_files(config, arguments) else config


def rendezvous_of(arguments: argparse.Namespace) -> Rendezvous | None:
    """The rendezvous of --rdzv-endpoint and --rdzv-id; None without them."""
    if arguments.rdzv_endpoint is None:
        return None
    return Rendezvous(arguments.rdzv_endpoint, arguments.rdzv_id or Rendezvous.id)


def launch_of(
    config: RunConfig,
    arguments: argparse.Namespace,
    command: Sequence[str],
    program: Program,
) -> Launch:
    """The run that a launcher starts, with the sizes that `add_launch_arguments` declares."""
    sizes = arguments.nodes, arguments.gpus_per_node, rendezvous_of(arguments)
    return Launch(config, tuple(command), program, *sizes)


def launch_options(arguments: argparse.Namespace) -> list[str]:
    """The launch options of this command, to be typed again; on a node of a cluster, the options that submit the run
    again."""
    options = {
        "--launcher": os.environ.get(LAUNCHED_BY, arguments.launcher),
        "--nodes": arguments.nodes,
        "--gpus-per-node": arguments.gpus_per_node,
    }
    return [word for option, value in options.items() if value is not None for word in (option, str(value))]


def counted_processes(config: RunConfig, arguments: argparse.Namespace) -> int:
    """Number of processes of the run, over all nodes.

    Raises:
        LayoutError: a variable of the environment is not a whole number.
    """
    return launcher_of(config, arguments).world_size(launch_of(config, arguments, (), Program(())))


def started(
    config: RunConfig,
    arguments: argparse.Namespace,
    command: Sequence[str],
    program: Program,
    check: Callable[[int], object],
) -> Ended:
    """Check and start the run, and wait for its end if the launcher or --wait does; with --dry-run, print what would
    run.

    Args:
        command: arguments of `megatron-wrap` without those of launchers.
        check: raises an error if the run cannot succeed with this number of processes.
    """
    launch, launcher = launch_of(config, arguments, command, program), launcher_of(config, arguments)
    check(launcher.world_size(launch))
    if arguments.dry_run:
        print(hide_secrets(f"would run: {launcher.preview(launch)}"))
        return Ended(0, finished=False)
    job = launcher.start(launch)
    if job.announcement:
        print(hide_secrets(job.announcement), flush=True)
        if not arguments.wait:
            return Ended(0, finished=False)
    return job.wait()

"""`megatron-wrap train`: validate the configuration, then start processes under torchrun's agent that run
examples/train.py."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.cli.arguments import add_run_arguments
from megatron_wrap.cli.check import add_script_argument, check_of, report, script_of
from megatron_wrap.cli.launcher_signals import LauncherSignals
from megatron_wrap.cli.processes import Nodes, add_process_arguments, launch_processes, nodes_of, python_statement
from megatron_wrap.core.remote.local_copies import with_local_copies
from megatron_wrap.core.validation import validate
from megatron_wrap.hidden_secrets import hide_secrets

EXAMPLES = (
    ("ten steps on random tokens in one process", "train configs/tiny-llama-mock.yaml"),
    (
        "the same with tensor parallelism, in two processes on the CPU",
        "train configs/tiny-llama-mock.yaml megatron_lm.model.parallel.tensor_model_parallel_size=2 "
        "megatron_wrap.init.platform=cpu",
    ),
    ("the run of scripts/run_example.sh, whose data examples/data/build.py makes", "train configs/tiny-llama-sft.yaml"),
    ("what would run, if nothing is wrong", "train configs/tiny-llama-mock.yaml --dry-run"),
    ("a training script of your own", "train configs/tiny-llama-mock.yaml --script examples/train.py"),
)
_RUN_FILE = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
"""Runs a file with the working directory on sys.path, as `python -m` does, so that it may contain my_module:MyFlow."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    add_run_arguments(parser)
    add_script_argument(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="run megatron-wrap check, and print what would be started"
    )
    parser.add_argument(
        "--launcher",
        choices=("local", "ray"),
        default="local",
        help="what starts the processes: torchrun's agent on this node, or Ray Train (docs/cluster.md)",
    )
    add_process_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Validates, trains, and prints what to do next; returns the exit code of the processes."""
    if arguments.dry_run:
        return _dry_run(arguments)
    if arguments.launcher == "ray":
        return _under_ray(arguments)
    config = with_local_copies(read_run(arguments.config, arguments.overrides))
    nodes = nodes_of(config, arguments.nproc_per_node)
    own_script = script_of(arguments)
    validate(config, nodes.world_size, own_script=own_script is not None)
    script = [own_script] if own_script else [*python_statement(_RUN_FILE), str(_default_script())]
    with LauncherSignals(config.train.stop_within_seconds) as signals:
        exit_code = launch_processes(nodes, [*script, arguments.config, *arguments.overrides], config, signals)
        finished = exit_code == 0 and not signals.stopped
    if finished and nodes.node_rank == 0:
        from megatron_wrap.cli.next_steps import next_steps

        options = ["--script", own_script] if own_script else []
        if arguments.nproc_per_node:
            options += ["--nproc-per-node", str(arguments.nproc_per_node)]
        command = ["train", arguments.config, *options, *arguments.overrides]
        print(hide_secrets(next_steps(config, command, evaluates=own_script is None)))
    return exit_code


def _under_ray(arguments: argparse.Namespace) -> int:
    """Trains in as many of Ray's workers as --nproc-per-node says; returns the exit code."""
    from megatron_wrap.launch.ray_command import run_under_ray

    own_script = script_of(arguments)
    script = [own_script, arguments.config, *arguments.overrides] if own_script else None
    return run_under_ray(arguments.config, arguments.overrides, script=script, num_workers=arguments.nproc_per_node)


def _dry_run(arguments: argparse.Namespace) -> int:
    """Prints the report of `megatron-wrap check`, and without errors what would be started."""
    checked = check_of(arguments, starts=True)
    print(report(checked.items))
    if checked.exit_code == 0 and checked.nodes is not None:
        program = [script_of(arguments) or str(_default_script()), arguments.config, *arguments.overrides]
        print(hide_secrets(f"would run: {_torchrun(checked.nodes, program)}"))
    return checked.exit_code


def _torchrun(nodes: Nodes, program: list[str]) -> str:
    """The command of torchrun that starts the same processes."""
    where = ["--standalone"]
    if nodes.num_nodes > 1:
        address = f"--master-addr {nodes.master_address} --master-port {nodes.master_port or 29500}"
        where = [f"--nnodes {nodes.num_nodes} --node-rank {nodes.node_rank} {address}"]
    words = ["torchrun", *where, f"--nproc-per-node {nodes.processes_per_node}", shlex.join(program)]
    return " ".join(words)


def _default_script() -> Path:
    """examples/train.py of the installed package; in a checkout, the file next to the package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "examples" / "train.py"
    return installed if installed.is_file() else package.parent / "examples" / "train.py"

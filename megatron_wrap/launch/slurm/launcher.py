"""`--launcher slurm`: a job of Slurm, whose file is written into the output folder and submitted by sbatch."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema.derived import output_dir
from megatron_wrap.config.schema.run import SECTION_PATHS
from megatron_wrap.errors import ConfigError, PlatformError, did_you_mean
from megatron_wrap.hidden_secrets import HIDDEN, SECRET_NAME, hide_secrets
from megatron_wrap.launch.contract.launcher import Ended, Launch, Launcher
from megatron_wrap.launch.slurm.jobs import SubmittedJob, follow, remember, slurm
from megatron_wrap.utils.atomic_write import write_atomically

_KEYS = SECTION_PATHS["slurm"]
_OWN_GPUS = ("--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket")
"""Options by which a site asks for GPUs in its own way."""
_ASSIGNED = re.compile(r"([A-Za-z_][\w.-]*)=[\"']?([^\s\"'$]{8,})")
"""A name and a value that is no variable."""


class SlurmLauncher(Launcher):
    """Jobs of Slurm: `srun` starts torchrun's agent on each node, with c10d's rendezvous on the first one."""

    def preview(self, launch: Launch) -> str:
        """The command that submits the job, and its file."""
        return f"sbatch {_file(launch.config)}, whose content is\n\n{job_file(launch)}"

    def start(self, launch: Launch) -> SlurmJob:
        """Submit the job.

        Raises:
            PlatformError: Slurm's commands are missing, or Slurm refuses the job. ConfigError: an unknown partition, a
                name of a job in use, or a file that would contain a secret.
        """
        _require("sbatch", "squeue", "scontrol")
        text = job_file(launch)
        _check_partition(launch.config)
        _check_name(launch.config)
        file = _file(launch.config)
        (file.parent.parent / "logs").mkdir(parents=True, exist_ok=True)
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, text)
        identity, _, cluster = slurm("sbatch", "--parsable", str(file)).strip().partition(";")
        job = SubmittedJob(
            identity, cluster, _name(launch.config), os.path.abspath(output_dir(launch.config)), launch.command
        )
        remember(job)
        return SlurmJob(job, file)


class SlurmJob:
    """A job that is submitted."""

    def __init__(self, job: SubmittedJob, file: Path) -> None:
        self._job = job
        self.announcement = (
            f"job {job.id} ({job.name}) is submitted: {file}\n"
            f"follow it: megatron-wrap jobs --follow {job.id}\n"
            f"stop it:   megatron-wrap jobs --cancel {job.id}"
        )

    def wait(self) -> Ended:
        """See `Job`; the nodes have printed what to do next."""
        return Ended(follow(self._job), finished=False)


def job_file(launch: Launch) -> str:
    """The text of the job's file, for bash.

    Raises:
        ConfigError: it would contain a secret.
    """
    parts = [*_header(launch), "", *_settings(launch), "", _body()]
    text = "\n".join(parts)
    for number, line in enumerate(text.splitlines(), 1):
        secret = any(SECRET_NAME.search(name) for name, _ in _ASSIGNED.findall(line))
        if secret or HIDDEN in line or hide_secrets(line) != line:
            name = hide_secrets(re.sub(r"=.*", "", line)).strip()
            raise ConfigError(
                f"line {number} of the job's file ({name}=...) would contain a secret; set it in the environment of "
                "this command, which sbatch passes on, and not in an override or the configuration"
            )
    return text


def _body() -> str:
    return resources.files("megatron_wrap.launch.slurm").joinpath("job.sh").read_text(encoding="utf-8")


def _header(launch: Launch) -> list[str]:
    """The options of sbatch, each group below its reason."""
    config, settings = launch.config, launch.config.slurm
    nodes, processes = launch.layout()
    own_gpus = any(re.split(r"[=\s]", option)[0] in _OWN_GPUS for option in settings.sbatch_options)
    on_cpus = config.init.platform == "cpu"
    cores = settings.cpus_per_node or (processes if on_cpus else None)
    options = {"job-name": _name(config), "chdir": os.getcwd(), "partition": settings.partition}
    options |= {"account": settings.account, "time": settings.time_limit}
    verb, path, *words = launch.command
    command = [verb, path, "--launcher", "slurm", "--nodes", str(nodes), "--gpus-per-node", str(processes), *words]
    lines = ["#!/bin/bash", f"# {config.name}: megatron-wrap {shlex.join(command)}"]
    lines += [f"# Written by megatron-wrap; `sbatch {_file(config)}` submits it again, and the run resumes.", ""]
    lines += [f"#SBATCH --{name}={shlex.quote(value)}" for name, value in options.items() if value is not None]
    lines += ["", "# One task on each node: torchrun's agent, which starts the processes of its node."]
    lines += [f"#SBATCH --nodes={nodes}", "#SBATCH --ntasks-per-node=1"]
    lines += [] if cores is None else [f"#SBATCH --cpus-per-task={cores}"]
    lines += [] if on_cpus or own_gpus else [f"#SBATCH --gpus-per-node={processes}"]
    lines += ["", "# What this script prints; a job that is queued again appends to the same files."]
    log = shlex.quote(f"{output_dir(config)}/logs/slurm-%j.log")
    lines += [f"#SBATCH --output={log}", "#SBATCH --open-mode=append"]
    lines += ["", f"# {settings.signal_seconds} s before the time limit, and only to this script."]
    lines += [f"#SBATCH --signal=B:USR1@{settings.signal_seconds}"]
    lines += ["# After the failure of a node the job is queued again, and resumes." if settings.requeue else ""]
    lines += ["#SBATCH --requeue" if settings.requeue else "#SBATCH --no-requeue"]
    if settings.sbatch_options:
        lines += ["", f"# {_KEYS}.sbatch_options", *(f"#SBATCH {option}" for option in settings.sbatch_options)]
    return lines


def _settings(launch: Launch) -> list[str]:
    """The variables and the function that the rest of the file uses."""
    config, settings = launch.config, launch.config.slurm
    shared = [output_dir(config), *([config.train.save] if config.train.save else [])]
    lines = ["# ---- this run ----", f"output={shlex.quote(output_dir(config))}"]
    lines += [f"shared=({shlex.join(dict.fromkeys(shared))})  # folders that all nodes have to see"]
    lines += [f"srun_options=({shlex.join(settings.srun_options)})"]
    lines += [f"requeue={int(settings.requeue)}", f"max_restarts={settings.max_restarts if settings.requeue else 0}"]
    lines += [f"port={settings.rendezvous_port or ''}  # of the rendezvous; empty: by the number of the job"]
    lines += ["export MEGATRON_WRAP_LAUNCHER=slurm  # that the commands for the next steps name"]
    if settings.setup:
        lines += [f"# {_KEYS}.setup", *settings.setup]
    lines += ["", "# On each node.", "run_node() {", *_command(launch), "}"]
    return lines


def _command(launch: Launch) -> list[str]:
    """The lines of bash that start the processes of a node."""
    settings, (nodes, processes) = launch.config.slurm, launch.layout()
    in_container = settings.container or any("--container-image" in option for option in settings.srun_options)
    python = settings.python or ("python3" if in_container else sys.executable)
    verb, *words = launch.command
    start = f"{settings.container} " if settings.container else ""
    lines = [f"{start}{shlex.quote(python)} -m megatron_wrap.cli.main {verb} {shlex.quote(words[0])}"]
    lines += [f"    --launcher local --nodes {nodes} --gpus-per-node {processes}"]
    if nodes > 1:
        lines += ['    --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"']
    lines += [f"    {text}" for text in _grouped(words[1:])]
    return [f"    {line}{' ' + chr(92) if line is not lines[-1] else ''}" for line in lines]


def _grouped(words: Sequence[str]) -> list[str]:
    """The words of a command line, an option with its value, for a line each."""
    lines: list[str] = []
    for word in words:
        if lines and lines[-1].startswith("--") and " " not in lines[-1] and not word.startswith("--"):
            lines[-1] += f" {shlex.quote(word)}"
        else:
            lines.append(shlex.quote(word))
    return lines


def _name(config: RunConfig) -> str:
    return config.slurm.job_name or config.name


def _file(config: RunConfig) -> Path:
    return Path(output_dir(config), "slurm", "run.sbatch")


def _require(*commands: str) -> None:
    for command in commands:
        if shutil.which(command) is None:
            raise PlatformError(
                f"{command} is not installed here; run this on a node that submits jobs of Slurm, or train with "
                "--launcher local"
            )


def _check_partition(config: RunConfig) -> None:
    wanted = config.slurm.partition
    if wanted is None:
        return
    known = sorted(set(slurm("sinfo", "--noheader", "--all", "--format=%R").split()))
    for name in wanted.split(","):
        if name not in known:
            hint = did_you_mean(name, known) or f"; its partitions are {', '.join(known)}"
            raise ConfigError(f"{config.located(f'{_KEYS}.partition')}: Slurm has no partition {name}{hint}")


def _check_name(config: RunConfig) -> None:
    name = _name(config)
    queued = slurm("squeue", "--me", "--noheader", f"--name={name}", "--format=%i %T").splitlines()
    if queued:
        identity, state = queued[0].split()
        raise ConfigError(
            f"job name {name} is in use by your job {identity} ({state}); wait for its end, "
            f"`megatron-wrap jobs --cancel {identity}`, or set {_KEYS}.job_name"
        )

"""`--launcher slurm`: a Slurm job, whose file is written into the output folder and submitted by sbatch."""

from __future__ import annotations

import os
import re
import shlex
import sys
from importlib import resources
from pathlib import Path

from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema.derived import output_dir
from megatron_wrap.config.schema.run import SECTION_PATHS
from megatron_wrap.errors import ConfigError
from megatron_wrap.hidden_secrets import HIDDEN, SECRET_NAME, hide_secrets
from megatron_wrap.launch.contract import Ended, Launch, Launcher
from megatron_wrap.launch.slurm_jobs import SubmittedJob, follow, remember, slurm
from megatron_wrap.utils.atomic_write import write_atomically

_KEYS = SECTION_PATHS["slurm"]
_OWN_GPUS = ("--gres", "--gpus", "-G", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket")
"""Options by which a site asks for GPUs in its own way."""
_ASSIGNED = re.compile(r"([A-Za-z_][\w.-]*)=[\"']?([^\s\"'$]{8,})")
"""Matches an assignment of a name to a value that is not a variable."""


class SlurmLauncher(Launcher):
    """Submits jobs of Slurm: `srun` starts torchrun's agent on each node, with c10d's rendezvous on the first one."""

    def preview(self, launch: Launch) -> str:
        """The command that submits the job, and its file."""
        return f"sbatch {_file(launch.config)}, whose content is\n\n{job_file(launch)}"

    def start(self, launch: Launch) -> SlurmJob:
        """Submit the job.

        Raises:
            PlatformError: Slurm's commands are missing, or Slurm refuses the job. ConfigError: the name belongs to a
                queued or running job, or the file would contain a secret.
        """
        text, file = job_file(launch), _file(launch.config)
        _check_name(launch.config)
        (file.parent.parent / "logs").mkdir(parents=True, exist_ok=True)
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, text)
        identity = slurm("sbatch", "--parsable", str(file)).strip().partition(";")[0]
        output = os.path.abspath(output_dir(launch.config))
        job = SubmittedJob(identity, _name(launch.config), output, launch.command)
        remember(job)
        return SlurmJob(job, file)


class SlurmJob:
    """A submitted job."""

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
    """The text of the job's file: `slurm_job.sh` with the values of the run. A line without its value is left out.

    Raises:
        ConfigError: the file would contain a secret.
    """
    text = resources.files("megatron_wrap.launch").joinpath("slurm_job.sh").read_text(encoding="utf-8")
    values = _values(launch)
    for name in [name for name, value in values.items() if value is None]:
        text = re.sub(rf"^.*@{name}@.*\n", "", text, flags=re.MULTILINE)
    text = re.sub("@([a-z_]+)@", lambda name: str(values[name[1]]), text)
    for number, line in enumerate(text.splitlines(), 1):
        secret = any(SECRET_NAME.search(name) for name, _ in _ASSIGNED.findall(line))
        if secret or HIDDEN in line or hide_secrets(line) != line:
            name = hide_secrets(re.sub(r"=.*", "", line)).strip()
            raise ConfigError(
                f"line {number} of the job's file ({name}=...) would contain a secret; set it in the environment of "
                "this command, which sbatch passes on, and not in an override or the configuration"
            )
    return text


def _values(launch: Launch) -> dict[str, str | int | None]:
    """Name in `slurm_job.sh` -> its value; None: the line is left out."""
    config, settings, output = launch.config, launch.config.slurm, output_dir(launch.config)
    nodes, processes = launch.layout()
    verb, path, *words = launch.command
    submission = [verb, path, "--launcher", "slurm", "--nodes", str(nodes), "--gpus-per-node", str(processes), *words]
    own_gpus = any(re.split(r"[=\s]", option)[0] in _OWN_GPUS for option in settings.sbatch_options)
    on_cpus = config.init.platform == "cpu"
    in_container = settings.container or any("--container-image" in option for option in settings.srun_options)
    python = shlex.quote(settings.python or ("python3" if in_container else sys.executable))
    texts = {
        "job_name": _name(config),
        "chdir": os.getcwd(),
        "partition": settings.partition,
        "account": settings.account,
        "time_limit": settings.time_limit,
        "log": f"{output}/logs/slurm-%j.log",
        "output": output,
    }
    return {
        **{name: value if value is None else shlex.quote(value) for name, value in texts.items()},
        "title": f"{config.name}: megatron-wrap {shlex.join(submission)}",
        "file": str(_file(config)),
        "nodes": nodes,
        "processes": processes,
        "cores": settings.cpus_per_node or (processes if on_cpus else None),
        "gpus": None if on_cpus or own_gpus else processes,
        "signal_seconds": settings.signal_seconds,
        "requeue_option": "requeue" if settings.requeue else "no-requeue",
        "sbatch_options": "\n".join(f"#SBATCH {option}" for option in settings.sbatch_options) or None,
        "shared": shlex.join(dict.fromkeys([output, config.train.save or output])),
        "srun_options": shlex.join(settings.srun_options),
        "requeue": int(settings.requeue),
        "max_restarts": settings.max_restarts if settings.requeue else 0,
        "port": settings.rendezvous_port or "",
        "setup": "\n".join(settings.setup) or None,
        "python": f"{settings.container} {python}" if settings.container else python,
        "command": " \\\n        ".join([f"{verb} {shlex.quote(path)}", *map(shlex.quote, words)]),
    }


def _name(config: RunConfig) -> str:
    return config.slurm.job_name or config.name


def _file(config: RunConfig) -> Path:
    return Path(output_dir(config), "slurm", "run.sbatch")


def _check_name(config: RunConfig) -> None:
    name = _name(config)
    queued = slurm("squeue", "--me", "--noheader", f"--name={name}", "--format=%i %T").splitlines()
    if queued:
        identity, state = queued[0].split()
        raise ConfigError(
            f"job name {name} is in use by your job {identity} ({state}); wait for its end, "
            f"`megatron-wrap jobs --cancel {identity}`, or set {_KEYS}.job_name"
        )

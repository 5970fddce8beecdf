"""`--launcher slurm`: a Slurm job, whose file is written into the output folder and submitted by sbatch; record, state
and console of submitted jobs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema.derived import output_dir
from megatron_wrap.config.schema.run import SECTION_PATHS
from megatron_wrap.errors import ConfigError, PlatformError
from megatron_wrap.hidden_secrets import HIDDEN, SECRET_NAME, hide_secrets, without_secrets
from megatron_wrap.launch.interface import Ended, Launch, Launcher, show_from
from megatron_wrap.parallel.watch.ending import RESUME
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


_STATE_SECONDS = 3.0
"""Seconds between two queries of Slurm's controller while a job is followed."""
_FOLLOW_SECONDS = 0.3
_TAIL_BYTES = 2**16
ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    *("TIMEOUT", "STOPPED"),
}
"""Slurm's states of a job that is not started again; STOPPED is ours: the run saved, and was not queued again."""
UNKNOWN = "UNKNOWN"
"""State of a job that Slurm has forgotten and that has left no exit code."""


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted job as it is recorded."""

    id: str
    name: str
    output: str
    """The run's output folder."""
    command: tuple[str, ...]
    """Arguments of `megatron-wrap` without those of the launcher."""

    @property
    def logs(self) -> list[Path]:
        """The log files of the job's script and of its nodes; the first may not exist yet."""
        folder = Path(self.output, "logs")
        of_nodes = sorted(folder.glob(f"slurm-{self.id}-node*.log"), key=lambda file: (len(file.name), file.name))
        return [folder / f"slurm-{self.id}.log", *of_nodes]


@dataclass(frozen=True)
class JobState:
    """State of a job, from Slurm and the run's files."""

    name: str
    """Slurm's state, such as PENDING."""
    reason: str = ""
    """Slurm's reason why the job is pending; empty in other states."""
    exit_code: int | None = None
    """Exit code of a run that ended by itself; None: it has not, or it is not known."""


def slurm(*command: str) -> str:
    """The output of one of Slurm's commands.

    Raises:
        PlatformError: the command is not installed, or fails; the message is Slurm's.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PlatformError(f"{command[0]} is not installed here; run this where Slurm's commands are") from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise PlatformError(f"{command[0]} fails: {'; '.join(lines) or f'exit code {done.returncode}'}")
    return done.stdout


# ---- the record ----


def remember(job: SubmittedJob) -> None:
    """Record a job that was submitted, for `submitted_jobs`."""
    folder = _records()
    folder.mkdir(parents=True, exist_ok=True)
    content = without_secrets({**asdict(job), "command": list(job.command)})
    write_atomically(folder / f"{job.id}.json", json.dumps(content) + "\n")


def submitted_jobs() -> list[SubmittedJob]:
    """The recorded jobs, oldest first."""
    jobs = []
    for file in sorted(_records().glob("*.json"), key=lambda file: file.stat().st_mtime_ns):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
            content = json.loads(file.read_text(encoding="utf-8"))
            jobs.append(SubmittedJob(**{**content, "command": tuple(content["command"])}))
    return jobs


def _records() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state", "megatron-wrap", "slurm-jobs")


# ---- the state ----


def states(jobs: Iterable[SubmittedJob]) -> dict[str, JobState]:
    """Id -> state of each job, from squeue and the exit code that the job has left.

    Raises:
        PlatformError: Slurm's controller does not answer.
    """
    listed: dict[str, JobState] = {}
    for line in slurm("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r").splitlines():
        identity, name, reason = line.split("|", 2)
        listed[identity] = JobState(name, "" if reason == "None" or name != "PENDING" else reason)
    return {job.id: _with_exit_code(listed.get(job.id, JobState(UNKNOWN)), _exit_code(job)) for job in jobs}


def _with_exit_code(state: JobState, code: int | None) -> JobState:
    if code is None or state.name not in (*ENDED, UNKNOWN):
        return state
    name = {0: "COMPLETED", RESUME: "STOPPED"}.get(code, "FAILED")
    return JobState("CANCELLED" if state.name == "CANCELLED" else name, "", code)


def _exit_code(job: SubmittedJob) -> int | None:
    """Exit code of the job's script; None while it runs or if Slurm ended it."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path(job.output, "slurm", f"{job.id}.exit").read_text(encoding="utf-8"))
    return None


def last_step(job: SubmittedJob) -> dict[str, Any]:
    """The metrics of the run's last step; empty before the first."""
    for line in reversed(_tail(Path(job.output, "metrics.jsonl")).splitlines()):
        with contextlib.suppress(ValueError):
            metrics = json.loads(line)
            if isinstance(metrics, dict) and "elapsed_time" in metrics:
                return metrics
    return {}


def last_error(job: SubmittedJob) -> str:
    """The last line about an error that the job's script printed; empty: there is none."""
    errors = re.findall(r"^(?:.*slurm job \d+: |slurmstepd: )?(error: .*)$", _tail(job.logs[0]), re.MULTILINE)
    return errors[-1] if errors else ""


def _tail(file: Path) -> str:
    with contextlib.suppress(OSError), file.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return stream.read().decode(errors="replace")
    return ""


# ---- the console ----


def follow(job: SubmittedJob) -> int:
    """Show the output of a job and its nodes until the job ends, also while it is queued again; returns the run's exit
    code, 1 for a job that Slurm ended.

    Raises:
        PlatformError: Slurm's controller does not answer. KeyboardInterrupt: Ctrl-C; the job continues.
    """
    shown: dict[Path, int] = {}
    state, asked = JobState(""), 0.0
    try:
        while state.name not in (*ENDED, UNKNOWN):
            if time.monotonic() - asked >= _STATE_SECONDS:
                before, asked = state, time.monotonic()
                state = states([job])[job.id]
                if state.name == "PENDING" and state != before:
                    because = f": {state.reason}" if state.reason else ""
                    sys.stderr.write(f"job {job.id} waits in the queue{because}\n")
            shown |= {file: show_from(file, shown.get(file, 0)) for file in job.logs}
            time.sleep(_FOLLOW_SECONDS)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"job {job.id} continues; megatron-wrap jobs --follow {job.id} follows it, --cancel {job.id} stops it"
        ) from None
    for file in job.logs:
        show_from(file, shown.get(file, 0))
    if state.exit_code is not None:
        return state.exit_code
    sys.stderr.write(f"error: job {job.id} has ended: {state.name}; its logs: {job.logs[0]}\n")
    return 1

"""`megatron-wrap jobs`: the jobs of Slurm that `megatron-wrap` submitted."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from megatron_wrap.cli.arguments import count
from megatron_wrap.cli.text_table import text_table
from megatron_wrap.errors import ConfigError
from megatron_wrap.hidden_secrets import hide_secrets
from megatron_wrap.launch.slurm import (
    ENDED,
    JobState,
    SubmittedJob,
    follow,
    last_error,
    last_step,
    slurm,
    states,
    submitted_jobs,
)
from megatron_wrap.metrics.number_format import with_prefix

_HEAD = ("job", "name", "state", "step", "speed", "output folder", "last error")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--follow", metavar="JOB", help="show what a job prints until it ends")
    action.add_argument("--cancel", metavar="JOB", help="end a job that waits or runs")
    action.add_argument("--newest", type=count, default=20, metavar="N", help="number of jobs listed (default: 20)")


def run(arguments: argparse.Namespace) -> int:
    """Lists jobs, follows one or cancels one; returns the exit code."""
    jobs = submitted_jobs()
    if arguments.follow:
        return follow(_chosen(jobs, arguments.follow))
    if arguments.cancel:
        job = _chosen(jobs, arguments.cancel)
        state = states([job])[job.id]
        if state.name in ENDED:
            raise ConfigError(f"job {job.id} ({job.name}) has ended: {state.name}; there is nothing to cancel")
        slurm("scancel", job.id)  # its processes have Slurm's KillWait to save after their step
        print(f"job {job.id} ({job.name}) is cancelled; `megatron-wrap jobs` shows when it has ended")
        return 0
    newest = jobs[-arguments.newest :]
    if not newest:
        print("no jobs were submitted from here: megatron-wrap train CONFIG --launcher slurm submits one")
        return 0
    known = states(newest)
    of_folder = {job.output: job.id for job in newest}  # the last job, whose steps are in the folder
    rows = [_row(job, known[job.id], of_folder[job.output] == job.id) for job in newest]
    print(hide_secrets(text_table([_HEAD, *rows])))
    return 0


def _chosen(jobs: Sequence[SubmittedJob], text: str) -> SubmittedJob:
    """The newest job with this number or name.

    Raises:
        ConfigError: there is no such job.
    """
    for job in reversed(jobs):
        if text in (job.id, job.name):
            return job
    listed = ", ".join(f"{job.id} ({job.name})" for job in jobs[-5:]) or "none"
    raise ConfigError(f"megatron-wrap submitted no job {text} from here; the newest are: {listed}")


def _row(job: SubmittedJob, state: JobState, has_steps: bool) -> tuple[str, ...]:
    step = last_step(job) if has_steps else {}
    shown = state.name
    if state.reason:
        shown += f" ({state.reason})"
    elif state.exit_code:
        shown += f" (exit code {state.exit_code})"
    speed = f"{with_prefix(step['tokens_per_second'])} tokens/s" if "tokens_per_second" in step else ""
    error = last_error(job) if state.name != "COMPLETED" else ""
    folder = os.path.relpath(job.output)
    where = folder if not folder.startswith("..") else job.output
    return job.id, job.name, shown, str(step.get("iteration", "")), speed, where, error

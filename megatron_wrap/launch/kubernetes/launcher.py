"""`--launcher kubernetes`: a TrainJob of Kubeflow Trainer v2, written into the output folder and applied by kubectl."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_wrap.config import RunConfig
from megatron_wrap.config.reading.tree import OVERLAY_FOLDER, shipped_root
from megatron_wrap.config.schema.derived import output_dir
from megatron_wrap.errors import ConfigError, PlatformError
from megatron_wrap.launch.contract.launcher import Ended, Launch, Launcher
from megatron_wrap.launch.kubernetes.job_state import (
    Failure,
    Object,
    ended_condition,
    failure,
    first_failure,
    in_order,
    is_first,
    name_of,
    phase,
    pod_selector,
    waits_for,
)
from megatron_wrap.launch.kubernetes.kubectl import Kubectl
from megatron_wrap.launch.kubernetes.manifest import Pods, manifest, words_of
from megatron_wrap.launch.kubernetes.settings import check_settings, grace_seconds, job_name
from megatron_wrap.parallel.watch.interrupts import INTERRUPTED
from megatron_wrap.utils.atomic_write import named_write_errors, write_atomically

MANIFEST = "trainjob.yaml"
"""In the output folder."""
_POLL_SECONDS = 2.0
_MAX_FAILED_CALLS = 30
"""Of kubectl, one after another, before a wait ends: a minute and the time that the calls take."""
_SHOWN_LINES = 30
"""Of the log of a failed pod that was not followed."""


class KubernetesLauncher(Launcher):
    """Pods of a TrainJob, one for each node."""

    def preview(self, launch: Launch) -> str:
        """Writes the manifest, which is a file for `kubectl apply` on another machine, and shows it."""
        path, text = _written(launch)
        return f"kubectl apply --filename {path}, which is written:\n\n{text}"

    def start(self, launch: Launch) -> KubernetesJob:
        """See `Launcher`; a TrainJob of this name that has ended is replaced."""
        settings = launch.config.kubernetes
        kubectl, name = Kubectl(settings), job_name(launch.config)
        path, _ = _written(launch)
        before = kubectl.get("trainjob", name)
        if before is not None:
            _refuse_running(before, kubectl, name)
            kubectl.delete("trainjob", name)
        kubectl.apply(path)
        return KubernetesJob(kubectl, name, path)


class KubernetesJob:
    """A run on Kubernetes.

    Args:
        path: of the manifest.
    """

    def __init__(self, kubectl: Kubectl, name: str, path: Path) -> None:
        self._kubectl, self._name, self._path = kubectl, name, path
        self._shown: set[str] = set()
        """Pods whose log was printed to its end."""
        self._printed_until: dict[str, str] = {}
        """Pod -> time until which its log was printed, in RFC 3339."""
        self._cut: set[str] = set()
        """Pods whose log may have further lines."""
        self._said: set[str] = set()

    @property
    def announcement(self) -> str:
        """See `Job`."""
        log = self._kubectl.shown("logs", "--follow", "--selector", pod_selector(self._name, first=True))
        return (
            f"TrainJob {self._name} is submitted; its manifest is {self._path}\n"
            f"  follow: {log}\n"
            f"  state:  {self._kubectl.shown('get', 'pods', '--selector', pod_selector(self._name))}\n"
            f"  stop:   {self._kubectl.shown('delete', 'trainjob', self._name)}, which lets it save"
        )

    def wait(self) -> Ended:
        """See `Job`; Ctrl-C ends the wait and not the run."""
        failed_calls = 0
        try:
            while True:
                try:
                    ended = self._look()
                    failed_calls = 0
                except PlatformError as error:
                    failed_calls += 1
                    self._say(f"{error}; tried again")
                    if failed_calls == _MAX_FAILED_CALLS:
                        raise
                    ended = None
                if ended is not None:
                    return ended
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            self._say(f"\nthe run continues without this command\n{self.announcement}")
            return Ended(INTERRUPTED, finished=False)

    def _look(self) -> Ended | None:
        """Show what is new; returns how the run has ended, if it has."""
        job = self._kubectl.get("trainjob", self._name)
        pods = in_order(self._kubectl.list("pods", pod_selector(self._name)))
        if job is None:
            self._say(f"error: TrainJob {self._name} was deleted before it ended")
            return Ended(1, finished=False)
        for pod in pods:
            if is_first(pod) and phase(pod) != "Pending" and name_of(pod) not in self._shown:
                self._follow(pod)
                return None
        condition = ended_condition(job)
        if condition is None:
            for pod in pods:
                reason = waits_for(pod) if phase(pod) == "Pending" else ""
                if reason:
                    self._say(f"pod {name_of(pod)} waits: {reason}")
            return None
        if condition["type"] == "Complete":
            return Ended(0, finished=True)
        return self._failed(condition, pods)

    def _follow(self, pod: Object) -> None:
        name = name_of(pod)
        if phase(pod) == "Running":
            self._print_log(name)
            return  # looked at again: it may run on after the connection has ended
        if name not in self._printed_until or name in self._cut:
            self._print_log(name)
        self._shown.add(name)
        failed = failure(pod)
        if failed is not None:
            self._say(f"pod {name} ended with {_ending(failed)}")

    def _print_log(self, name: str) -> None:
        whole = self._kubectl.follow_log(name, self._printed_until.get(name))
        self._printed_until[name] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        (self._cut.discard if whole else self._cut.add)(name)

    def _failed(self, condition: Object, pods: Sequence[Object]) -> Ended:
        failed = first_failure(pods)
        reason = f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
        if failed is None:
            self._say(f"error: TrainJob {self._name} has failed: {reason}")
            return Ended(1, finished=False)
        if failed.pod not in self._shown:
            sys.stdout.write(self._kubectl.last_lines(failed.pod, _SHOWN_LINES))
        self._say(f"error: pod {failed.pod} ended with {_ending(failed)}; TrainJob {self._name} has failed: {reason}")
        return Ended(failed.exit_code or 1, finished=False)

    def _say(self, line: str) -> None:
        """Print a line to stderr, once."""
        if line not in self._said:
            self._said.add(line)
            sys.stdout.flush()
            sys.stderr.write(f"{line}\n")
            sys.stderr.flush()


def _ending(failed: Failure) -> str:
    return f"exit code {failed.exit_code}" + (f" ({failed.reason})" if failed.reason else "")


# ---- the manifest ----


def _refuse_running(job: Mapping[str, Any], kubectl: Kubectl, name: str) -> None:
    if ended_condition(job) is None:
        stop = kubectl.shown("delete", "trainjob", name)
        raise ConfigError(
            f"a TrainJob {name} exists and has not ended; stop it with `{stop}`, or give this one another "
            "megatron_wrap.launch.kubernetes.name"
        )


def _written(launch: Launch) -> tuple[Path, str]:
    """Write the manifest; returns its path and text."""
    config = launch.config
    check_settings(config)
    nodes, processes = launch.layout()
    pods = Pods(
        job_name(config),
        words_of(launch.command, config.name),
        _files(Path(launch.command[1]), config.name),
        nodes,
        processes,
        config.init.platform != "cpu",
        grace_seconds(config),
    )
    text = manifest(pods, config.kubernetes)
    path = _path(config)
    advice = "set megatron_wrap.launch.kubernetes.manifest to a file on this machine"
    with named_write_errors(f"the manifest {path}", advice):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return path, text


def _path(config: RunConfig) -> Path:
    if config.kubernetes.manifest is not None:
        return Path(config.kubernetes.manifest).expanduser()
    return Path(output_dir(config)).expanduser() / MANIFEST


def _files(run: Path, name: str) -> dict[str, str]:
    """The run's YAML, and the files of the overlay beside it; path in the pod's folder -> content."""
    files = {f"{name}.yaml": run.read_text(encoding="utf-8")}
    overlay = run.resolve().parent / OVERLAY_FOLDER
    if overlay.is_dir() and overlay != shipped_root().resolve():
        for path in sorted(overlay.rglob("*")):
            if path.is_file():
                files[os.path.join(OVERLAY_FOLDER, path.relative_to(overlay).as_posix())] = path.read_text(
                    encoding="utf-8"
                )
    return files

"""`--launcher kubernetes`: a TrainJob of Kubeflow Trainer v2, written into the output folder and applied by kubectl."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_wrap.config.schema.derived import output_dir
from megatron_wrap.config.schema.launch import KubernetesConfig
from megatron_wrap.errors import ConfigError, PlatformError
from megatron_wrap.launch.interface import Ended, Launch, Launcher
from megatron_wrap.launch.kubernetes_manifest import CONTAINER, job_name, manifest
from megatron_wrap.parallel.watch.ending import INTERRUPTED
from megatron_wrap.utils.atomic_write import named_write_errors, write_atomically

Object = Mapping[str, Any]
"""An object of Kubernetes, as JSON."""
_JOB_SET, _INDEX = "jobset.sigs.k8s.io", "batch.kubernetes.io/job-completion-index"
_POLL_SECONDS = 2.0
_MAX_FAILED_CALLS = 30
"""Number of failed calls of kubectl in a row that ends a wait: a minute and the time that the calls take."""
_SHOWN_LINES = 30
"""Number of last lines that are shown of the log of a failed pod that was not followed."""
_LOG_LINE = re.compile(r"[IWEF]\d{4} \d\d:")
"""Matches a line of kubectl's own logger; kubectl also prints the error itself."""
_NO_TRAINER = ("doesn't have a resource type", 'no matches for kind "Train')
_NO_REASONS = {"ContainerCreating", "PodInitializing"}
"""Reasons for which a container waits that starts as usual; they are not shown."""


class KubernetesLauncher(Launcher):
    """Pods of a TrainJob, one for each node."""

    def preview(self, launch: Launch) -> str:
        """Writes the manifest, a file for `kubectl apply` on another machine, and returns it."""
        path, text = _written(launch)
        return f"kubectl apply --filename {path}, which is written:\n\n{text}"

    def start(self, launch: Launch) -> KubernetesJob:
        """See `Launcher`; a TrainJob of this name that has ended is replaced."""
        kubectl, name = Kubectl(launch.config.kubernetes), job_name(launch.config)
        path, _ = _written(launch)
        before = kubectl.get("trainjob", name, "--ignore-not-found")
        if before is not None:
            if _end_of(before) is None:
                raise ConfigError(
                    f"a TrainJob {name} exists and has not ended; stop it with "
                    f"`{kubectl.shown('delete', 'trainjob', name)}`, or give this one another "
                    "megatron_wrap.launch.kubernetes.name"
                )
            kubectl("delete", "trainjob", name, "--cascade=foreground", "--wait", "--timeout=600s")
        kubectl("apply", "--filename", str(path))
        return KubernetesJob(kubectl, name, path)


def _written(launch: Launch) -> tuple[Path, str]:
    """Write the manifest; returns its path and text."""
    text, named = manifest(launch), launch.config.kubernetes.manifest
    path = Path(output_dir(launch.config), "trainjob.yaml").expanduser() if named is None else Path(named).expanduser()
    advice = "set megatron_wrap.launch.kubernetes.manifest to a file on this machine"
    with named_write_errors(f"the manifest {path}", advice):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    return path, text


class Kubectl:
    """The program kubectl, called in the context and the namespace of the settings.

    Raises:
        PlatformError: kubectl is not installed.
    """

    def __init__(self, settings: KubernetesConfig) -> None:
        if shutil.which("kubectl") is None:
            raise PlatformError(
                "kubectl is not installed here; install it, or write the manifest with --dry-run and apply it elsewhere"
            )
        options = {"--context": settings.context, "--namespace": settings.namespace}
        self._options = [word for option, value in options.items() if value for word in (option, value)]

    def shown(self, *words: str) -> str:
        """A kubectl command as a user types it."""
        return shlex.join(["kubectl", *self._options, *words])

    def __call__(self, *words: str) -> str:
        """The output of a call.

        Raises:
            PlatformError: the call fails; the message is kubectl's.
        """
        command = ["kubectl", *self._options, *words, "--request-timeout=60s"]
        called = subprocess.run(command, capture_output=True, text=True, check=False)
        if called.returncode:
            lines = [line for line in called.stderr.strip().splitlines() if not _LOG_LINE.match(line)]
            reason = " ".join(lines) or f"exit code {called.returncode}"
            if any(text in reason for text in _NO_TRAINER):
                reason += "; install Kubeflow Trainer v2 in the cluster (https://trainer.kubeflow.org)"
            raise PlatformError(f"{self.shown(*words)}: {reason}")
        return called.stdout

    def get(self, kind: str, *words: str) -> Any:
        """An object, or a list of objects, as JSON; None: there is none."""
        text = self("get", kind, *words, "--output", "json")
        return json.loads(text) if text.strip() else None

    def follow_log(self, pod: str, since: str | None) -> bool:
        """Print the log of a pod until it ends, or the connection does; returns False where kubectl reports an error.

        Args:
            since: time in RFC 3339 of the first line; None: from the beginning.
        """
        first = [] if since is None else ["--since-time", since]
        sys.stdout.flush()
        return subprocess.run(["kubectl", *self._options, "logs", "--follow", *first, pod], check=False).returncode == 0


class KubernetesJob:
    """A run on Kubernetes.

    Args:
        path: path of the manifest.
    """

    def __init__(self, kubectl: Kubectl, name: str, path: Path) -> None:
        self._kubectl, self._name, self._path = kubectl, name, path
        self._selector = f"{_JOB_SET}/jobset-name={name}"
        self._printed_until: dict[str, str] = {}
        """Pod -> time until which its log was printed, in RFC 3339."""
        self._printed: set[str] = set()
        """Pods whose log has no further lines, as far as kubectl knew."""
        self._said: set[str] = set()

    @property
    def announcement(self) -> str:
        """See `Job`."""
        log = self._kubectl.shown("logs", "--follow", "--selector", f"{self._selector},{_INDEX}=0")
        return (
            f"TrainJob {self._name} is submitted; its manifest is {self._path}\n"
            f"  follow: {log}\n"
            f"  state:  {self._kubectl.shown('get', 'pods', '--selector', self._selector)}\n"
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
                    if failed_calls == _MAX_FAILED_CALLS:
                        raise
                    self._say(f"{error}; tried again")
                    ended = None
                if ended is not None:
                    return ended
                time.sleep(_POLL_SECONDS)
        except KeyboardInterrupt:
            self._say(f"\nthe run continues without this command\n{self.announcement}")
            return Ended(INTERRUPTED, finished=False)

    def _look(self) -> Ended | None:
        """Show new output and states; returns the end of the run, or None while it continues."""
        job = self._kubectl.get("trainjob", self._name, "--ignore-not-found")
        listed = self._kubectl.get("pods", "--selector", self._selector)
        pods = sorted(map(Pod, listed["items"]), key=lambda pod: pod.created)
        if job is None:
            self._say(f"error: TrainJob {self._name} was deleted before it ended")
            return Ended(1, finished=False)
        for pod in pods:
            if pod.waits_for:
                self._say(f"pod {pod.name} waits: {pod.waits_for}")
            elif pod.is_first and pod.phase != "Pending" and self._follow(pod):
                return None
        condition = _end_of(job)
        if condition is None:
            return None
        if condition["type"] == "Complete":
            return Ended(0, finished=True)
        return self._failed(condition, pods)

    def _follow(self, pod: Pod) -> bool:
        """Print the log of a pod, unless all of it is printed; returns whether it was printed."""
        name, runs = pod.name, pod.phase == "Running"
        if runs or name not in self._printed:
            whole = self._kubectl.follow_log(name, self._printed_until.get(name))
            self._printed_until[name] = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            # the connection may have ended before the pod, which is printed from then on
            (self._printed.add if whole or not runs else self._printed.discard)(name)
            return True
        if pod.exit_code is not None:
            self._say(f"pod {name} ended with {pod.ending}")
        return False

    def _failed(self, condition: Object, pods: Sequence[Pod]) -> Ended:
        """The end of a failed run: with the exit code of a pod with a user's error, else of the pod that failed first
        since all pods were last started."""
        reason = f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
        latest = max((pod.attempt for pod in pods), default=0)
        failed = [pod for pod in pods if pod.attempt == latest and pod.exit_code is not None]
        if not failed:
            self._say(f"error: TrainJob {self._name} has failed: {reason}")
            return Ended(1, finished=False)
        pod = min(failed, key=lambda pod: (pod.exit_code != 2, pod.ended_at))
        if pod.name not in self._printed:
            with contextlib.suppress(PlatformError):  # the pod has no log
                sys.stdout.write(self._kubectl("logs", "--tail", str(_SHOWN_LINES), pod.name))
        self._say(f"error: pod {pod.name} ended with {pod.ending}; TrainJob {self._name} has failed: {reason}")
        return Ended(pod.exit_code or 1, finished=False)

    def _say(self, line: str) -> None:
        """Print a line to stderr, once."""
        if line not in self._said:
            self._said.add(line)
            sys.stdout.flush()
            print(line, file=sys.stderr, flush=True)  # noqa: T201


def _end_of(job: Object) -> Object | None:
    """The condition that ended a TrainJob, of the type Complete or Failed; None: it has not ended."""
    conditions: Sequence[Object] = job.get("status", {}).get("conditions", [])
    ends = (each for each in conditions if each["type"] in ("Complete", "Failed") and each["status"] == "True")
    return next(ends, None)


class Pod:
    """The state of a pod, from its object."""

    def __init__(self, pod: Object) -> None:
        metadata, status = pod["metadata"], pod.get("status", {})
        labels, containers = metadata.get("labels", {}), status.get("containerStatuses", [])
        state: Object = next((each.get("state", {}) for each in containers if each.get("name") == CONTAINER), {})
        terminated = state.get("terminated", {})
        self.name, self.created = str(metadata["name"]), str(metadata.get("creationTimestamp", ""))
        self.is_first = str(labels.get(_INDEX)) == "0"
        """Whether rank 0 runs in the pod."""
        self.attempt = int(labels.get(f"{_JOB_SET}/restart-attempt", 0))
        self.phase = str(status.get("phase", "Pending"))
        """Phase of the pod: Pending, Running, Succeeded or Failed."""
        self.exit_code = int(terminated.get("exitCode", 1)) if self.phase == "Failed" else None
        """Exit code of a failed pod, 1 if it was evicted before its container ran; None: it has not failed."""
        reason = str(terminated.get("reason") or status.get("reason") or status.get("message") or "")
        # Error adds nothing to the exit code, OOMKilled or Evicted does
        self.ending = f"exit code {self.exit_code}" + (f" ({reason})" if reason not in ("", "Error") else "")
        self.ended_at = str(terminated.get("finishedAt", ""))
        conditions = status.get("conditions", [])
        unscheduled = (each for each in conditions if each["type"] == "PodScheduled" and each["status"] == "False")
        waiting = next(unscheduled, state.get("waiting", {}))
        self.waits_for = ""
        """Reason why the pod does not run yet; empty: there is no particular reason."""
        if self.phase == "Pending" and waiting and waiting.get("reason") not in _NO_REASONS:
            self.waits_for = f"{waiting.get('reason', '')}: {waiting.get('message', '')}"

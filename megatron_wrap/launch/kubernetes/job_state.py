"""What TrainJobs and pods are doing, from the objects that kubectl returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from megatron_wrap.launch.kubernetes.manifest import CONTAINER

Object = Mapping[str, Any]
"""Of Kubernetes, as JSON."""
_JOB_SET, _INDEX = "jobset.sigs.k8s.io", "batch.kubernetes.io/job-completion-index"
_NO_REASONS = {"ContainerCreating", "PodInitializing"}
"""Why a container that starts as usual is waiting."""


class Failure(NamedTuple):
    """A pod that has failed."""

    pod: str
    exit_code: int
    reason: str
    """Of Kubernetes, such as OOMKilled; empty for Error, which adds nothing to the exit code."""


def pod_selector(name: str, first: bool = False) -> str:
    """The labels of the pods of a TrainJob.

    Args:
        first: of the first node alone.
    """
    labels = f"{_JOB_SET}/jobset-name={name}"
    return f"{labels},{_INDEX}=0" if first else labels


def ended_condition(job: Object) -> Object | None:
    """The condition that ended a TrainJob, of the type Complete or Failed; None: it has not ended."""
    for condition in job.get("status", {}).get("conditions", []):
        if condition.get("type") in ("Complete", "Failed") and condition.get("status") == "True":
            return condition  # type: ignore[no-any-return]
    return None


def name_of(pod: Object) -> str:
    """The name of a pod."""
    return str(pod["metadata"]["name"])


def is_first(pod: Object) -> bool:
    """Whether rank 0 runs in it."""
    return str(pod["metadata"].get("labels", {}).get(_INDEX)) == "0"


def phase(pod: Object) -> str:
    """Pending, Running, Succeeded or Failed."""
    return str(pod.get("status", {}).get("phase", "Pending"))


def in_order(pods: Iterable[Object]) -> list[Object]:
    """Pods by the time when they were created."""
    return sorted(pods, key=lambda pod: str(pod["metadata"].get("creationTimestamp", "")))


def failure(pod: Object) -> Failure | None:
    """How a pod has failed; None: it has not."""
    if phase(pod) != "Failed":
        return None
    ended = _container(pod).get("state", {}).get("terminated")
    if ended is None:  # evicted before its container ran, or its node is lost
        status = pod.get("status", {})
        return Failure(name_of(pod), 1, str(status.get("reason") or status.get("message") or "no exit code"))
    reason = str(ended.get("reason", ""))
    return Failure(name_of(pod), int(ended.get("exitCode", 1)), "" if reason == "Error" else reason)


def first_failure(pods: Iterable[Object]) -> Failure | None:
    """The pod that failed first since all pods were last started; one that refused a wrong input comes first."""
    latest = max((_attempt(pod) for pod in pods), default=0)
    failures = [(pod, failed) for pod in pods if _attempt(pod) == latest and (failed := failure(pod)) is not None]
    if not failures:
        return None
    return min(failures, key=lambda each: (each[1].exit_code != 2, _ended_at(each[0])))[1]


def waits_for(pod: Object) -> str:
    """Why a pod does not run yet; empty: there is no particular reason."""
    for condition in pod.get("status", {}).get("conditions", []):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}"
    waiting = _container(pod).get("state", {}).get("waiting", {})
    if not waiting or waiting.get("reason") in _NO_REASONS:
        return ""
    return f"{waiting.get('reason', '')}: {waiting.get('message', '')}"


def _container(pod: Object) -> Object:
    statuses = pod.get("status", {}).get("containerStatuses", [])
    return next((status for status in statuses if status.get("name") == CONTAINER), {})


def _attempt(pod: Object) -> int:
    return int(pod["metadata"].get("labels", {}).get(f"{_JOB_SET}/restart-attempt", 0))


def _ended_at(pod: Object) -> str:
    return str(_container(pod).get("state", {}).get("terminated", {}).get("finishedAt", ""))

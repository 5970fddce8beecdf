"""The manifest of a run on Kubernetes: its configuration, a TrainingRuntime and a TrainJob of Kubeflow Trainer v2.

Trainer makes a JobSet of them, with one pod for each node. In each pod runs `megatron-wrap ... --launcher local`, with
torchrun's variables (PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR, ...) from Trainer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_wrap.config.schema.launch.kubernetes import KubernetesConfig
from megatron_wrap.errors import ConfigError
from megatron_wrap.hidden_secrets import hide_secrets
from megatron_wrap.launch.kubernetes.commented_yaml import Noted, comment, commented_yaml
from megatron_wrap.parallel.watch.interrupts import RESUME

CONFIG_FOLDER = "/etc/megatron-wrap"
"""Folder of a pod with the run's YAML."""
CONTAINER = "node"
"""Trainer's name of the container that trains, and of the group of its pods."""
_API = "trainer.kubeflow.org"
_MAX_CONFIG_BYTES = 900_000
"""Of the YAML and its overlay; Kubernetes refuses objects above 1 MiB."""


@dataclass(frozen=True)
class Pods:
    """What runs in the pods."""

    name: str
    """Of all objects."""
    command: tuple[str, ...]
    """Arguments of `megatron-wrap`."""
    files: Mapping[str, str]
    """Path below `CONFIG_FOLDER` -> content."""
    num_nodes: int
    processes_per_node: int
    on_gpus: bool
    grace_seconds: int
    """Between SIGTERM and SIGKILL."""


def manifest(pods: Pods, settings: KubernetesConfig) -> str:
    """The three objects as commented YAML.

    Raises:
        ConfigError: it would contain a secret, or the files are too large for a ConfigMap.
    """
    size = sum(len(text.encode()) for text in pods.files.values())
    if size > _MAX_CONFIG_BYTES:
        raise ConfigError(
            f"the YAML and its overlay have {size:,} bytes, and a ConfigMap of Kubernetes takes {_MAX_CONFIG_BYTES:,}"
        )
    title = comment(
        f"Written by megatron-wrap: {pods.name} on {pods.num_nodes} x {pods.processes_per_node} processes. "
        "Needs Kubeflow Trainer v2 in the cluster."
    )
    documents = [_config_map(pods, settings), _runtime(pods, settings), _train_job(pods, settings)]
    text = "\n".join(title) + "\n" + "---\n".join(map(commented_yaml, documents))
    if hide_secrets(text) != text:
        line = next(line for line in text.split("\n") if hide_secrets(line) != line)
        raise ConfigError(
            f"the manifest would contain a secret, in the line {hide_secrets(line).strip()!r}; put it into a Secret of "
            "Kubernetes, and name that in megatron_wrap.launch.kubernetes.secret_env"
        )
    return text


def _metadata(pods: Pods, settings: KubernetesConfig, labels: Mapping[str, str] = {}) -> dict[str, Any]:
    all_labels = {"app.kubernetes.io/managed-by": "megatron-wrap", **labels}
    return {"name": pods.name, "namespace": settings.namespace, "labels": all_labels}


def _config_map(pods: Pods, settings: KubernetesConfig) -> dict[str, Any]:
    data = {_data_key(path): text for path, text in pods.files.items()}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(pods, settings),
        "data": Noted(data, f"the run's YAML as it was when the job was written; pods see it in {CONFIG_FOLDER}"),
    }


def _data_key(path: str) -> str:
    """A key of a ConfigMap has no slash."""
    return path.replace("/", "__")


def _runtime(pods: Pods, settings: KubernetesConfig) -> dict[str, Any]:
    no_restart = {
        "name": Noted("wrong_input", "but not after exit code 2 (podFailurePolicy)"),
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    job_set = {
        "failurePolicy": {
            "maxRestarts": Noted(
                settings.max_restarts,
                "after a failure all pods are started again, and resume from the newest checkpoint",
            ),
            "rules": [no_restart],
        },
        "replicatedJobs": [
            {
                "name": CONTAINER,
                "template": {
                    "metadata": {"labels": {f"{_API}/trainjob-ancestor-step": "trainer"}},
                    "spec": _job(pods, settings),
                },
            }
        ],
    }
    return {
        "apiVersion": f"{_API}/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(pods, settings, {f"{_API}/framework": "torch"}),
        "spec": {"mlPolicy": {"numNodes": pods.num_nodes, "torch": {}}, "template": {"spec": job_set}},
    }


def _job(pods: Pods, settings: KubernetesConfig) -> dict[str, Any]:
    def exit_code(value: int, action: str, note: str) -> dict[str, Any]:
        codes = {"containerName": CONTAINER, "operator": "In", "values": [value]}
        return {"action": Noted(action, note), "onExitCodes": codes}

    condition = {"type": "DisruptionTarget", "status": "True"}
    disrupted = {"action": Noted("Ignore", "an evicted pod is no failure"), "onPodConditions": [condition]}
    rules = [
        exit_code(RESUME, "Ignore", f"exit code {RESUME}: stopped by a signal and saved; a new pod resumes"),
        exit_code(2, "FailJob", "exit code 2: a wrong input, which a restart would not correct"),
        disrupted,
    ]
    return {
        "backoffLimit": Noted(0, "the first pod that fails ends the others, which would wait for it"),
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": _pod(pods, settings)},
    }


def _pod(pods: Pods, settings: KubernetesConfig) -> dict[str, Any]:
    volumes, mounts = _volumes(pods, settings)
    variables: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in settings.env.items()]
    for entry in settings.secret_env:
        name, secret, key = re.split("[=/]", entry)
        variables.append({"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}})
    container = {
        "name": CONTAINER,
        "image": settings.image,
        "imagePullPolicy": settings.image_pull_policy,
        "workingDir": settings.working_dir,
        "envFrom": [{"secretRef": {"name": name}} for name in settings.env_from_secrets] or None,
        "env": variables or None,
        "volumeMounts": mounts,
    }
    grace = Noted(pods.grace_seconds, "after SIGTERM the run finishes its step, saves and ends")
    return {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace,
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets] or None,
        "nodeSelector": settings.node_selector or None,
        "tolerations": list(settings.tolerations) or None,
        **settings.pod,
        "containers": [container],
        "volumes": volumes,
    }


def _volumes(pods: Pods, settings: KubernetesConfig) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes of a pod, and where its container mounts them."""
    items = [{"key": _data_key(path), "path": path} for path in pods.files]
    memory = {"medium": "Memory", "sizeLimit": settings.shared_memory}
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": pods.name, "items": items}},
        {
            "name": "shared-memory",
            "emptyDir": Noted(memory, "/dev/shm of a container has 64 MiB, too little for NCCL and data workers"),
        },
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
    ]
    for number, (path, source) in enumerate(settings.volumes.items()):
        name = f"volume-{number}"
        claim = {"persistentVolumeClaim": {"claimName": source}} if isinstance(source, str) else source
        volumes.append({"name": name, **claim})
        mounts.append({"name": name, "mountPath": path})
    return volumes, mounts


def _train_job(pods: Pods, settings: KubernetesConfig) -> dict[str, Any]:
    resources = dict(settings.resources)
    if pods.on_gpus:
        resources[settings.gpu_resource] = pods.processes_per_node
    return {
        "apiVersion": f"{_API}/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(pods, settings, settings.labels),
        "spec": {
            "runtimeRef": {"apiGroup": _API, "kind": "TrainingRuntime", "name": pods.name},
            "trainer": {
                "image": settings.image,
                "command": ["megatron-wrap", *map(_literal, pods.command)],
                "numNodes": pods.num_nodes,
                "numProcPerNode": pods.processes_per_node,
                "resourcesPerNode": {"limits": resources, "requests": resources} if resources else None,
            },
        },
    }


def _literal(word: str) -> str:
    """A word of a command in which Kubernetes replaces no variable."""
    return word.replace("$(", "$$(")


def words_of(command: Sequence[str], name: str) -> tuple[str, ...]:
    """The arguments of `megatron-wrap` in a pod; overrides of launchers have no effect there.

    Args:
        command: SUBCOMMAND CONFIG ... as typed here.
        name: of the run.
    """
    subcommand, _, *rest = command
    rest = [word for word in rest if not word.startswith("megatron_wrap.launch.")]
    return (subcommand, f"{CONFIG_FOLDER}/{name}.yaml", "--launcher", "local", *rest)

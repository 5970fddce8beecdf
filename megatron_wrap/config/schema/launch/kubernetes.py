"""The TrainJob of a run on Kubernetes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_wrap.config.schema.keys import key


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """`megatron_wrap.launch.kubernetes`: the TrainJob that `--launcher kubernetes` writes and applies
    (docs/cluster.md)."""

    name: str | None = None
    """Of the TrainJob; null: the name of the YAML in lower case, with - for what is no letter or digit."""
    namespace: str | None = None
    """Namespace of all objects; null: that of kubectl's context."""
    context: str | None = None
    """Context of kubectl's configuration; null: the current one."""
    manifest: str | None = None
    """File that the manifest is written to, on this machine; null: trainjob.yaml in the run's output folder."""
    image: str = "megatron-wrap"
    """Image of the pods, with its registry; the default is built from environment/test_environment/Dockerfile."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When a node pulls the image; null: Always with the tag latest or none, else IfNotPresent."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets for the registry."""
    working_dir: str | None = None
    """Working directory of the run, to which its relative paths refer; null: that of the image,
    /workspace/megatron-wrap."""
    volumes: Mapping[str, Any] = key({})
    """Where pods mount a volume -> name of a PersistentVolumeClaim, or a volume source of Kubernetes, such as
    {/data: datasets, /scratch: {hostPath: {path: /mnt/scratch}}}."""
    shared_memory: str | None = None
    """Size limit of /dev/shm, such as 16Gi; null: the memory of the pod."""
    env: Mapping[str, Any] = key({})
    """Environment variables. Not for secrets: they are refused."""
    secret_env: tuple[str, ...] = ()
    """Environment variables from Secrets, each VARIABLE=SECRET/KEY, such as [WANDB_API_KEY=wandb/api-key]."""
    env_from_secrets: tuple[str, ...] = ()
    """Names of Secrets whose keys all become environment variables."""
    resources: Mapping[str, Any] = key({})
    """Of each pod in addition to its GPUs, such as {cpu: 32, memory: 256Gi, rdma/ib: 8}; requests and limits."""
    gpu_resource: str = "nvidia.com/gpu"
    """Name of the cluster's resource for GPUs; platform cpu requests none."""
    node_selector: Mapping[str, Any] = key({})
    """Labels that the nodes must have."""
    tolerations: tuple[Mapping[str, Any], ...] = ()
    """Tolerations of Kubernetes, such as [{key: nvidia.com/gpu, operator: Exists}]."""
    labels: Mapping[str, Any] = key({})
    """Labels of the TrainJob, such as {kueue.x-k8s.io/queue-name: research}."""
    pod: Mapping[str, Any] = key({})
    """Further fields of the pods' specification, such as {priorityClassName: high, serviceAccountName: trainer}."""
    max_restarts: int = key(3, at_least=0)
    """Restarts of all pods after failures; evictions and runs that were stopped after a save are not counted."""
    termination_grace_seconds: int | None = key(None, at_least=1)
    """Seconds after SIGTERM until a pod is killed; null: 30 more than stop_within_seconds, 600 without it."""

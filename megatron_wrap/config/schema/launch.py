"""The sections of `megatron_wrap.launch`, which define where and how a run is started."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_wrap.config.schema.keys import key

_OPTIONS_OF = {
    "launch.common.nodes": ("--nodes", "-N"),
    "launch.common.gpus_per_node": ("--ntasks", "-n", "--ntasks-per-node"),
    "launch.slurm.job_name": ("--job-name", "-J"),
    "launch.slurm.partition": ("--partition", "-p"),
    "launch.slurm.account": ("--account", "-A"),
    "launch.slurm.time_limit": ("--time", "-t"),
    "launch.slurm.signal_seconds": ("--signal",),
    "launch.slurm.requeue": ("--requeue", "--no-requeue"),
    "logger.output_dir": ("--output", "-o", "--error", "-e"),
}
RENDERED_OPTIONS = {option: f"megatron_wrap.{owner}" for owner, options in _OPTIONS_OF.items() for option in options}
"""Options of sbatch that follow from a key -> that key."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """`megatron_wrap.launch.common`: what starts the processes of `megatron-wrap train`, `precompute` and `profile`
    (docs/cluster.md)."""

    launcher: Literal["local", "ray", "slurm", "kubernetes"] = "local"
    """local: torchrun's agent on this node; ray: workers of Ray Train; slurm: a job of Slurm; kubernetes: pods of a
    TrainJob. `--launcher` precedes it."""
    nodes: int | None = key(None, at_least=1)
    """Number of nodes; null: 1. `--nodes` precedes it, with local also the variable NNODES."""
    gpus_per_node: int | None = key(None, at_least=1)
    """Processes on each node, one for each GPU or, on platform cpu, one for some of its cores; null: with local one for
    each GPU of this node, else as many as the layout needs. `--gpus-per-node` precedes it, with local also the variable
    GPUS_PER_NODE."""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """`megatron_wrap.launch.slurm`: the job of `--launcher slurm` (docs/cluster.md)."""

    job_name: str | None = None
    """Name of the job, of which only one is queued or runs at a time; null: the YAML's name."""
    partition: str | None = None
    """Partition; null: Slurm's default."""
    account: str | None = None
    """Account; null: Slurm's default."""
    time_limit: str | None = None
    """Time limit as for sbatch, such as 24:00:00 or 2-00:00:00; null: that of the partition."""
    cpus_per_node: int | None = key(None, at_least=1)
    """Cores on each node; null: on platform cpu one for each process, else what Slurm allocates with the GPUs."""
    sbatch_options: tuple[str, ...] = ()
    """Further options of sbatch, such as [--qos=high, --constraint=h100, --exclusive]. With --gres or --gpus-per-task
    among them, --gpus-per-node is left out."""
    srun_options: tuple[str, ...] = ()
    """Further options of srun, such as [--container-image=image.sqsh, --container-mounts=/data] of Pyxis."""
    setup: tuple[str, ...] = ()
    """Lines of bash before the run starts, such as [module load cuda, export NCCL_SOCKET_IFNAME=ib0]."""
    container: str | None = None
    """Command prefix on each node, such as `apptainer exec --nv image.sif`; null: none."""
    python: str | None = None
    """Python on the nodes; null: the one that submits the job, in a container python3."""
    rendezvous_port: int | None = key(None, at_least=1024, at_most=65535)
    """Port on the first node at which the nodes find each other; null: 20000 + the job's number modulo 10000."""
    signal_seconds: int = key(120, at_least=10, at_most=65535)
    """Seconds before the time limit at which the run is asked to save and end. It ends earlier by itself
    if train.common.stop_before_slurm_end_minutes is longer."""
    requeue: bool = True
    """Queue the job again after the run was asked to save and end, and after the failure of a node; it resumes."""
    max_restarts: int = key(3, at_least=0)
    """Times that the job is queued again after other failures; never after exit code 2, a mistake of the user."""


@dataclass(frozen=True, kw_only=True)
class KubernetesConfig:
    """`megatron_wrap.launch.kubernetes`: the TrainJob that `--launcher kubernetes` writes and applies
    (docs/cluster.md)."""

    name: str | None = None
    """Name of the TrainJob; null: the name of the YAML in lower case, with - for each character that is no letter or
    digit."""
    namespace: str | None = None
    """Namespace of all objects; null: that of kubectl's context."""
    context: str | None = None
    """Context of kubectl's configuration; null: the current one."""
    manifest: str | None = None
    """File that the manifest is written to, on this machine; null: trainjob.yaml in the run's output folder."""
    image: str = "megatron-wrap"
    """Image of the pods, with its registry; the default is built from environment/test_environment/Dockerfile."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """Condition on which a node pulls the image; null: Always with the tag latest or none, else IfNotPresent."""
    image_pull_secrets: tuple[str, ...] = ()
    """Names of Secrets for the registry."""
    working_dir: str | None = None
    """Working directory of the run, to which its relative paths refer; null: that of the image,
    /workspace/megatron-wrap."""
    volumes: Mapping[str, Any] = key({})
    """Mount path in the pods -> name of a PersistentVolumeClaim, or a volume source of Kubernetes, such as {/data:
    datasets, /scratch: {hostPath: {path: /mnt/scratch}}}."""
    shared_memory: str | None = None
    """Size limit of /dev/shm, such as 16Gi; null: the memory of the pod."""
    env: Mapping[str, Any] = key({})
    """Environment variables. Not for secrets: they are refused."""
    secret_env: tuple[str, ...] = ()
    """Environment variables from Secrets, each VARIABLE=SECRET/KEY, such as [WANDB_API_KEY=wandb/api-key]."""
    env_from_secrets: tuple[str, ...] = ()
    """Names of Secrets whose keys all become environment variables."""
    resources: Mapping[str, Any] = key({})
    """Requests and limits of each pod in addition to its GPUs, such as {cpu: 32, memory: 256Gi, rdma/ib: 8}."""
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

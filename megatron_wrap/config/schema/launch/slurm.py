"""What a site needs of a Slurm job."""

from dataclasses import dataclass

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
    """Words before the command on each node, such as `apptainer exec --nv image.sif`; null: none."""
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

"""What all launchers share."""

from dataclasses import dataclass
from typing import Literal

from megatron_wrap.config.schema.keys import key


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

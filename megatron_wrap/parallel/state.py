"""This process's ranks in the parallel layout: one `Axis` per kind of parallelism."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_wrap.platform.megatron_core.versions import forget_router_losses

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from megatron_wrap.config.schema.model import ParallelConfig


@dataclass(frozen=True)
class Axis:
    """One parallel axis as this process sees it."""

    size: int
    """Processes along the axis."""
    rank: int
    """This process's rank along the axis, 0 <= rank < size."""
    group: ProcessGroup
    """The process group along the axis that contains this process."""


@dataclass(frozen=True)
class ParallelState:
    """All axes of the layout. `dp` is data parallelism without context parallelism, `dp_cp` is both combined."""

    world: Axis
    tp: Axis
    pp: Axis
    dp: Axis
    cp: Axis
    ep: Axis
    dp_cp: Axis
    expert_tp: Axis
    """Tensor parallelism of the experts: processes with slices of the same expert."""
    expert_dp: Axis
    """Data parallelism of the experts: processes with the same slices of the same experts, (tp * cp * dp) / (ep *
    expert_tp) of them."""
    virtual_size: int | None
    """Model chunks per pipeline stage of an interleaved pipeline; None: one chunk, not interleaved."""
    host_group: ProcessGroup | None = None
    """The processes of `dp` over gloo; None if `dp.group` is over gloo."""

    @property
    def dp_on_host(self) -> ProcessGroup:
        """The processes of `dp` in a group for tensors on the host, whose collectives do not wait for the device."""
        return self.dp.group if self.host_group is None else self.host_group

    @property
    def is_last_stage(self) -> bool:
        """Whether this process has the last pipeline stage, which computes the loss."""
        return self.pp.rank == self.pp.size - 1

    @property
    def counts_once(self) -> bool:
        """Whether this process contributes to sums of losses and metrics: last stage and tensor-parallel rank 0."""
        return self.is_last_stage and self.tp.rank == 0

    @property
    def layout(self) -> str:
        """A short name for log lines, such as `tp2 pp1 cp1 dp4`."""
        return f"tp{self.tp.size} pp{self.pp.size} cp{self.cp.size} dp{self.dp.size}" + (
            f" ep{self.ep.size}" if self.ep.size > 1 else ""
        )


def build_parallel_state(parallel: ParallelConfig, virtual_size: int | None, timeout_minutes: float) -> ParallelState:
    """Create Megatron-Core's process groups for the layout; torch.distributed must be initialized.

    Destroys the groups of an earlier layout first, so the same processes can use several layouts in turn.

    Args:
        virtual_size: model chunks per stage; None: the pipeline is not interleaved.
        timeout_minutes: timeout of a collective.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    from megatron_wrap.parallel import peer_memory

    destroy_parallel_state()
    peer_memory.wait_at_most(timedelta(minutes=timeout_minutes))
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=max(1, round(timeout_minutes)),
        create_gloo_process_groups=True,
    )

    def axis(group: ProcessGroup) -> Axis:
        return Axis(size=group.size(), rank=group.rank(), group=group)

    return ParallelState(
        world=axis(dist.distributed_c10d._get_default_group()),
        tp=axis(mpu.get_tensor_model_parallel_group()),
        pp=axis(mpu.get_pipeline_model_parallel_group()),
        dp=axis(mpu.get_data_parallel_group()),
        cp=axis(mpu.get_context_parallel_group()),
        ep=axis(mpu.get_expert_model_parallel_group()),
        dp_cp=axis(mpu.get_data_parallel_group(with_context_parallel=True)),
        expert_tp=axis(mpu.get_expert_tensor_parallel_group()),
        expert_dp=axis(mpu.get_expert_data_parallel_group()),
        virtual_size=virtual_size,
        host_group=mpu.get_data_parallel_group_gloo(),
    )


def destroy_parallel_state() -> None:
    """Destroy Megatron-Core's process groups and what it recorded of their model; torch.distributed stays initialized.

    Megatron-Core itself only drops its references, and each group would keep the threads that poll its sockets.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    from megatron_wrap.parallel import peer_memory

    if not mpu.model_parallel_is_initialized():
        return
    values = [value if isinstance(value, list) else [value] for value in vars(mpu).values()]
    groups = {id(item): item for value in values for item in value if isinstance(item, dist.ProcessGroup)}
    forget_router_losses()
    peer_memory.release()
    mpu.destroy_model_parallel()
    for group in groups.values():
        if group is not dist.group.WORLD:
            # ValueError: already destroyed, by Megatron-Core (its gloo groups) or under another name
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)


def tensor_parallel_group() -> ProcessGroup:
    """The tensor-parallel group of the current layout: the default of operations without a `group` argument."""
    from megatron.core import parallel_state as mpu

    return mpu.get_tensor_model_parallel_group()

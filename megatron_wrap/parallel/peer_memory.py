"""Memory of the GPUs of one host into which the ranks of a group write directly (torch's symmetric memory). The copy
engines move the data while matmuls run: 32 MiB at 357 GB/s between two H100s, where NCCL's kernels, which take
multiprocessors from the matmuls, reached 190 (2026-11-26)."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_wrap.parallel.nodes import this_node
from megatron_wrap.utils.dist_logger import logger

_READY, _ARRIVED = 0, 1
"""Channels of the signals."""
_MIB = 2**20

_timeout = timedelta(minutes=10)
_memories: dict[str, PeerMemory | None] = {}
"""Memory by the group's name; None: the group's ranks cannot reach each other's memory."""


def peer_memory(group: ProcessGroup, tensor: Tensor) -> PeerMemory | None:
    """The memory of a group whose ranks are GPUs of one host with access to each other; None for other groups, and for
    tensors that are not on a GPU. The first call for a group is collective."""
    if not tensor.is_cuda:
        return None
    name = group.group_name
    if name not in _memories:
        reached = _reach_each_other(group, tensor.device) and _may_share_memory(group, tensor.device)
        _memories[name] = PeerMemory(group, tensor.device) if reached else None
    return _memories[name]


def wait_at_most(timeout: timedelta) -> None:
    """Limit how long the GPU waits for another rank; then the process ends with an error, as after a collective of
    NCCL."""
    global _timeout
    _timeout = timeout


def release() -> None:
    """Free the memory of all groups, before the groups are destroyed."""
    _memories.clear()


def _reach_each_other(group: ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks are on one host, whose GPUs write into each other's memory; collective."""
    here = (socket.gethostname(), this_node().index, device.index)
    addresses = _gathered(here, group)
    same_host = len({address[:2] for address in addresses}) == 1
    others = {index for *_, index in addresses} - {device.index}
    visible = len(others) == group.size() - 1 and max(others, default=0) < torch.cuda.device_count()
    reachable = same_host and visible and all(torch.cuda.can_device_access_peer(device, other) for other in others)
    return all(_gathered(reachable, group))


def _may_share_memory(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the system lets the processes share memory, which some containers forbid. It is tried with a small
    region; collective."""
    problem = ""
    try:
        _Region(group, device, 1)
    except RuntimeError as error:
        problem = str(error).strip().partition("\n")[0]
    problems = [text for text in _gathered(problem, group) if text]
    if problems:
        logger.warning_rank_0(f"NCCL sends between the GPUs of this host, whose memory cannot be shared: {problems[0]}")
    return not problems


def _gathered(value: Any, group: ProcessGroup) -> list[Any]:
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values


class PeerMemory:
    """One region for each purpose in the memory of each rank. A purpose has one exchange at a time, on one stream, and
    what has arrived from a rank stays valid until its next exchange with that rank begins."""

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device
        self._regions: dict[str, _Region] = {}
        self._outgrown: list[_Region] = []  # captured CUDA graphs may write there

    def exchange(
        self,
        purpose: str,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        sources: Sequence[int] | None = None,
        targets: Sequence[int] | None = None,
    ) -> PeerExchange:
        """Begin to exchange tensors of this shape (the same on each rank); collective.

        Args:
            sources: ranks of the group that send to this one; None: all others.
            targets: ranks to which this one sends; None: all others.
        """
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        region = self._regions.get(purpose)
        if region is None or region.nbytes < nbytes:
            self._outgrown += [] if region is None else [region]
            region = self._regions[purpose] = _Region(self._group, self._device, nbytes)
        others = [rank for rank in range(self._group.size()) if rank != self._group.rank()]
        partners = others if sources is None else sources, others if targets is None else targets
        return PeerExchange(region, self._group.rank(), shape, dtype, *partners)


class PeerExchange:
    """Tensors of one shape, one from each source and one to each target. A rank signals that its region is free when
    its stream has come to the beginning of the exchange; then the sources write.

    The signal that a tensor has arrived is queued in `finish`: with one hardware queue (`CUDA_DEVICE_MAX_CONNECTIONS`)
    kernels queued after it would wait for the copy.
    """

    def __init__(
        self,
        region: _Region,
        rank: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        sources: Sequence[int],
        targets: Sequence[int],
    ) -> None:
        self._region, self._rank, self._sources, self._targets = region, rank, sources, targets
        self._views = region.views(shape, dtype)
        self._sent: list[Tensor] = []  # they must not be freed before they are copied
        region.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(region.stream):
            for source in sources:
                region.handle.put_signal(source, _READY, region.timeout_ms)

    def send(self, target: int, *tensors: Tensor, produced: bool = True) -> None:
        """Begin to copy contiguous tensors to a target, or to this rank's own index, once for each.

        Args:
            tensors: tensors that are concatenated in the target's memory, with at most as many elements in total as the
                shape has.
            produced: whether work queued since the beginning of the exchange produces them; the copies then wait for
                it.
        """
        region = self._region
        if produced:
            region.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(region.stream):
            if target != self._rank:
                region.handle.wait_signal(target, _READY, region.timeout_ms)
            memory, start = self._views[target][self._rank].view(-1), 0
            for tensor in tensors:
                memory.narrow(0, start, tensor.numel()).view(tensor.shape).copy_(tensor, non_blocking=True)
                start += tensor.numel()
        self._sent += tensors

    def finish(self) -> Tensor:
        """Let the current stream wait until all tensors have arrived, and until those that were sent can be reused.

        Returns:
            Tensors by sender, [ranks, *shape]: those of the sources, and this rank's own if it has sent to itself;
            others are undefined.
        """
        region = self._region
        with torch.cuda.stream(region.stream):
            for target in self._targets:
                region.handle.put_signal(target, _ARRIVED, region.timeout_ms)
        torch.cuda.current_stream().wait_stream(region.stream)
        for source in self._sources:
            region.handle.wait_signal(source, _ARRIVED, region.timeout_ms)
        self._sent.clear()
        return self._views[self._rank]


class _Region:
    """Memory for `nbytes` from each rank, and the stream that copies into the others'."""

    def __init__(self, group: ProcessGroup, device: torch.device, nbytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        self.nbytes = max(2 * _MIB, 1 << (nbytes - 1).bit_length())
        self.timeout_ms = int(_timeout / timedelta(milliseconds=1))
        self._ranks = group.size()
        # kept: the views do not own it, and what is freed can be allocated again
        self._memory = symmetric.empty(group.size() * self.nbytes, dtype=torch.uint8, device=device)
        # before pytorch/pytorch#192308 the default stream sets the signals to 0 and nothing waits for it: one that a
        # faster rank sends after the rendezvous would be lost
        torch.cuda.default_stream(device).synchronize()
        self.handle: Any = symmetric.rendezvous(self._memory, group)
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._views: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}

    def views(self, shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
        """Tensor of each receiver, [senders, *shape], contiguous."""
        key = shape, dtype
        if key not in self._views:
            self._views[key] = [
                self.handle.get_buffer(rank, (self._ranks, *shape), dtype) for rank in range(self._ranks)
            ]
        return self._views[key]

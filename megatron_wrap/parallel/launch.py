"""The processes of a run: torch.distributed's start and end, and errors that are said once."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_wrap.errors import MegatronWrapError


@dataclass(frozen=True)
class Processes:
    """This process among all of the run."""

    rank: int
    world_size: int
    local_rank: int
    owns_group: bool
    """Whether `start` initialized torch.distributed and `stop` has to destroy it."""


def environment_rank() -> int:
    """Global rank as torchrun set it, 0 without torchrun."""
    return int(os.environ.get("RANK", "0"))


def environment_world_size() -> int:
    """Number of processes: of the group that exists, else as torchrun set it, 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


def start(backend: str, device: torch.device, timeout_minutes: float) -> Processes:
    """Initialize torch.distributed from torchrun's environment, or as one process without it.

    A process group that the caller initialized already is used as it is.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if dist.is_initialized():
        return Processes(dist.get_rank(), dist.get_world_size(), local_rank, owns_group=False)
    timeout = timedelta(minutes=timeout_minutes)
    if "RANK" in os.environ:
        store, rank, world_size = _rendezvous(timeout)
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timeout, device_id=device_id
        )
    else:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
    return Processes(dist.get_rank(), dist.get_world_size(), local_rank, owns_group=True)


def _rendezvous(timeout: timedelta) -> tuple[dist.Store, int, int]:
    """Store, rank and number of processes that torchrun's environment names.

    torchrun's store outlives a process group. A program's second run would find the addresses of the first there, so
    that each start has names of its own.
    """
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    starts = store.add(f"megatron_wrap/starts_of_rank_{rank}", 1)
    return dist.PrefixStore(f"megatron_wrap/start_{starts}", store), rank, world_size


def stop(processes: Processes) -> None:
    """Destroy the process group if `start` made it."""
    if processes.owns_group and dist.is_initialized():
        dist.destroy_process_group()


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """For entry points: print a `MegatronWrapError` once over all ranks and leave with its exit code.

    The first rank that claims the message in the rendezvous store prints it. Before there is a store every rank has
    read the same configuration, so rank 0 prints.
    """
    try:
        yield
    except MegatronWrapError as error:
        if _claim_message():
            print(f"error: {error}", file=sys.stderr, flush=True)  # noqa: T201
        # The others may wait in a collective for this rank: no destructor of a process group may wait for them.
        sys.stdout.flush()
        os._exit(error.exit_code) if dist.is_initialized() else sys.exit(error.exit_code)


def _claim_message() -> bool:
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return environment_rank() == 0
    try:
        return dist.distributed_c10d._get_default_store().add("megatron_wrap/error_said", 1) == 1
    except Exception:  # the store went down with another rank, which has said its own message
        return False

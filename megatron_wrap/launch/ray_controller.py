"""Code that runs in Ray's controller. It gives workers the environment of ranks, and ends the run after a user's error.

Imports neither torch nor the configuration: the controller would import them before any worker starts.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig

from megatron_wrap.errors import MegatronWrapError

NODES = "MEGATRON_WRAP_RAY_NODES"
"""Environment variable with the nodes of all workers, in the order of Ray's ranks."""


class RankConfig(BackendConfig):
    """Gives workers torchrun's variables instead of starting a process group, as Ray's TorchConfig does: `initialize()`
    starts it, as under torchrun, with its timeout and after a comparison of the nodes' packages."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The backend class that Ray's controller calls."""
        return _Ranks


class _Ranks(Backend):
    share_cuda_visible_devices = True  # LOCAL_RANK is an index into the GPUs of all workers of a node

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Called in Ray's controller when the workers exist."""
        nodes, addresses, ports = zip(*worker_group.execute(_node_and_address), strict=True)
        worker_group.execute(_become_rank, addresses[0], ports[0], nodes)


def _node_and_address() -> tuple[str, str, int]:
    """Ray's name of this node, its address, and a port that is free there."""
    address = ray.util.get_node_ip_address()
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind(("", 0))
        return ray.get_runtime_context().get_node_id(), address, probe.getsockname()[1]


def _become_rank(address: str, port: int, nodes: Sequence[str]) -> None:
    context = ray.train.get_context()
    os.environ.update(
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        RANK=str(context.get_world_rank()),
        WORLD_SIZE=str(context.get_world_size()),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
        NODE_RANK=str(context.get_node_rank()),
    )
    os.environ[NODES] = ",".join(nodes)


class UserErrors(ray.train.UserCallback):
    """Ends the run after a user's error, which would occur again after a restart."""

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Called in Ray's controller."""
        for _, error in sorted(worker_exceptions.items()):
            if isinstance(error, MegatronWrapError):
                raise ray.train.ControllerError(error)

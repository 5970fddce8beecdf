"""Communication of one node's processes over the loopback interface only, because torch's rendezvous unpickles received
data."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_wrap.errors import LayoutError

ADDRESS = "127.0.0.1"
BACKEND = "megatron_wrap_loopback"
"""Name of the rendezvous for `torch.distributed.launcher.api.LaunchConfig`."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def loopback_store(timeout: timedelta, port: int = 0) -> dist.TCPStore:
    """A store that this process serves, and that only processes of this node reach; TCPStore itself listens on every
    interface.

    Args:
        port: port to listen on; 0: a free one.

    Raises:
        LayoutError: the port is taken.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((ADDRESS, port))
        except OSError as error:
            raise LayoutError(
                f"port {port} of {ADDRESS} cannot be used ({error.strerror}); set MASTER_PORT to another one"
            ) from error
        listening.listen(1024)
        port = listening.getsockname()[1]
        # the libuv backend takes no socket; the store owns the descriptor
        return dist.TCPStore(
            ADDRESS,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listening.detach(),
            use_libuv=False,
        )


def prefer_loopback() -> None:
    """Let gloo and NCCL of the processes that are started from here listen on the loopback interface, unless the
    environment names another one."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    for variable in _INTERFACE_VARIABLES if names else ():
        os.environ.setdefault(variable, names[0])


def register_rendezvous() -> None:
    """Make BACKEND known to torchrun's launcher: the rendezvous of one agent, whose ranks use its store."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, _rendezvous)


def _rendezvous(parameters: Any) -> Any:
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    class LoopbackRendezvous(StaticTCPRendezvous):
        """StaticTCPRendezvous of one node, on the loopback interface."""

        def get_backend(self) -> str:
            return BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            if self._store is None:
                self._store = loopback_store(self.timeout, self.master_port)
            port = self._store.port  # type: ignore[attr-defined]
            prefixed = dist.PrefixStore(self.run_id, self._store)
            return RendezvousInfo(prefixed, 0, 1, RendezvousStoreInfo(ADDRESS, port))

    port = int(parameters.endpoint.rpartition(":")[2])
    return LoopbackRendezvous(ADDRESS, port, 0, 1, parameters.run_id, int(parameters.config.get("timeout", 600)))

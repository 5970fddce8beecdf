"""Torchrun's rendezvous c10d for a fixed number of nodes, which find each other at one address of the first node."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

BACKEND = "megatron_wrap_c10d"
"""Name of the rendezvous for `torch.distributed.launcher.api.LaunchConfig`."""

_JOIN_SECONDS = 600
"""That a node waits for the others, as torch's own default."""


def register_rendezvous() -> None:
    """Make BACKEND known to torchrun's launcher. Its configuration has `rank`, the number of this node."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(BACKEND, _rendezvous)


def _rendezvous(parameters: Any) -> Any:
    """The handler of torch's c10d, with three differences.

    The order of the nodes is that of their numbers, not of their host names. Ranks use the store at the endpoint, which
    their agents have just reached: the host name of another node may have no address. An agent looks for no further
    nodes, since their number is fixed, and therefore survives that of the first node while its own processes save.
    """
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

    class FixedNodes(DynamicRendezvousHandler):
        """See `_rendezvous`."""

        def get_backend(self) -> str:
            return BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            joined = super().next_rendezvous()
            return RendezvousInfo(joined.store, int(parameters.config["rank"]), joined.world_size, endpoint)

        @property
        def use_agent_store(self) -> bool:
            return True

        def num_nodes_waiting(self) -> int:
            return 0

    # the node whose name comes first would open a second store, at its host name
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    backend, store = create_backend(parameters)
    endpoint = RendezvousStoreInfo(store.host, store.port)  # type: ignore[attr-defined]
    nodes = parameters.min_nodes, parameters.max_nodes
    join = timedelta(seconds=int(parameters.config.get("join_timeout", _JOIN_SECONDS)))
    return FixedNodes.from_backend(parameters.run_id, store, backend, *nodes, timeout=RendezvousTimeout(join=join))

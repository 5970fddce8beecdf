"""All gloo process groups of a process share one device, and with it the thread that waits for its sockets.

torch makes a device for each group, and Megatron-Core makes some twenty groups for a small layout: as many threads that
wake a hundred times a second, a sixth of the CPU time of four processes on two cores, and up to 10 ms to end each.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed

from megatron_wrap.platform.replacements import Replacements


def share_device(replacements: Replacements) -> None:
    """Let the gloo groups that torch makes from now on share a device, until the replacements are undone."""
    if not torch.distributed.is_gloo_available():
        return
    module: Any = torch.distributed.distributed_c10d
    backend = module.ProcessGroupGloo
    devices: list[Any] = []

    class OneDevice(type):
        """Stands for the backend's class where torch calls it and asks for instances of it."""

        def __call__(cls, *arguments: Any, **named: Any) -> Any:
            if len(arguments) != 3 or named.keys() != {"timeout"}:
                # not as torch 2.10 to 2.13 call it (2.14 gives one more argument): torch's own, with its own device
                return backend(*arguments, **named)
            devices[:] = devices or _devices(backend)
            options = backend._Options()
            options._devices = devices
            options._threads = 2 * len(devices)
            options._timeout = named["timeout"]
            return backend(*arguments, options)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, backend)

    replacements.set(module, "ProcessGroupGloo", OneDevice("ProcessGroupGloo", (), {}))


def _devices(backend: Any) -> list[Any]:
    """Those that torch would make for each group (ProcessGroupGloo.cpp, and the binding's default constructor)."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(names) > 1:
        return [backend.create_device(interface=name) for name in names.split(",")]
    return [backend.create_default_device()]

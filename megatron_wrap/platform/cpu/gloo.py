"""Share one gloo device, and its socket polling thread, among all gloo process groups of a process.

torch creates one device per group, and Megatron-Core creates about twenty groups even for a small layout. Each device
has a thread that wakes up a hundred times a second. Together they took a sixth of the CPU time of four processes on two
cores, and each took up to 10 ms to stop.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed

from megatron_wrap.platform.megatron_core.replacements import Replacements


def share_device(replacements: Replacements) -> None:
    """Make all gloo groups that torch creates from now on share a device, until the replacements are undone."""
    if not torch.distributed.is_gloo_available():
        return
    module: Any = torch.distributed.distributed_c10d
    backend = module.ProcessGroupGloo
    devices: list[Any] = []

    class SharedDevice(type):
        """Metaclass of a replacement for ProcessGroupGloo: calls create a backend on the shared device."""

        def __call__(cls, *arguments: Any, **named: Any) -> Any:
            if len(arguments) != 3 or named.keys() != {"timeout"}:
                # not the call of torch 2.10 to 2.13 (2.14 has one more argument): use a separate device
                return backend(*arguments, **named)
            devices[:] = devices or _devices(backend)
            options = backend._Options()
            options._devices = devices
            options._threads = 2 * len(devices)
            options._timeout = named["timeout"]
            return backend(*arguments, options)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, backend)

    replacements.set(module, "ProcessGroupGloo", SharedDevice("ProcessGroupGloo", (), {}))


def _devices(backend: Any) -> list[Any]:
    """The devices that torch would create for a group (ProcessGroupGloo.cpp, and the binding's default constructor)."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(names) > 1:
        return [backend.create_device(interface=name) for name in names.split(",")]
    return [backend.create_default_device()]

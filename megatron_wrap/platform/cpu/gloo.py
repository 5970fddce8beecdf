"""Share one gloo device, and its socket polling thread, among all gloo process groups of a process.

torch creates one device per group, and Megatron-Core creates about twenty groups even for a small layout. Each device
has a thread that wakes up a hundred times a second. Together they took a sixth of the CPU time of four processes on two
cores, and each took up to 10 ms to stop.

That thread gives way to all others. While a thread that sends holds a connection's lock, it polls without a pause, for
a whole time slice if it has preempted the sender. This doubled the CPU time of collectives of four processes on two
cores.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch.distributed

from megatron_wrap.platform.megatron_core.undoable_changes import Replacements

_NICE = 5
_THREADS = "/proc/self/task"


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
                # not the call of torch 2.11 to 2.13 (2.14 has one more argument): use a separate device
                return backend(*arguments, **named)
            devices[:] = devices or _devices_that_give_way(backend)
            options = backend._Options()
            options._devices = devices
            options._threads = 2 * len(devices)
            options._timeout = named["timeout"]
            return backend(*arguments, options)

        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, backend)

    replacements.set(module, "ProcessGroupGloo", SharedDevice("ProcessGroupGloo", (), {}))


def _devices_that_give_way(backend: Any) -> list[Any]:
    """Devices whose threads preempt no other thread, where threads have such priorities (Linux)."""
    before = _threads()
    devices = _devices(backend)
    for thread in _threads() - before:
        with contextlib.suppress(OSError):  # a container may not allow it
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, thread, _NICE)
    return devices


def _threads() -> set[int]:
    """The threads of this process; empty where the system does not list them."""
    return set(map(int, os.listdir(_THREADS))) if os.path.isdir(_THREADS) else set()


def _devices(backend: Any) -> list[Any]:
    """The devices that torch would create for a group (ProcessGroupGloo.cpp, and the binding's default constructor)."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(names) > 1:
        return [backend.create_device(interface=name) for name in names.split(",")]
    return [backend.create_default_device()]

"""CPU processes over gloo: makes Megatron-Core run without CUDA.

Megatron-Core's modules get a proxy of `torch` (`torch_view.py`). The proxy's `cuda` reports no GPU and the CPU as the
current device, and its tensor factories treat device="cuda" as "cpu". An import hook injects the proxy into modules
that are imported later, before their code runs, together with an `__import__` that hides Transformer Engine and other
CUDA packages. In modules that are already imported, the names are rebound.

The host program's `torch` and imports do not change, except for three Tensor methods that behave differently when
Megatron-Core calls them. A few of Megatron-Core's functions are replaced (`replaced_functions.py`). `uninstall`
restores everything except the malloc thresholds (`keep_freed_memory`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from megatron_wrap.errors import PlatformError
from megatron_wrap.platform.base.platform import GIB, NEEDS_CUDA, WITHOUT_FUSED_KERNELS, Platform
from megatron_wrap.platform.cpu.replaced_functions import replace_functions
from megatron_wrap.platform.cpu.torch_view import MegatronFinder, TorchView, replace_tensor_methods
from megatron_wrap.platform.megatron_core import adam, repairs
from megatron_wrap.platform.megatron_core.undoable_changes import Replacements

# Packages whose classes and functions Megatron-Core binds when it is imported.
_BOUND_AT_IMPORT = frozenset({"transformer_engine", "transformer_engine_torch", "apex", "amp_C"})


class CpuPlatform(Platform):
    """CPU processes; see the module docstring."""

    name = "cpu"
    backend = "gloo"

    def __init__(self) -> None:
        super().__init__()
        self._view = TorchView()  # reused by a later install: imported modules keep a reference to it

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def has_transformer_engine(self) -> bool:
        """False: Transformer Engine's kernels need CUDA."""
        return False

    def _install(self, replacements: Replacements, environment: Mapping[str, str]) -> None:
        if any(isinstance(finder, MegatronFinder) for finder in sys.meta_path):
            return  # another CpuPlatform is installed in this process
        loaded = self._view.megatron_modules()
        _refuse_loaded_cuda_packages([module for module in loaded if not self._view.is_known(module)])
        keep_freed_memory()
        share_device(replacements)
        finder = MegatronFinder(self._view)
        sys.meta_path.insert(0, finder)
        replacements.callback(lambda: sys.meta_path.remove(finder))
        self._view.active = True
        replacements.callback(self._view.deactivate)
        for module in loaded:
            self._view.rebind(module, replacements)
        replace_tensor_methods(replacements)
        with repairs.quiet_import():
            replace_functions(self._view.users, replacements)
            adam.use_in_megatron(replacements)
            repairs.repair(replacements)

    def seed(self, seed: int) -> None:
        """Seed the CPU's generator. `torch.manual_seed` would also record the stack of this call for each kind of
        device that is not in use yet, which takes 5 ms."""
        torch.default_generator.manual_seed(seed)

    def synchronize(self) -> None:
        """No-op: CPU operations are synchronous."""

    def empty_cache(self) -> None:
        """No-op: there is no cache."""

    def memory_gib(self) -> dict[str, float]:
        """Resident memory of this process in GiB: current (as both allocated and reserved) and peak."""
        import psutil

        now = psutil.Process().memory_info().rss / GIB
        peak = _peak_bytes() / GIB
        return {"memory_allocated": now, "memory_reserved": now, "memory_max": max(peak, now)}

    def total_memory_bytes(self) -> int:
        """Memory of the host in bytes, which its processes share."""
        import psutil

        return int(psutil.virtual_memory().total)

    def transformer_config_settings(
        self, pipeline_size: int, virtual_size: int | None, transformer_engine: bool
    ) -> dict[str, Any]:
        """See `Platform.transformer_config_settings`.

        Raises:
            PlatformError: `transformer_engine` is set.
        """
        if transformer_engine:
            raise PlatformError(
                "transformer_impl transformer_engine needs a GPU; on platform cpu choose transformer_impl torch or auto"
            )
        settings: dict[str, Any] = {**WITHOUT_FUSED_KERNELS, "deallocate_pipeline_outputs": False}
        if pipeline_size > 1 and virtual_size is not None and virtual_size > 1:
            # As on GPUs. With two stages a batch would hold two messages between the same two ranks. gloo matches
            # messages in posting order, which would swap them.
            settings.update(overlap_p2p_comm=True, batch_p2p_comm=False)
        return settings

    def missing_for_fp8(self, recipe: str) -> str | None:
        """See `Platform.missing_for_fp8`."""
        return "it needs a GPU, this is platform cpu"

    def refuse_unsafe(self, settings: Mapping[str, Any], transformer_engine: bool = False) -> None:
        """See `Platform.refuse_unsafe`; also refuses batched p2p communication between two interleaved stages."""
        super().refuse_unsafe(settings, transformer_engine)
        stages = settings.get("pipeline_model_parallel_size", 1)
        chunks = settings.get("virtual_pipeline_model_parallel_size")
        expected = self.transformer_config_settings(stages, chunks, False) if stages == 2 else {}
        for name, value in expected.items():
            if name.endswith("_p2p_comm") and settings.get(name, value) != value:
                raise PlatformError(
                    f"{name}={settings[name]!r} with 2 pipeline stages of {chunks} chunks gives wrong results on "
                    f"platform cpu; omit it or set {value!r}"
                )

    def _safe_values(self, transformer_engine: bool) -> dict[str, tuple[Any, ...]]:
        return {**super()._safe_values(False), **NEEDS_CUDA}


def _refuse_loaded_cuda_packages(loaded: Sequence[types.ModuleType]) -> None:
    """Raise PlatformError if Megatron-Core has imported names from CUDA packages. The modules' HAVE_TE flags are no
    evidence: some are true without Transformer Engine (`multi_latent_attention.py`)."""
    for module in loaded:
        for name, value in list(vars(module).items()):
            source = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            package = source.partition(".")[0] if isinstance(source, str) else ""
            if package in _BOUND_AT_IMPORT:
                raise PlatformError(
                    f"platform cpu was selected after {module.__name__} had imported {name} from {package}; call "
                    "MegatronWrap.initialize() before the first import of megatron.core, or select platform cuda"
                )


def _peak_bytes() -> int:
    """Largest resident memory of this process in bytes. On Linux it is read from /proc: getrusage(2) also counts the
    memory of the process that started this one."""
    import resource

    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


_NICE = 5
_THREADS = "/proc/self/task"


def share_device(replacements: Replacements) -> None:
    """Make all gloo groups that torch creates from now on share a device, and its socket polling thread, until the
    replacements are undone. torch creates one device per group, whose thread wakes up a hundred times a second, and
    Megatron-Core creates about twenty groups even for a small layout."""
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
    """Devices whose threads preempt no other thread, where threads have such priorities (Linux). While a thread that
    sends holds a connection's lock, the device's thread polls without a pause, for a whole time slice if it has
    preempted the sender."""
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


# malloc.h; mallopt(3)
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER_TRIM = 2**31 - 1
_LARGEST_MMAP_THRESHOLD = 32 * 2**20  # limit of 64-bit glibc (malloc/malloc.c, DEFAULT_MMAP_THRESHOLD_MAX)
_USER_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> bool:
    """Keep freed memory of CPU tensors in this process until it exits, except blocks larger than 32 MiB, like PyTorch's
    caching allocator on a GPU. By default glibc returns large blocks to the operating system, so that each new tensor
    of a few megabytes causes page faults.

    Returns:
        False if nothing was set: no glibc, or the user sets malloc thresholds in the environment.
    """
    if any(name in os.environ for name in _USER_VARIABLES):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _NEVER_TRIM) and mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD))

"""The properties of this machine on which defaults depend, without torch, so that `megatron-wrap explain` can use
them."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import re
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from platform import python_version

from megatron_wrap import __version__


@dataclass(frozen=True)
class Machine:
    """Hardware and packages of a process."""

    platform: str
    """Name of the platform, "cpu" or "cuda"."""
    transformer_engine: tuple[int, ...] | None
    """Version of Transformer Engine; None: it cannot be used."""
    megatron_core: tuple[int, ...] = ()
    """Version of Megatron-Core."""
    triton: bool = False
    """Whether Triton kernels run."""
    weight_gradients: bool | None = None
    """Whether torch and the GPU multiply half-precision matrices into an fp32 one; None: not tried."""
    device: str = ""
    """Name of the GPU, such as NVIDIA H200; empty on CPUs."""


def this_machine(platform: str) -> Machine:
    """Properties of the machine, from its files and its installed packages.

    Args:
        platform: `megatron_wrap.init.platform`; auto is cuda where there is a GPU, and torch is built for CUDA.
    """
    if platform == "auto":
        torch = _version("torch")
        platform = "cuda" if visible_gpus() and torch is not None and "+cpu" not in torch else "cpu"
    megatron_core = megatron_core_version()
    if platform == "cpu":
        return Machine(platform, None, megatron_core, weight_gradients=False)
    triton = importlib.util.find_spec("triton") is not None  # the package also has other names, as pytorch-triton
    return Machine(
        platform,
        transformer_engine_version(),
        megatron_core,
        triton=triton,
        device=_gpu_name(),
    )


def visible_gpus() -> int:
    """Number of GPUs of this node that processes may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    return len([entry for entry in Path("/dev").glob("nvidia[0-9]*") if entry.name[6:].isdigit()])


def _gpu_name() -> str:
    """Name of the first GPU in the driver's files; empty if there is none."""
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        with contextlib.suppress(OSError):
            model = re.search(r"^Model:\s*(.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            if model is not None:
                return model[1].strip()
    return ""


def transformer_engine_version() -> tuple[int, ...] | None:
    """The installed version of Transformer Engine, such as (2, 20, 2); None: not installed."""
    version = _version("transformer_engine")
    return None if version is None else _numbers(version)


def megatron_core_version() -> tuple[int, ...]:
    """The installed version of Megatron-Core, such as (0, 19, 2); empty: not installed."""
    return _numbers(_version("megatron-core") or "")


def installed_versions() -> dict[str, str | None]:
    """Name -> version of what must be the same on every node of a run; None: not installed."""
    return {
        "Python": python_version().rpartition(".")[0],
        "torch": _version("torch"),
        "Megatron-Core": _version("megatron-core"),
        "Transformer Engine": _version("transformer_engine"),
        "megatron-wrap": __version__,
    }


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


@functools.cache  # a file with hundreds of lines is parsed for it
def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def process_state(process: int) -> str:
    """The letter of a process's state in /proc/PID/stat, such as "T" for a stopped one; empty if there is none."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    return ""


def how_it_ended(exit_code: int | None) -> str:
    """Description of a process's end, for a sentence; a negative exit code is that of a signal."""
    if exit_code is None or exit_code >= 0:
        return f"ended with exit code {exit_code}"
    reason = ", as the kernel does when memory runs out" if exit_code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-exit_code).name}{reason}"


GPU_KERNELS = ("fla", "causal_conv1d")
"""Packages of GPU kernels that transformers' models also call on CPUs where they are installed
(`integrations/hub_kernels.py`, use_kernel_func_from_hub_with_fallback)."""


@contextlib.contextmanager
def without_packages(names: tuple[str, ...]) -> Iterator[None]:
    """Make imports of these packages fail, as if they were not installed. A module that is first imported in the block,
    and chooses its functions then, keeps those functions."""
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in names}
    sys.modules.update(dict.fromkeys(names))  # type: ignore[arg-type]  # None ends an import
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(hidden)

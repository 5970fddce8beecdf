"""GPUs, limits and installed packages of a node."""

from __future__ import annotations

import importlib
import os
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_wrap.config.schema.derived import training_sources
from megatron_wrap.errors import PlatformError
from megatron_wrap.launch.doctor.checks import Finding, Subject
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.platform.base.machine import installed_versions, this_machine, visible_gpus
from megatron_wrap.platform.megatron_core.versions import check_version

SHARED_MEMORY = Path("/dev/shm")
_NCCL_BYTES = 32 * 2**20
"""Bytes of shared memory that NCCL allocates for each process of a node, a generous estimate: its buffers are 4 MiB for
each channel to a neighbor without peer-to-peer access (NCCL_BUFFSIZE)."""
_SMALL_BYTES = 1 << 30
"""Size of /dev/shm in bytes below which a container was probably started with Docker's default of 64 MB."""
_FILES, _FILES_OF_A_PROCESS = 256, 16
"""Open files of a process by itself, and per other process of the run: a connection for each of its groups."""


# ---- packages ----


def version_of(name: str, subject: Subject) -> Iterator[Finding]:
    """Report the version of one of `installed_versions`."""
    yield Finding(installed_versions()[name] or "not installed")


def megatron_core(subject: Subject) -> Iterator[Finding]:
    """Check whether this package works with the installed Megatron-Core."""
    try:
        check_version()
    except PlatformError as error:
        yield Finding(str(error), "error")
    else:
        yield from version_of("Megatron-Core", subject)


def transformer_engine(subject: Subject) -> Iterator[Finding]:
    """Check whether Transformer Engine, where it is installed, can be imported with this torch; imports both."""
    version = installed_versions()["Transformer Engine"]
    if version is None:
        yield Finding("not installed; layers are those of torch")
        return
    try:
        importlib.import_module("transformer_engine.pytorch")
    except (ImportError, OSError, RuntimeError) as error:
        yield Finding(
            f"{version} cannot be imported with torch {installed_versions()['torch']} ({short(error)}); install the "
            "build for this torch and CUDA, or uninstall it",
            "error",
        )
    else:
        yield Finding(version)


def short(error: BaseException) -> str:
    """The message of an error, shortened to fit into a line."""
    return " ".join(str(error).split())[:200]


# ---- GPUs ----


def gpus(subject: Subject) -> Iterator[Finding]:
    """Check whether there are as many GPUs as processes, without torch."""
    config, count = subject.config, visible_gpus()
    platform = "auto" if config is None else config.init.platform
    if this_machine(platform).platform == "cpu":  # also auto with GPUs, and a torch without CUDA
        yield Finding("runs are on platform cpu" if platform == "auto" else "none needed on platform cpu")
    elif count == 0 and platform == "cuda":
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = "no /dev/nvidia0" if seen is None else f"CUDA_VISIBLE_DEVICES is {seen!r}"
        yield Finding(
            f"none ({hidden}), and megatron_wrap.init.platform is cuda; ask the scheduler for GPUs, start the "
            "container with them (docker run --gpus all), or choose platform cpu",
            "error",
        )
    elif subject.processes > count:
        advice = f"start at most {count} on a node, or choose platform cpu"
        yield Finding(f"{counted(count, 'GPU')} for {subject.processes} processes; {advice}", "error")
    else:
        yield Finding(f"{counted(count, 'GPU')} for {counted(subject.processes, 'process')}")


def cuda_build(subject: Subject) -> Iterator[Finding]:
    """Report the CUDA and NCCL versions that torch was built with; imports torch."""
    import torch

    if torch.version.cuda is None:
        yield Finding("torch is built without CUDA")
        return
    nccl = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    yield Finding(f"CUDA {torch.version.cuda}, NCCL {'.'.join(map(str, nccl))}")


def driver(subject: Subject) -> Iterator[Finding]:
    """Report names, driver and other users of the GPUs, and check whether torch can use them; imports torch."""
    on_cpu = subject.config is not None and subject.config.init.platform == "cpu"
    if visible_gpus() == 0 or on_cpu:
        return
    import torch

    if not torch.cuda.is_available():
        built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
        yield Finding(
            f"torch {torch.__version__}, built {built}, cannot use the GPUs of this node; install a build for the CUDA "
            "that nvidia-smi prints, or a newer driver",
            "error",
        )
        return
    names = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    yield Finding(", ".join(names))
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        if free < 0.9 * total:
            taken = f"{(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB of GPU {index} are taken"
            yield Finding(f"{taken}; nvidia-smi shows by which process", "warning")


# ---- limits ----


def shared_memory(subject: Subject) -> Iterator[Finding]:
    """Check whether /dev/shm has room for the buffers of NCCL."""
    if not SHARED_MEMORY.is_dir():
        yield Finding(f"there is no {SHARED_MEMORY}; mount a tmpfs there", "error")
        return
    total, _, free = shutil.disk_usage(SHARED_MEMORY)
    sizes = f"{_mib(free)} of {_mib(total)} MiB free in {SHARED_MEMORY}"
    needed = subject.processes * _NCCL_BYTES
    advice = "docker run --shm-size=16g or --ipc=host; Kubernetes: an emptyDir with medium: Memory mounted there"
    if visible_gpus() > 0 and subject.processes > 1 and free < needed:
        text = f"{sizes}, and NCCL needs up to {_mib(needed)} for {counted(subject.processes, 'process')}"
        yield Finding(f"{text}; {advice}", "warning")
    elif free < _SMALL_BYTES:
        yield Finding(f"{sizes}; NCCL and data loaders of your own may need 1 GiB: {advice}", "warning")
    else:
        yield Finding(sizes)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.0f}"


def open_files(subject: Subject) -> Iterator[Finding]:
    """Check whether a process may open as many files as it has connections and data files."""
    unlimited = {resource.RLIM_INFINITY: sys.maxsize}
    soft, hard = (unlimited.get(limit, limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    sources = 0 if subject.config is None else 2 * len(training_sources(subject.config))
    needed = _FILES + _FILES_OF_A_PROCESS * (subject.world_size - 1) + sources
    if soft >= needed:
        yield Finding(f"a process may open {soft:,}")
        return
    raised = f"`ulimit -n {needed}`" if hard >= needed else "a higher hard limit"
    yield Finding(
        f"a process may open {soft:,}, and a run of {counted(subject.world_size, 'process')} needs about {needed:,}; "
        f"set {raised} where the run is started (docker run --ulimit nofile=65536)",
        "error" if soft < _FILES else "warning",
    )

"""GPUs and limits of a node."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from megatron_wrap.config.schema.derived import training_sources
from megatron_wrap.launch.doctor.checks import Finding, Subject
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.platform.base.machine import this_machine, visible_gpus

SHARED_MEMORY = Path("/dev/shm")
_NCCL_BYTES = 32 * 2**20
"""Of shared memory that NCCL takes for each process of a node, a generous estimate: its buffers are 4 MiB for each
channel to a neighbor without peer-to-peer access (NCCL_BUFFSIZE)."""
_SMALL_BYTES = 1 << 30
"""Below it containers are often started with Docker's default of 64 MB."""
_FILES, _FILES_OF_A_PROCESS = 256, 16
"""Open files of a process by itself, and for each other process of the run: a connection for each of its groups."""
_NVIDIA_SMI_SECONDS = 20


def gpus(subject: Subject) -> Iterator[Finding]:
    """Whether there are as many GPUs as processes, without torch."""
    config, count = subject.config, visible_gpus()
    platform = "auto" if config is None else config.init.platform
    if this_machine(platform).platform == "cpu":  # also auto with GPUs, and a torch without CUDA
        yield Finding("runs are on platform cpu" if platform == "auto" else "none needed on platform cpu")
    elif count == 0 and platform == "cuda":
        seen = "CUDA_VISIBLE_DEVICES" in os.environ
        hidden = f"CUDA_VISIBLE_DEVICES is {os.environ['CUDA_VISIBLE_DEVICES']!r}" if seen else "no /dev/nvidia0"
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


def driver(subject: Subject) -> Iterator[Finding]:
    """Names, driver and other users of the GPUs, and whether torch can use them; imports torch."""
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
    yield Finding(", ".join([*names, *_driver_version()]))
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        if free < 0.9 * total:
            taken = f"{(total - free) / 2**30:.1f} of {total / 2**30:.1f} GiB of GPU {index} are taken"
            yield Finding(f"{taken}; nvidia-smi shows by which process", "warning")


def _driver_version() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return []
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_SECONDS, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [f"driver {version}" for version in sorted(set(output.split()))]


def shared_memory(subject: Subject) -> Iterator[Finding]:
    """Whether /dev/shm has room for the buffers of NCCL."""
    if not SHARED_MEMORY.is_dir():
        yield Finding(f"there is no {SHARED_MEMORY}; mount a tmpfs there", "error")
        return
    status = os.statvfs(SHARED_MEMORY)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
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
    """Whether a process may open as many files as it has connections and data files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    sources = 0 if subject.config is None else 2 * len(training_sources(subject.config))
    needed = _FILES + _FILES_OF_A_PROCESS * (subject.world_size - 1) + sources
    if soft == resource.RLIM_INFINITY or soft >= needed:
        shown = "any number" if soft == resource.RLIM_INFINITY else f"{soft:,}"
        yield Finding(f"a process may open {shown}")
        return
    raised = f"`ulimit -n {needed}`" if hard == resource.RLIM_INFINITY or hard >= needed else "a higher hard limit"
    yield Finding(
        f"a process may open {soft:,}, and a run of {counted(subject.world_size, 'process')} needs about {needed:,}; "
        f"set {raised} where the run is started (docker run --ulimit nofile=65536)",
        "error" if soft < _FILES else "warning",
    )


def locked_memory(subject: Subject) -> Iterator[Finding]:
    """Whether InfiniBand, where there is any, may register memory."""
    devices = Path("/sys/class/infiniband")
    if not devices.is_dir() or not any(devices.iterdir()):
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield Finding("unlimited, as InfiniBand needs it")
    else:
        yield Finding(
            f"{soft // 1024:,} KiB may be locked, and InfiniBand registers its buffers; `ulimit -l unlimited` "
            "(docker run --ulimit memlock=-1)",
            "warning",
        )

"""The checks of a node, in the order of the report: packages, GPUs, limits, the folder of checkpoints, the cache of the
Hugging Face hub."""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
import resource
import secrets
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_wrap.bridge.export.export_format import export_format
from megatron_wrap.checkpoint.files.run_folder import TRACKER, CheckpointFolder, free_bytes, read_manifest
from megatron_wrap.config import RunConfig
from megatron_wrap.config.hugging_face import NotDownloaded, resolve_folder
from megatron_wrap.config.schema.derived import saves_adapter_alone, training_sources
from megatron_wrap.errors import MegatronWrapError, Mistakes, PlatformError
from megatron_wrap.launch.doctor.checks import Answer, Check, Finding, Subject, answers
from megatron_wrap.metrics.number_format import counted, with_prefix
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


# ---- folders ----

PROBE = ".megatron-wrap-doctor-{}"
"""Name of a file that is written and removed as a test."""
_BYTES_OF_A_PARAMETER = 12
"""Smallest number of bytes per parameter in a checkpoint with Adam's state: an fp32 weight and two fp32 moments."""
_CLOCK_SECONDS = 2.0
"""Difference of two clocks that is reported, in seconds; on some file systems time stamps have whole seconds."""


def existing(folder: Path) -> Path:
    """The folder, or the longest part of its path that exists."""
    return next(path for path in (folder, *folder.parents) if path.is_dir())


def tracker(subject: Subject) -> Iterator[Finding]:
    """Check whether the newest checkpoint is the one that the tracker names."""
    if subject.save is None:
        return
    store = CheckpointFolder(subject.save)
    tracked, latest, complete = store.tracked(), store.latest(), store.iterations()
    named = f"{store.folder / TRACKER} names iteration {tracked}"
    if tracked is None or tracked == "release":
        yield Finding("no checkpoint yet" if latest is None else f"iteration {latest}")
    elif latest is None:
        yield Finding(
            f"{named}, and there is no complete checkpoint: the run would begin again; restore {store.folder}, or "
            "delete the file",
            "error",
        )
    elif str(latest) != tracked:
        yield Finding(
            f"{named}, which is missing or incomplete: the run would resume from iteration {latest}; restore the newer "
            f"one, or write {latest} into the file",
            "warning",
        )
    elif complete[-1] > latest:
        yield Finding(
            f"{named}, and the checkpoint of iteration {complete[-1]} is complete: the run would resume from the older "
            f"one; write {complete[-1]} into the file, or remove the newer one",
            "warning",
        )
    else:
        yield Finding(f"iteration {latest}")


def free_space(subject: Subject) -> Iterator[Finding]:
    """Check whether a checkpoint fits. A file is written, because a quota or a read-only mount is not visible
    otherwise."""
    if subject.save is None or subject.config is None:
        return
    folder = existing(subject.save)
    needed, free = checkpoint_bytes(subject.config), free_bytes(folder)
    advice = "delete files, lower megatron_wrap.checkpoint.keep, or choose another folder"
    try:
        _write(folder)
    except OSError as error:
        yield Finding(f"{folder} cannot be written ({error.strerror}); {advice}", "error")
        return
    text = "an unknown number of bytes is" if free is None else f"{with_prefix(free)}B are"
    text += f" free in {folder}"
    text += "" if needed is None else f", and a checkpoint of this run takes about {with_prefix(needed)}B"
    if free is not None and needed is not None and free < needed:
        yield Finding(f"{text}; {advice}", "error")
    else:
        yield Finding(text)


def checkpoint_bytes(config: RunConfig) -> int | None:
    """Size of the run's newest checkpoint in bytes, else a lower bound of its first one; None: not known."""
    store = CheckpointFolder(config.train.save or ".")
    latest = store.latest()
    sizes = {} if latest is None else read_manifest(store.find(latest) or Path()).get("files", {})
    if sizes:
        return sum(sizes.values())
    if saves_adapter_alone(config) or config.arch.vocab_size is None:  # null: the size of a tokenizer
        return None
    try:
        exported = export_format(config)
        parameters = sum(math.prod(shape) for shape in exported.family.shapes(exported.arch).values())
    except MegatronWrapError:  # a model that no folder can express
        return None
    return parameters * (4 if config.train.no_save_optim else _BYTES_OF_A_PARAMETER)


def file_clock(subject: Subject) -> Iterator[Finding]:
    """Compare the clock of this node with that of the file system of `save`."""
    if subject.save is None:
        return
    folder = existing(subject.save)
    with contextlib.suppress(OSError):  # free_space reports the error
        ahead = _write(folder)
        if abs(ahead) > _CLOCK_SECONDS:
            difference = f"{abs(ahead):,.0f} s {'ahead of' if ahead > 0 else 'behind'}"
            text = f"this node is {difference} the file system of {folder}; synchronize both (chrony, NTP)"
            yield Finding(text, "warning")
        else:
            yield Finding(f"that of the file system of {folder}")


def _write(folder: Path) -> float:
    """Write a file with fsync and remove it; returns the seconds by which this node's clock is ahead of its time
    stamp."""
    path = folder / PROBE.format(secrets.token_hex(4))
    try:
        now = time.time()
        with path.open("wb", buffering=0) as file:
            ahead = now - os.fstat(file.fileno()).st_mtime
            file.write(bytes(4096))
            os.fsync(file.fileno())
        return ahead
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def hub_cache(subject: Subject) -> Iterator[Finding]:
    """Check whether the cache can be read, and contains the repositories that the run names."""
    from huggingface_hub import constants

    cache, needed = Path(constants.HF_HUB_CACHE), _hub_ids(subject.config)
    advice = "change its permissions, or set HF_HOME to a folder of yours"
    try:
        os.listdir(cache)
    except FileNotFoundError:
        yield Finding(f"{cache} does not exist yet")
    except OSError as error:
        yield Finding(f"{cache} cannot be read ({error.strerror}); {advice}", "error" if needed else "warning")
        return
    else:
        yield Finding(str(cache))
    offline = constants.HF_HUB_OFFLINE
    how = "and HF_HUB_OFFLINE is set" if offline else "and is downloaded when the run starts"
    for repo in needed:
        try:
            resolve_folder(repo)
        except NotDownloaded:
            text = f"{repo} is not in {cache}, {how}; `hf download {repo}` on a node that shares this folder"
            yield Finding(text, "error" if offline else "warning")
        except (OSError, MegatronWrapError) as error:
            yield Finding(f"{repo} cannot be read from {cache} ({error}); {advice}", "error")


def _hub_ids(config: RunConfig | None) -> list[str]:
    """The model repositories that a run names."""
    if config is None:
        return []
    reference = config.models.reference_or_teacher
    names = [config.model_provider.hf_path, None if reference is None else reference.hf_path]
    return [name for name in dict.fromkeys(names) if name and not os.path.isdir(os.path.expanduser(name))]


# ---- all checks ----


def _package(name: str) -> Check:
    return Check(name, functools.partial(version_of, name), "error")


CHECKS = (
    _package("Python"),
    _package("torch"),
    Check("Megatron-Core", megatron_core, "error"),
    _package("megatron-wrap"),
    Check("CUDA", cuda_build, "error", is_quick=False),
    Check("Transformer Engine", transformer_engine, "error", is_quick=False),
    Check("GPUs", gpus, "warning"),
    Check("driver", driver, "warning", is_quick=False),
    Check("shared memory", shared_memory),
    Check("open files", open_files),
    Check("checkpoints", tracker),
    Check("free space", free_space),
    Check("clock of files", file_clock),
    Check("hub cache", hub_cache),
)


def quick_answers(subject: Subject) -> list[Answer]:
    """The warnings of the checks that take milliseconds, before a run is started on this node.

    Raises:
        PlatformError: this node cannot run it; the other errors are in `further`.
    """
    results = answers([check for check in CHECKS if check.is_quick], subject)
    mistakes = Mistakes()
    for answer in results:
        if answer.status == "error":
            mistakes.add(PlatformError(f"{answer.name}: {answer.text}"))
    mistakes.raise_first()
    return [answer for answer in results if answer.status == "warning"]

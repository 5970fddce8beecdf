"""The folder of checkpoints, and the cache of the Hugging Face hub."""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_wrap.bridge.export.export_format import export_format
from megatron_wrap.checkpoint.files.complete_checkpoints import TRACKER, CheckpointFolder, free_bytes, read_facts
from megatron_wrap.config import RunConfig
from megatron_wrap.config.hugging_face import NotDownloaded, resolve_folder
from megatron_wrap.config.schema.derived import saves_adapter_alone
from megatron_wrap.errors import MegatronWrapError
from megatron_wrap.launch.doctor.checks import Finding, Subject
from megatron_wrap.metrics.number_format import with_prefix

PROBE = ".megatron-wrap-doctor-{}"
"""Name of a file that is written and removed."""
_BYTES_OF_A_PARAMETER = 12
"""At least, in a checkpoint with Adam's state: an fp32 weight and two fp32 moments."""
_SLOW_BYTES, _SPEED_BYTES, _SPEED_SECONDS = 50 * 10**6, 64 * 2**20, 2.0
_CLOCK_SECONDS = 2.0
"""Difference of two clocks that is reported; time stamps of files have seconds on some file systems."""


def save_folder(config: RunConfig) -> Path:
    """The folder of checkpoints, or the part of its path that exists already."""
    folder = Path(os.path.abspath(os.path.expanduser(config.train.save or ".")))
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def tracker(subject: Subject) -> Iterator[Finding]:
    """Whether the newest checkpoint is the one that the tracker names."""
    assert subject.config is not None
    assert subject.config.train.save is not None
    store = CheckpointFolder(subject.config.train.save)
    tracked, latest = store.tracked(), store.latest()
    complete = store.iterations()
    if tracked is None or tracked == "release":
        yield Finding("no checkpoint yet" if latest is None else f"iteration {latest}")
        return
    path = store.folder / TRACKER
    if latest is None:
        yield Finding(
            f"{path} names iteration {tracked}, and there is no complete checkpoint: the run would begin again; "
            f"restore {store.folder}, or delete the file",
            "error",
        )
    elif str(latest) != tracked:
        yield Finding(
            f"{path} names iteration {tracked}, which is missing or incomplete: the run would resume from iteration "
            f"{latest}; restore the newer one, or write {latest} into the file",
            "warning",
        )
    elif complete[-1] > latest:
        yield Finding(
            f"{path} names iteration {tracked}, and the checkpoint of iteration {complete[-1]} is complete: the run "
            f"would resume from the older one; write {complete[-1]} into the file, or remove the newer one",
            "warning",
        )
    else:
        yield Finding(f"iteration {latest}")


def free_space(subject: Subject) -> Iterator[Finding]:
    """Whether a checkpoint fits; a file is written, as a quota or a read-only mount is not seen otherwise."""
    assert subject.config is not None
    folder = save_folder(subject.config)
    needed, free = checkpoint_bytes(subject.config), free_bytes(folder)
    advice = "delete files, lower megatron_wrap.checkpoint.keep, or choose another folder"
    try:
        _write(folder, 4096, 4096, math.inf)
    except OSError as error:
        yield Finding(f"{folder} cannot be written ({error.strerror}); {advice}", "error")
        return
    shown = "an unknown number of bytes is" if free is None else f"{with_prefix(free)}B are"
    size = "" if needed is None else f", and a checkpoint of this run takes about {with_prefix(needed)}B"
    if free is not None and needed is not None and free < needed:
        yield Finding(f"{shown} free in {folder}{size}; {advice}", "error")
    else:
        yield Finding(f"{shown} free in {folder}{size}")


def checkpoint_bytes(config: RunConfig) -> int | None:
    """Size of the newest checkpoint of the run, else at least that of its first one; None: not known."""
    store = CheckpointFolder(config.train.save or ".")
    latest = store.latest()
    sizes = {} if latest is None else read_facts(store.find(latest) or Path()).get("files", {})
    if sizes:
        return sum(sizes.values())
    if saves_adapter_alone(config) or config.arch.vocab_size is None:  # null: that of a tokenizer
        return None
    try:
        exported = export_format(config)
        parameters = sum(math.prod(shape) for shape in exported.family.shapes(exported.arch).values())
    except MegatronWrapError:  # a model that no folder can express
        return None
    return parameters * (4 if config.train.no_save_optim else _BYTES_OF_A_PARAMETER)


def write_speed(subject: Subject) -> Iterator[Finding]:
    """Bytes per second that reach the disk."""
    assert subject.config is not None
    folder = save_folder(subject.config)
    with contextlib.suppress(OSError):  # an error of free_space
        count, seconds = _write(folder, _SPEED_BYTES, 4 * 2**20, _SPEED_SECONDS)
        speed = f"{with_prefix(count / seconds)}B/s written to {folder}"
        if count / seconds < _SLOW_BYTES:
            yield Finding(f"{speed}; a fast file system, or megatron_wrap.checkpoint.async_save, hides it", "warning")
        else:
            yield Finding(speed)


def _write(folder: Path, limit: int, piece: int, seconds: float) -> tuple[int, float]:
    """Write a file with fsync and remove it; returns its bytes and the seconds it took."""
    path = folder / PROBE.format(secrets.token_hex(4))
    content, written, start = os.urandom(piece), 0, time.monotonic()
    try:
        with path.open("wb", buffering=0) as file:
            while written < limit and time.monotonic() - start < seconds:
                written += file.write(content)
            os.fsync(file.fileno())
        return written, time.monotonic() - start
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def file_clock(subject: Subject) -> Iterator[Finding]:
    """Whether the clock of this node is that of the file system of `save`."""
    assert subject.config is not None
    path = save_folder(subject.config) / PROBE.format(secrets.token_hex(4))
    try:
        before = time.time()
        path.touch()
        after, stamp = time.time(), path.stat().st_mtime
    except OSError:  # an error of free_space
        return
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    ahead = before - stamp if stamp < before else min(0.0, after - stamp)
    if abs(ahead) > _CLOCK_SECONDS:
        way = "ahead of" if ahead > 0 else "behind"
        yield Finding(
            f"this node is {abs(ahead):,.0f} s {way} the file system of {path.parent}; synchronize both (chrony, NTP)",
            "warning",
        )
    else:
        yield Finding(f"that of the file system of {path.parent}")


def hub_cache(subject: Subject) -> Iterator[Finding]:
    """Whether the cache can be read, and has the repositories that the run names."""
    from huggingface_hub import constants

    cache, needed = Path(constants.HF_HUB_CACHE), _hub_ids(subject.config)
    advice = "change its permissions, or set HF_HOME to a folder of yours"
    try:
        with os.scandir(cache) as entries:
            next(entries, None)
    except FileNotFoundError:
        yield Finding(f"{cache} does not exist yet")
    except OSError as error:
        yield Finding(f"{cache} cannot be read ({error.strerror}); {advice}", "error" if needed else "warning")
        return
    else:
        yield Finding(str(cache))
    for repo in needed:
        try:
            resolve_folder(repo)
        except NotDownloaded:
            offline = constants.HF_HUB_OFFLINE
            how = "and HF_HUB_OFFLINE is set" if offline else "and is downloaded when the run starts"
            yield Finding(
                f"{repo} is not in {cache}, {how}; `hf download {repo}` on a node that shares this folder",
                "error" if offline else "warning",
            )
        except (OSError, MegatronWrapError) as error:
            yield Finding(f"{repo} cannot be read from {cache} ({error}); {advice}", "error")


def _hub_ids(config: RunConfig | None) -> list[str]:
    """The repositories of models that a run names."""
    if config is None:
        return []
    reference = config.models.reference_or_teacher
    names = [config.model_provider.hf_path, None if reference is None else reference.hf_path]
    return [name for name in dict.fromkeys(names) if name and not os.path.isdir(os.path.expanduser(name))]

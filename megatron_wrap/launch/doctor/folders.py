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
from megatron_wrap.checkpoint.files.run_folder import TRACKER, CheckpointFolder, free_bytes, read_manifest
from megatron_wrap.config import RunConfig
from megatron_wrap.config.hugging_face import NotDownloaded, resolve_folder
from megatron_wrap.config.schema.derived import saves_adapter_alone
from megatron_wrap.errors import MegatronWrapError
from megatron_wrap.launch.doctor.checks import Finding, Subject
from megatron_wrap.metrics.number_format import with_prefix

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

"""Local copies of the remote folders and files that a run's configuration names."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path

from megatron_wrap.checkpoint.files.downloads import fetch_newest, fetch_one, is_one
from megatron_wrap.checkpoint.files.run_folder import CheckpointFolder
from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.contradictions import refuse
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.errors import CheckpointError, DataError, MegatronWrapError
from megatron_wrap.remote.files import cache_folder, fetch_file, is_remote


def with_local_copies(config: RunConfig) -> RunConfig:
    """The configuration with local paths instead of remote ones: for `save` its staging folder, for `load` and data
    files a copy in the cache. Missing copies are downloaded; of a checkpoint folder, only the newest undamaged
    checkpoint. Several processes of a machine download once. The resolved configuration keeps the URLs.

    Raises:
        ConfigError: a URL cannot be used. CheckpointError, DataError: what it names cannot be read.
    """
    return _with_files(_with_load(_with_save(config)))


def local_checkpoints(url: str, strict: bool = False) -> Path:
    """The local copy of a remote checkpoint folder, with its newest checkpoint, or of a single remote checkpoint.

    Raises:
        ConfigError: the URL cannot be used. CheckpointError: there is no undamaged checkpoint.
    """
    folder = _cached(url)
    if is_one(url):
        return fetch_one(url, folder)
    iteration = fetch_newest(url, folder, strict)
    if iteration is None:
        raise CheckpointError(f"{url} contains no complete checkpoint; name the folder that a run saved to")
    return folder


def _cached(url: str) -> Path:
    """Folder of the local copies of a remote checkpoint folder; the same for one of its checkpoints."""
    root = url.rstrip("/").rpartition("/")[0] if is_one(url) else url.rstrip("/")
    return cache_folder() / "checkpoints" / hashlib.sha256(root.encode()).hexdigest()[:32]


def _with_save(config: RunConfig) -> RunConfig:
    url, settings = config.train.save, config.checkpoint
    if url is None or not is_remote(url):
        return config
    if settings.export_hf:
        refuse(
            config,
            ["train.save", "checkpoint.export_hf"],
            f"export_hf writes local folders, and save is {url}; set export_hf to false, and run "
            "`megatron-wrap export-hf` afterwards",
        )
    staging = settings.staging_folder or os.path.join(derived.output_dir(config), "checkpoints")
    try:
        fetch_newest(url, Path(staging).expanduser(), settings.resume == "strict", keep_newer=True)
    except (MegatronWrapError, OSError) as error:
        refuse(config, ["train.save"], str(error), CheckpointError)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, save=staging), remote_save=url)


def _with_load(config: RunConfig) -> RunConfig:
    url, save = config.train.load, config.train.save
    if url is None or not is_remote(url):
        return config
    folder = _cached(url)
    try:
        if save is not None and CheckpointFolder(save).latest() is not None:
            folder.mkdir(parents=True, exist_ok=True)  # the run resumes, and reads no other checkpoint
        else:
            folder = local_checkpoints(url, config.checkpoint.resume == "strict")
    except (MegatronWrapError, OSError) as error:
        refuse(config, ["train.load"], str(error), CheckpointError)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, load=str(folder)))


def _with_files(config: RunConfig) -> RunConfig:
    data = config.data

    def local(source: SourceConfig, name: str) -> SourceConfig:
        if not is_remote(source.path):
            return source
        try:
            return dataclasses.replace(source, path=str(fetch_file(source.path)))
        except (MegatronWrapError, OSError) as error:
            refuse(config, [name], str(error), DataError)

    train = tuple(local(source, "data.train") for source in data.train)
    validation = {
        name: tuple(local(source, "data.validation") for source in sources) for name, sources in data.validation.items()
    }
    if train == data.train and validation == data.validation:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(data, train=train, validation=validation))

"""Checks of the files and folders that a configuration names; nothing is created."""

import glob
import importlib.util
import os
from pathlib import Path

from megatron_wrap.config.checks.contradictions import check_each, refuse
from megatron_wrap.config.checks.run import check_values
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.errors import CheckpointError, DataError, Mistakes
from megatron_wrap.nearest_names import missing_path_hint


def check_run(config: RunConfig) -> None:
    """Check a configuration, and the files that it names, as far as possible before a process starts.

    Raises:
        ConfigError, LayoutError: values that contradict each other or are out of range.
        DataError, CheckpointError: a data file or checkpoint is missing or cannot be read.
    """
    check_values(config)
    check_paths(config)


def check_paths(config: RunConfig) -> None:
    """Check the files and folders; relative paths are relative to the working directory.

    Raises:
        DataError, ConfigError, CheckpointError: see `check_data_files` and `check_folders`.
    """
    check_each(config, (check_data_files, check_folders))


def check_folders(config: RunConfig) -> None:
    """Check that the folders of tokenizer and checkpoint exist, and that output folders can be written.

    Raises:
        ConfigError: the tokenizer folder is missing, or an output folder cannot be written.
        CheckpointError: the folder of `load` is missing.
    """
    check_each(config, (_need_tokenizer, _need_load, _need_outputs, _check_tensorboard))


def check_data_files(config: RunConfig) -> None:
    """Check that data files exist and can be read.

    Raises:
        DataError: a file does not exist, or cannot be read.
    """
    if derived.is_indexed(config.data):
        _need_indices(config)
    named = [("data.train", source) for source in derived.training_sources(config)]
    for sources in derived.validation_sources(config).values():
        named += [("data.validation", source) for source in sources]
    mistakes = Mistakes()
    for name, source in named:
        with mistakes.collected():
            _need_source(config, name, source)
    mistakes.raise_first()


def _need_tokenizer(config: RunConfig) -> None:
    folder = config.data.tokenizer
    if folder is not None and not os.path.isdir(_expanded(folder)):
        rule = f"no tokenizer folder {folder!r}{missing_path_hint(folder)}"
        refuse(config, ["data.tokenizer"], f"{rule}; name a Hugging Face tokenizer folder{_relative(folder)}")


def _need_load(config: RunConfig) -> None:
    folder = config.train.load
    if folder is not None and not os.path.isdir(_expanded(folder)):
        rule = f"no checkpoint folder {folder!r}{missing_path_hint(folder)}{_relative(folder)}"
        refuse(config, ["train.load"], rule, CheckpointError)


def _need_outputs(config: RunConfig) -> None:
    if config.train.save is not None:
        _need_writable(config, "train.save", config.train.save)
    _need_writable(config, "logger.output_dir", derived.output_dir(config))


# os.path instead of pathlib: Path.is_file raises if a folder may not be entered
def _expanded(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser()


def _relative(path: str) -> str:
    return "" if os.path.isabs(path) else f" (relative to the working directory {os.getcwd()})"


def _check_tensorboard(config: RunConfig) -> None:
    folder = derived.tensorboard_dir(config)
    if folder is None:
        return
    key = "logger.enable_tensorboard" if config.logger.tensorboard_dir is None else "logger.tensorboard_dir"
    if importlib.util.find_spec("tensorboard") is None:
        refuse(
            config,
            [key],
            "TensorBoard events need the package tensorboard, which is not installed; run `pip install "
            "tensorboard`, or delete the key",
        )
    _need_writable(config, key, folder)


def _need_source(config: RunConfig, name: str, source: SourceConfig) -> None:
    """Refuse a missing file. A hub id and a Python source are resolved only when they are read."""
    if source.kind == "file":
        _need_file(config, name, source.path)
    if source.kind == "folder" and not any(os.scandir(_expanded(source.path))):
        refuse(config, [name], f"folder {source.path!r} is empty; add data files{_relative(source.path)}", DataError)
    if source.kind == "glob" and not glob.glob(str(_expanded(source.path)), recursive=True):
        refuse(config, [name], f"no data file matches {source.path!r}{_relative(source.path)}", DataError)


def _need_indices(config: RunConfig) -> None:
    """Refuse an indexed prefix whose .bin or .idx file is missing."""
    prefixes = [("data.train", source) for source in config.data.train]
    prefixes += [("data.validation", source) for sources in config.data.validation.values() for source in sources]
    for key, source in prefixes:
        for path in (f"{source.path}.idx", f"{source.path}.bin"):
            if not os.path.isfile(_expanded(path)):
                rule = f"no file {path!r}{missing_path_hint(path)}; a prefix names the .bin and the .idx file"
                refuse(config, [key], rule + _relative(path), DataError)


def _need_file(config: RunConfig, name: str, file: str) -> None:
    path = _expanded(file)
    if os.path.isfile(path):
        if not os.access(path, os.R_OK, effective_ids=os.access in os.supports_effective_ids):
            refuse(config, [name], f"data file {file!r} cannot be read; change its permissions", DataError)
        return
    missing = f"no data file {file!r}{missing_path_hint(file)}"
    rule = f"{file!r} is a folder, not a data file" if os.path.isdir(path) else missing
    refuse(config, [name], rule + _relative(file), DataError)


def _need_writable(config: RunConfig, name: str, folder: str) -> None:
    existing = _expanded(folder).absolute()
    while not os.path.exists(existing) and existing != existing.parent:
        existing = existing.parent
    if not os.path.isdir(existing):
        refuse(config, [name], f"{folder!r} cannot be a folder: {existing} is a file; choose another folder")
    if not os.access(existing, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        refuse(
            config, [name], f"folder {folder!r} cannot be written: no permission in {existing}; choose another folder"
        )

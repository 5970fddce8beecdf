"""Checks of the files and folders that a configuration names, before a process starts; nothing is created."""

import glob
import importlib.util
import os
from pathlib import Path

from megatron_wrap.config import derived
from megatron_wrap.config.refusal import refuse
from megatron_wrap.config.schema import RunConfig
from megatron_wrap.config.sources import SourceConfig
from megatron_wrap.errors import CheckpointError, DataError, closest


def check_paths(config: RunConfig) -> None:
    """Data files, tokenizer and checkpoint to load must be there, output folders must be writable.

    Relative paths are relative to the working directory.

    Raises:
        DataError: a data file is missing.
        ConfigError: the tokenizer folder is missing, or an output folder cannot be written.
        CheckpointError: the folder of `load` is missing, or a checkpoint is of Megatron-LM's old form.
    """
    data, train = config.data, config.train
    if derived.is_indexed(data):
        _need_indices(config)
    for source in derived.training_sources(config):
        _need_source(config, "data.train", source)
    for source in [source for sources in derived.validation_sources(config).values() for source in sources]:
        _need_source(config, "data.validation", source)
    if data.tokenizer is not None and not os.path.isdir(_expanded(data.tokenizer)):
        rule = f"no tokenizer folder {data.tokenizer!r}{missing_path_hint(data.tokenizer)}"
        refuse(config, ["data.tokenizer"], f"{rule}; give a Hugging Face tokenizer folder{_relative(data.tokenizer)}")
    if train.load is not None and not os.path.isdir(_expanded(train.load)):
        rule = f"no checkpoint folder {train.load!r}{missing_path_hint(train.load)}{_relative(train.load)}"
        refuse(config, ["train.load"], rule, CheckpointError)
    if train.save is not None:
        _need_writable(config, "train.save", train.save)
    _need_writable(config, "logger.output_dir", output_dir(config))
    _check_tensorboard(config)


def output_dir(config: RunConfig) -> str:
    """Folder of metrics and event files: as given, else outputs/NAME-OF-THE-YAML."""
    given = config.logger.output_dir
    return os.path.join("outputs", config.name) if given is None else given


def tensorboard_dir(config: RunConfig) -> str | None:
    """Folder of TensorBoard events: as given, else `tensorboard` in the output folder; None where none are written."""
    if config.logger.tensorboard_dir is not None:
        return config.logger.tensorboard_dir
    return os.path.join(output_dir(config), "tensorboard") if config.logger.enable_tensorboard else None


def missing_path_hint(path: str | os.PathLike[str]) -> str:
    """The end of a sentence about a `path` that does not exist: the closest name in its folder, what the folder
    contains, or the part of the path that exists; `~` is the home folder."""
    wanted = _expanded(path)
    folder = wanted.parent
    # the folder of the shipped example is made by the user, not cloned
    made = "; python examples/data/build.py makes the sample data" if "generated" in wanted.parts else ""
    if not os.path.isdir(folder) or not os.access(folder, os.R_OK | os.X_OK):
        while not os.path.isdir(folder) and folder != folder.parent:
            folder = folder.parent
        return f"; of its path only {'the working directory' if str(folder) == '.' else folder} exists{made}"
    names = sorted(os.listdir(folder))
    found = closest(wanted.name, names)
    if found is not None:
        return f"; did you mean {folder / found}?"
    if str(folder) == ".":
        return made
    listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "") if names else "nothing"
    return f"; {folder} contains {listed}{made}"


# os.path and not pathlib's methods: those raise where a folder may not be entered, these return False
def _expanded(path: str | os.PathLike[str]) -> Path:
    return Path(path).expanduser()


def _relative(path: str) -> str:
    return "" if os.path.isabs(path) else f" (relative to the working directory {os.getcwd()})"


def _check_tensorboard(config: RunConfig) -> None:
    folder = tensorboard_dir(config)
    if folder is None:
        return
    key = "logger.enable_tensorboard" if config.logger.tensorboard_dir is None else "logger.tensorboard_dir"
    if importlib.util.find_spec("tensorboard") is None:
        refuse(
            config,
            [key],
            "TensorBoard events are asked for, but the package tensorboard is not installed; run `pip install "
            "tensorboard`, or delete the key",
        )
    _need_writable(config, key, folder)


def _need_source(config: RunConfig, name: str, source: SourceConfig) -> None:
    """A file that a source names must be there; a hub id and a Python source are resolved when they are read."""
    if source.kind == "file":
        _need_file(config, name, source.path)
    if source.kind == "folder" and not any(os.scandir(_expanded(source.path))):
        refuse(
            config, [name], f"folder {source.path!r} is empty; it needs data files{_relative(source.path)}", DataError
        )
    if source.kind == "glob" and not glob.glob(str(_expanded(source.path)), recursive=True):
        refuse(config, [name], f"no data file matches {source.path!r}{_relative(source.path)}", DataError)


def _need_indices(config: RunConfig) -> None:
    """Both files of each prefix must be there."""
    named = [("data.train", source) for source in config.data.train]
    named += [("data.validation", source) for sources in config.data.validation.values() for source in sources]
    for key, source in named:
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
    what = (
        f"{file!r} is a folder, not a data file"
        if os.path.isdir(path)
        else f"no data file {file!r}{missing_path_hint(file)}"
    )
    refuse(config, [name], what + _relative(file), DataError)


def _need_writable(config: RunConfig, name: str, folder: str) -> None:
    present = _expanded(folder).absolute()
    while not os.path.exists(present) and present != present.parent:
        present = present.parent
    if not os.path.isdir(present):
        refuse(config, [name], f"{folder!r} cannot be a folder: {present} is a file; choose another folder")
    # effective ids: what counts is who the process acts as
    if not os.access(present, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        refuse(
            config, [name], f"folder {folder!r} cannot be written: no permission in {present}; choose another folder"
        )

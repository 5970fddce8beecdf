"""`megatron-wrap checkpoints FOLDER`: the checkpoints of a run, and whether their files are what was saved."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint.files.downloads import RemoteStore
from megatron_wrap.checkpoint.files.hashed_files import find_damage
from megatron_wrap.checkpoint.files.run_folder import (
    BEST,
    REFERENCE,
    CheckpointFolder,
    folder_name,
    missing_part,
    read_manifest,
)
from megatron_wrap.cli.text_table import text_table
from megatron_wrap.errors import ConfigError
from megatron_wrap.metrics.number_format import counted, with_prefix
from megatron_wrap.remote.files import is_remote

_HEAD = ("checkpoint", "size", "saved", "layout", "megatron-core", "state")
_AXES = ("tp", "pp", "cp", "dp", "ep")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        help="checkpoint folder of a run (megatron_lm.train.common.save), also s3://, gs:// or hf://",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read all files and compare their SHA-256; exit code 1 if one differs"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each checkpoint; returns 1 if `--verify` found damage."""
    listed = _remote_rows if is_remote(arguments.folder) else _local_rows
    rows = [*listed(arguments.folder, arguments.verify)]
    print(text_table([_HEAD, *rows]))
    damaged = [row[0] for row in rows if row[-1].startswith(("damaged", "incomplete"))]
    if not damaged or not arguments.verify:
        return 0
    print(f"{counted(len(damaged), 'checkpoint')} not as saved: {', '.join(damaged)}")
    return 1


def _local_rows(folder_name: str, verify: bool) -> Iterator[tuple[str, ...]]:
    """Rows of the visible checkpoints by iteration, of the checkpoints of the reference model, and of those set
    aside."""
    folder = Path(folder_name).expanduser()
    aside = [*folder.glob("iter_*.damaged-*"), *(folder / REFERENCE).glob("iter_*.damaged-*")]
    stores = {prefix: CheckpointFolder(folder / prefix) for prefix in ("", REFERENCE)}
    if not aside and not any(store.present() for store in stores.values()):
        raise ConfigError(f"{folder} contains no checkpoints{_hint(folder)}")
    for prefix, store in stores.items():
        newest, best = (None, None) if prefix else (store.latest(), store.best())
        for iteration in store.present():
            path, name = store.find(iteration) or store.folder_of(iteration), store.folder_of(iteration).name
            states = _state(path, verify), *_notes(iteration, newest, best)
            yield _local_row(path, os.path.join(prefix, name), *states)
    for path in sorted(aside):
        yield _local_row(path, str(path.relative_to(folder)), "set aside as damaged")


def _local_row(path: Path, name: str, *states: str) -> tuple[str, ...]:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    saved = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
    return _row(name, size, saved, read_manifest(path), *states)


def _state(path: Path, verify: bool) -> str:
    problem, hashes = missing_part(path), read_manifest(path).get("hashes")
    if problem is not None:
        return f"incomplete: {problem}"
    if not verify:
        return "complete"
    if hashes is None:
        return "complete, saved without hashes"
    damage = find_damage(path, hashes)
    return "verified" if damage is None else f"damaged: {damage}"


def _remote_rows(url: str, verify: bool) -> Iterator[tuple[str, ...]]:
    """Rows of a remote folder. `verify` downloads one checkpoint at a time into a temporary folder."""
    remote = RemoteStore(url)
    if not remote.present():
        raise ConfigError(f"{remote.url} contains no checkpoints; give the folder that a run saved to")
    newest, best = next(iter(remote.newest_first()), None), remote.number(BEST)
    for iteration in remote.present():
        problem, state, name = remote.missing_part(iteration), "complete", folder_name(iteration)
        if problem is not None:
            state = f"incomplete: {problem}"
        elif verify:
            with tempfile.TemporaryDirectory(prefix="megatron-wrap-") as folder:
                problem = remote.download(iteration, Path(folder, "checkpoint"))
            state = "verified" if problem is None else f"damaged: {problem}"
        size = sum(remote.sizes[file] for file in remote.names(name))
        states = state, *_notes(iteration, newest, best)
        yield _row(name, size, "unknown", remote.manifest(iteration), *states)


def _notes(iteration: int, newest: int | None, best: int | None) -> list[str]:
    return [note for note, noted in (("newest", newest), ("best", best)) if noted == iteration]


def _row(name: str, size: int, saved: str, metadata: Mapping[str, Any], *states: str) -> tuple[str, ...]:
    version = str(metadata.get("megatron_core", "unknown"))
    return name, f"{with_prefix(size)}B", saved, _layout(metadata.get("layout")), version, ", ".join(states)


def _layout(metadata: Any) -> str:
    """Name of the layout as in the log of a run, such as `tp2 pp1 cp1 dp1`."""
    if not isinstance(metadata, dict):
        return "unknown"
    return " ".join(f"{axis}{metadata.get(axis)}" for axis in _AXES if axis != "ep" or metadata.get(axis, 1) != 1)


def _hint(folder: Path) -> str:
    """The hint that corrects a wrong folder."""
    if CheckpointFolder(folder / "checkpoints").present():
        return f"; give {folder / 'checkpoints'}"
    if CheckpointFolder(folder.parent).present() and folder.name.startswith("iter_"):
        return f"; give the folder of the run, {folder.parent}"
    return "; give the folder that megatron_lm.train.common.save names" if folder.is_dir() else ": no such folder"

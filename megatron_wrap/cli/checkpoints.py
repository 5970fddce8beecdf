"""`megatron-wrap checkpoints FOLDER`: the checkpoints of a run, and whether their files are what was saved."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint.files.complete_checkpoints import (
    BEST,
    REFERENCE,
    CheckpointFolder,
    folder_name,
    missing_part,
    read_facts,
)
from megatron_wrap.checkpoint.files.hashes import find_damage
from megatron_wrap.checkpoint.remote.downloads import RemoteStore
from megatron_wrap.cli.text_table import text_table
from megatron_wrap.errors import ConfigError
from megatron_wrap.metrics.number_format import counted, with_prefix
from megatron_wrap.remote.files import is_remote

_HEAD = ("checkpoint", "size", "saved", "layout", "megatron-core", "state")
_AXES = ("tp", "pp", "cp", "dp", "ep")
_SET_ASIDE = "set aside as damaged"


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


@dataclass(frozen=True)
class _Listed:
    """A checkpoint's folder."""

    path: Path
    name: str
    problem: str | None
    """Why it is incomplete."""
    notes: tuple[str, ...]

    def row(self, state: str) -> tuple[str, ...]:
        facts = read_facts(self.path)
        sizes = [path.stat().st_size for path in self.path.rglob("*") if path.is_file()]
        saved = datetime.fromtimestamp(self.path.stat().st_mtime).strftime("%Y-%m-%d %H:%M")
        version = facts.get("megatron_core", "unknown")
        shown = (f"{with_prefix(sum(sizes))}B", saved, _layout(facts.get("layout")), str(version))
        return (self.name, *shown, ", ".join([state, *self.notes]))


def run(arguments: argparse.Namespace) -> int:
    """Prints a line for each checkpoint; returns 1 if `--verify` found damage."""
    if is_remote(arguments.folder):
        return _run_remote(arguments.folder, arguments.verify)
    folder = Path(arguments.folder).expanduser()
    listed = [*_listed(CheckpointFolder(folder), ""), *_listed(CheckpointFolder(folder / REFERENCE), f"{REFERENCE}/")]
    aside = [*folder.glob("iter_*.damaged-*"), *(folder / REFERENCE).glob("iter_*.damaged-*")]
    listed += [_Listed(path, str(path.relative_to(folder)), _SET_ASIDE, ()) for path in sorted(aside)]
    if not listed:
        raise ConfigError(f"{folder} contains no checkpoints{_hint(folder)}")
    states = [_verified(checkpoint) if arguments.verify else _state(checkpoint) for checkpoint in listed]
    rows = [_HEAD, *(checkpoint.row(state) for checkpoint, state in zip(listed, states, strict=True))]
    damaged = [row[0] for row in rows if row[-1].startswith(("damaged", "incomplete"))]
    return _report(rows, damaged if arguments.verify else [])


def _run_remote(url: str, verify: bool) -> int:
    """`run` of a remote folder; `verify` downloads one checkpoint after the other into a temporary folder."""
    remote = RemoteStore(url)
    if not remote.present():
        raise ConfigError(f"{remote.url} contains no checkpoints; give the folder that a run saved to")
    newest, best = next(iter(remote.newest_first()), None), remote.number(BEST)
    rows: list[tuple[str, ...]] = [_HEAD]
    damaged: list[str] = []
    for iteration in remote.present():
        problem, state = remote.missing_part(iteration), "complete"
        if problem is not None:
            state = f"incomplete: {problem}"
        elif verify:
            with tempfile.TemporaryDirectory(prefix="megatron-wrap-") as folder:
                problem = remote.download(iteration, Path(folder, "checkpoint"))
            state = "verified" if problem is None else f"damaged: {problem}"
        name = folder_name(iteration)
        damaged += [name] if problem is not None else []
        notes = [note for note, of in (("newest", newest), ("best", best)) if of == iteration]
        size = sum(remote.sizes[file] for file in remote.names(name))
        facts = remote.manifest(iteration)
        version = str(facts.get("megatron_core", "unknown"))
        shown = (f"{with_prefix(size)}B", "unknown", _layout(facts.get("layout")), version)
        rows.append((name, *shown, ", ".join([state, *notes])))
    return _report(rows, damaged if verify else [])


def _listed(store: CheckpointFolder, prefix: str) -> Iterator[_Listed]:
    """The visible checkpoints of a folder, by iteration."""
    newest, best = store.latest(), store.best()
    for iteration in store.present():
        path = store.find(iteration) or store.folder_of(iteration)
        noted = (("newest", newest), ("best", best))
        notes = tuple(note for note, of in noted if of == iteration and not prefix)
        yield _Listed(path, f"{prefix}{store.folder_of(iteration).name}", missing_part(path), notes)


def _state(checkpoint: _Listed) -> str:
    if checkpoint.problem is None:
        return "complete"
    return _SET_ASIDE if checkpoint.problem == _SET_ASIDE else f"incomplete: {checkpoint.problem}"


def _verified(checkpoint: _Listed) -> str:
    if checkpoint.problem is not None:
        return _state(checkpoint)
    hashes = read_facts(checkpoint.path).get("hashes")
    if hashes is None:
        return "complete, saved without hashes"
    damage = find_damage(checkpoint.path, hashes)
    return "verified" if damage is None else f"damaged: {damage}"


def _layout(facts: Any) -> str:
    """As in the log of a run, such as `tp2 pp1 cp1 dp1`."""
    if not isinstance(facts, dict):
        return "unknown"
    return " ".join(f"{axis}{facts.get(axis)}" for axis in _AXES if axis != "ep" or facts.get(axis, 1) != 1)


def _hint(folder: Path) -> str:
    """The correction of a wrong folder."""
    if CheckpointFolder(folder / "checkpoints").present():
        return f"; give {folder / 'checkpoints'}"
    if CheckpointFolder(folder.parent).present() and folder.name.startswith("iter_"):
        return f"; give the folder of the run, {folder.parent}"
    return "; give the folder that megatron_lm.train.common.save names" if folder.is_dir() else ": no such folder"


def _report(rows: list[tuple[str, ...]], damaged: list[str]) -> int:
    """Print a table and the damaged checkpoints; the exit code."""
    print(text_table(rows))
    if damaged:
        print(f"{counted(len(damaged), 'checkpoint')} not as saved: {', '.join(damaged)}")
    return 1 if damaged else 0

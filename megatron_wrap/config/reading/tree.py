"""The tree of YAML files that a run's YAML selects from and overrides: the shipped one, and over it, file by file, a
`nest/` folder in the folder of the run's YAML."""

import functools
import os
from dataclasses import dataclass, field
from pathlib import Path

from megatron_wrap.config.reading.yaml_nodes import Node, read_yaml, shown_path
from megatron_wrap.errors import ConfigError, did_you_mean

SELECT, OVERRIDE, INHERIT = "__select__", "__override__", "__inherit__"
"""Keys that confignest itself defines."""
MANIFEST = "__confignest_manifest__"
OVERLAY_FOLDER = "nest"


@dataclass(frozen=True)
class TreeFile:
    """A YAML file of the tree, at `location`."""

    name: str
    location: str
    overlaid: bool

    @property
    def path(self) -> Path:
        """Path of the file."""
        return Path(self.location)

    def read(self) -> Node:
        """Content of the file with positions."""
        return read_yaml(self.path)


@dataclass
class Folder:
    """A folder of the tree; `entries` are sorted, by name without `.yaml`."""

    relative: str
    shown: str
    selects_one: bool = False
    default: str | None = None
    skipped_without_selection: bool = False
    entries: dict[str, "Folder | TreeFile"] = field(default_factory=dict)

    def sections(self, path: str = "") -> dict[str, "Folder | TreeFile"]:
        """Dotted path of each section -> its file, or the folder from which a run selects one.

        Args:
            path: dotted path of this folder.
        """
        sections: dict[str, Folder | TreeFile] = {}
        for name, entry in self.entries.items():
            entry_path = f"{path}.{name}" if path else name
            if isinstance(entry, Folder) and not entry.selects_one:
                sections |= entry.sections(entry_path)
            else:
                sections[entry_path] = entry
        return sections


def shipped_root() -> Path:
    """The shipped tree: `configs/nest` in the installed package, or in the root of a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "configs" / "nest"
    return installed if installed.is_dir() else package.parent / "configs" / "nest"


def shipped_schema() -> Path:
    """The shipped JSON schema of the configuration, over all supported versions of Megatron-Core, beside the tree."""
    return shipped_root().with_name("schema.json")


def schema_line() -> str:
    """The comment by which editors that use yaml-language-server find the schema of this installation."""
    return f"# yaml-language-server: $schema={shipped_schema()}\n"


def open_tree(view: Path) -> Folder:
    """The tree for the run's YAML `view`.

    Raises:
        ConfigError: an overlay folder or file without a counterpart in the tree, or an invalid manifest.
    """
    shipped, overlay = shipped_root(), view.resolve().parent / OVERLAY_FOLDER
    if not shipped.is_dir():
        raise ConfigError(f"{shipped}: the tree of the package is missing; install megatron-wrap again")
    if overlay.is_dir() and overlay != shipped.resolve():
        return _scan([shipped, overlay], "")
    return _scanned(shipped, shown_path(shipped), _changes(shipped))


@functools.lru_cache(maxsize=2)
def _scanned(root: Path, shown: str, changes: tuple[tuple[str, int], ...]) -> Folder:
    """The tree of one root. Messages show its folders as `shown`, which depends on the working directory."""
    return _scan([root], "")


def _changes(root: Path) -> tuple[tuple[str, int], ...]:
    """(folder or manifest, time of its last change in nanoseconds) for each folder and manifest of a tree."""
    folders = [(folder, MANIFEST in files) for folder, _, files in os.walk(root)]
    paths = [path for path, _ in folders] + [
        os.path.join(path, MANIFEST) for path, has_manifest in folders if has_manifest
    ]
    return tuple((path, os.stat(path).st_mtime_ns) for path in paths)


def _scan(roots: list[Path], relative: str) -> Folder:
    """A folder of the tree from `roots`; files of later roots replace those of earlier ones."""
    folders = [root / relative for root in roots if (root / relative).is_dir()]
    result = Folder(relative, shown_path(folders[-1]))
    _read_manifests(result, folders)
    entries: dict[str, Folder | TreeFile] = {}
    for folder in folders:
        overlaid = len(roots) > 1 and folder == roots[-1] / relative
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):  # its entries have their type
            suffix = os.path.splitext(entry.name)[1]
            if entry.name.startswith((".", "__")) or (entry.is_file() and suffix not in (".yaml", ".yml")):
                continue
            if entry.is_file() and suffix == ".yml":
                raise ConfigError(f"{shown_path(entry)}: files of the tree end in .yaml; rename it")
            name = entry.name.removesuffix(".yaml") if entry.is_file() else entry.name
            path = f"{relative}/{entry.name}" if relative else entry.name
            known = entries.get(name)
            if known is not None and isinstance(known, Folder) != entry.is_dir():
                raise ConfigError(f"{shown_path(entry)}: the tree has a file and a folder of this name; rename it")
            if overlaid and known is None and not result.selects_one:
                kind = "folder" if entry.is_dir() else "file"
                raise ConfigError(
                    f"{shown_path(entry)}: the tree has no such {kind}, so nothing would read it"
                    f"{did_you_mean(name, entries)}"
                )
            entries[name] = _scan(roots, path) if entry.is_dir() else TreeFile(name, entry.path, overlaid)
    result.entries = dict(sorted(entries.items()))
    if result.default is not None and result.default not in result.entries:
        raise ConfigError(
            f"{result.shown}/{MANIFEST}: default_selection {result.default!r} is not in the folder"
            f"{did_you_mean(result.default, result.entries)}"
        )
    return result


def _read_manifests(result: Folder, folders: list[Path]) -> None:
    for folder in folders:
        path = folder / MANIFEST
        if not path.is_file():
            continue
        content = read_yaml(path)
        legal = {
            "selection_mode": ("one", "all"),
            "if_no_selection": ("error", "skip", "default"),
            "default_selection": None,
        }
        for key, node in content.value.items():
            if key not in legal:
                raise ConfigError(f"{node.where} {key}: unknown key{did_you_mean(key, legal)}")
            choices = legal[key]
            if choices is not None and node.value not in choices:
                raise ConfigError(f"{node.where} {key}: one of {', '.join(choices)}, not {node.value!r}")
        values = content.plain()
        result.selects_one = values.get("selection_mode") == "one"
        mode = values.get("if_no_selection", "error")
        result.default = values.get("default_selection") if mode == "default" else None
        result.skipped_without_selection = mode == "skip"
        if mode == "default" and not isinstance(result.default, str):
            raise ConfigError(f"{content.file}: if_no_selection is default, so default_selection names a file")

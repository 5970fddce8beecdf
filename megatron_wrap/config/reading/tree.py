"""The tree of YAML files that a run's YAML selects from and overrides, its sections with the origins of their values,
and the refusal of keys that they do not have.

The tree is the shipped one, and over it, file by file, a `nest/` folder in the folder of the run's YAML.
"""

import enum
import functools
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_wrap.config.reading.yaml_nodes import Node, read_yaml, shown_path
from megatron_wrap.errors import ConfigError
from megatron_wrap.nearest_names import did_you_mean

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


def flow_definition(flow_key: str) -> str:
    """Name of the definition of a flow's keys in a JSON schema."""
    return f"keys-of-flow-{flow_key}"


def shipped_flow_keys() -> Mapping[str, Mapping[str, Any]]:
    """flow_key -> key -> JSON schema, for the shipped flows, from the shipped schema: their dataclasses cannot be
    imported without torch.

    Raises:
        ConfigError: the file is missing.
    """
    path = shipped_schema()
    if not path.is_file():
        raise ConfigError(f"{path}: the schema of the package is missing; install megatron-wrap again")
    definitions = json.loads(path.read_text(encoding="utf-8"))["$defs"]
    prefix = flow_definition("")
    return {
        name.removeprefix(prefix): keys["properties"] for name, keys in definitions.items() if name.startswith(prefix)
    }


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


class SetBy(enum.IntEnum):
    """The kind of origin of a value; a higher one takes precedence."""

    MACHINE = enum.auto()
    """A default that depends on the machine (`defaults.py`)."""
    TREE = enum.auto()
    """A file of the tree."""
    HF_PATH = enum.auto()
    """The file config.json of `hf_path`."""
    RUN = enum.auto()
    """The run's YAML."""
    COMMAND_LINE = enum.auto()


@dataclass(frozen=True)
class Origin:
    """A line that sets a value. `how` describes it in messages: default, selected, inherited by NAME, hf_path,
    override."""

    node: Node
    set_by: SetBy
    how: str = ""

    @property
    def by_run(self) -> bool:
        """Whether the run's YAML or its command line sets the value, and not a file of the tree."""
        return self.set_by >= SetBy.RUN

    def __str__(self) -> str:
        return f"{self.node.where} ({self.how})" if self.how else self.node.where


@dataclass
class Section:
    """A section of the tree: its files, base first, and the origins of each key."""

    path: str
    files: list[TreeFile]
    origins: dict[str, Any] = field(default_factory=dict)
    """Key -> list of `Origin`, the last of which applies; or a dictionary of further keys."""
    selected: str | None = None
    left_out: dict[str, Origin] = field(default_factory=dict)
    """Keys of the run's YAML that belong to the file it selects, where the command line selects another file."""
    takes_any: bool = False
    """Whether keys that no file defines are accepted, see `KeyRules.plug_ins`."""

    @property
    def name(self) -> str:
        """The name of the section's last file."""
        return self.files[-1].name

    def leaves(self) -> list[tuple[str, list[Origin]]]:
        """Dotted path of every value with its origins."""
        leaves: list[tuple[str, list[Origin]]] = []

        def collect(origins: dict[str, Any], prefix: str) -> None:
            for key, nested in origins.items():
                if isinstance(nested, dict):
                    collect(nested, f"{prefix}.{key}")
                else:
                    leaves.append((f"{prefix}.{key}", nested))

        collect(self.origins, self.path)
        return leaves


_KEYWORDS = {
    SELECT: "nothing can be selected here; delete it",
    OVERRIDE: "only a section with a selection takes it; write its keys here directly",
    INHERIT: "belongs in a file of the tree, not in a run's YAML",
}


@dataclass(frozen=True)
class KeyRules:
    """Rules for keys that the files of the tree do not define: legal ones, and advice on unknown ones.

    `plug_ins`: section -> the key that names a plug-in. If the run names another plug-in than the file of the tree, the
    file does not define the plug-in's keys: any key is accepted, and the plug-in validates it.
    `applies`: (section, key, values of the section's other keys) -> whether the key has an effect with them.
    `familiar`: dotted path -> our counterpart of the argument of another library that it ends with; None for another
        name.
    """

    more_keys: Callable[[str], Collection[str]] = lambda section: ()
    plug_ins: Mapping[str, str] = field(default_factory=dict)
    advice: Callable[[str, str], str | None] = lambda section, key: None
    familiar: Callable[[str], str | None] = lambda path: None
    applies: Callable[[str, str, Mapping[str, Any]], bool] = lambda section, key, values: True

    def check_key(self, section: Section, key: str, node: Node) -> None:
        """Refuse a key that is not one of the section's."""
        if key in section.origins:
            return
        more = self.more_keys(section.path)
        if key not in more and not (section.takes_any and key not in _KEYWORDS):
            # a key of the section is likelier than one of Megatron-Core's hundreds
            self._refuse(node, section.path, key, "key", section.origins, more)

    def refuse_section(self, folder: Folder, key: str, node: Node, path: str) -> None:
        """Refuse a key of a folder at the dotted `path` that is not one of its sections."""
        self._refuse(node, path, key, "section", folder.entries)

    def refuse_beside_select(self, folder: Folder, section: Section, key: str, node: Node) -> None:
        """Refuse a key next to `__select__`."""
        if key in section.origins or key in self.more_keys(section.path):
            rule: str | None = f"a key next to {SELECT} has no effect; put it under {OVERRIDE}"
        elif key in folder.entries:
            rule = f"{section.name} is selected, so this has no effect; delete it or select {key}"
        else:
            rule = _KEYWORDS.get(key) or self.advice(section.path, key)
        near = did_you_mean(key, [SELECT, OVERRIDE]) or did_you_mean(key, section.origins)
        near = self.familiar_hint(f"{section.path}.{key}", node) or near
        rule = rule or f"unknown key{near}; only {SELECT} and {OVERRIDE} are allowed here"
        raise ConfigError(f"{node.where} {section.path}.{key}: {rule}")

    def _refuse(
        self, node: Node, path: str, key: str, kind: str, known: Collection[str], further: Collection[str] = ()
    ) -> None:
        key_path, is_mapping = f"{path}.{key}" if path else key, isinstance(node.value, dict)
        near = did_you_mean(key, known, further)
        # a mapping is a misspelled section rather than an argument
        familiar = "" if near and is_mapping else self.familiar_hint(key_path, node)
        hint = familiar or near or f"; the {kind}s are {', '.join(known)}"
        advice = None if familiar and is_mapping else self.advice(path, key)
        rule = _KEYWORDS.get(key) or advice or f"unknown {'key' if familiar else kind}{hint}"
        raise ConfigError(f"{node.where} {key_path}: {rule}")

    def familiar_hint(self, path: str, node: Node) -> str:
        """The hint `; NAME is ...` for an argument of another library: the last name of `path`, or the first one below
        it."""
        advice = self.familiar(path)
        if advice is None and isinstance(node.value, dict):
            hints = (self.familiar_hint(f"{path}.{name}", below) for name, below in node.value.items())
            return next(filter(None, hints), "")
        return "" if advice is None else f"; {advice}"

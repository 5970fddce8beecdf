"""The one composition: confignest over normalized copies of the tree's files and of the run's YAML.

confignest 1.0.5 reads YAML 1.1, in which 2e-4 is a string, with PyYAML's parser in Python, which takes most of the time
of a start; and it can neither select a file with nested mappings nor replace a value by a mapping. The copies avoid all
of it: they are in memory, keys of nested mappings are joined, and a mapping that is a single value is wrapped in a
list. Only `joined`, `encode` and `decode` depend on this form.
"""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_wrap.config.reading.tree import INHERIT, Folder, TreeFile, shipped_root

_JOINER = "\x1f"
_MAPPING = "\x1fmapping"
"""First item of the list that stands for a mapping."""


def joined(*keys: str) -> str:
    """The key of a value in nested mappings, in a normalized copy."""
    return _JOINER.join(keys)


def encode(value: Any) -> Any:
    """A value in the form of a normalized copy."""
    return [_MAPPING, value] if isinstance(value, dict) else value


def decode(value: Any) -> Any:
    """The inverse of `encode`."""
    return value[1] if isinstance(value, list) and value[:1] == [_MAPPING] else value


def compose(root: Folder, files: Mapping[str, Mapping[str, Any]], view: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a run, as nested plain dictionaries in the order of the tree.

    Args:
        root: of the tree.
        files: path below the root -> encoded content, for the files that the run uses.
        view: encoded content of the run's YAML, command-line overrides included.
    """
    from confignest.src import ConfigNest, ConfigNestManifest, ConfigNestNamespace, ConfigNestUtils

    shipped = str(shipped_root())

    def on_disk(entry: Folder | TreeFile) -> str:
        """Where confignest looks whether an entry is a file or a folder."""
        return os.path.join(shipped, entry.relative) if isinstance(entry, Folder) else entry.location

    folders = {on_disk(folder): folder for folder in _folders(root)}

    class TreeNest(ConfigNest):
        """confignest that reads normalized copies instead of the files; a file that the run does not use is empty."""

        @classmethod
        def load_manifest_from_file(cls, path: str) -> ConfigNestManifest:
            folder = folders[path]
            unselected = "default" if folder.default else "skip" if folder.skipped_without_selection else "error"
            return ConfigNestManifest("one" if folder.selects_one else "all", unselected, folder.default)

        @classmethod
        def build_name_target_map(cls, path: str) -> dict[str, str]:
            return {name: on_disk(entry) for name, entry in folders[path].entries.items()}

        @classmethod
        def handle_inherit(cls, path: str, target: str) -> ConfigNestNamespace:
            file = folders[path].entries[Path(target).name.removesuffix(".yaml")]
            content = dict(files.get(file.relative, {}))
            parent = content.pop(INHERIT, None)
            namespace = ConfigNestNamespace() if parent is None else cls.handle_inherit(path, parent)
            ConfigNestUtils.override_namespace(namespace, ConfigNestUtils.dict_to_namespace(content))
            return namespace

    composed = ConfigNestNamespace()
    TreeNest.parse(ConfigNestUtils.dict_to_namespace(dict(view)), composed, on_disk(root))
    return _values(composed, root)


def _folders(folder: Folder) -> Iterator[Folder]:
    yield folder
    for entry in folder.entries.values():
        if isinstance(entry, Folder):
            yield from _folders(entry)


def _values(composed: Any, folder: Folder | TreeFile) -> dict[str, Any]:
    content = vars(composed)
    if isinstance(folder, Folder) and not folder.selects_one:
        return {name: _values(content[name], entry) for name, entry in folder.entries.items() if name in content}
    values: dict[str, Any] = {}
    for key, value in content.items():
        *outer, last = key.split(_JOINER)
        mapping = values
        for part in outer:
            mapping = mapping.setdefault(part, {})
        mapping[last] = decode(value)
    return values

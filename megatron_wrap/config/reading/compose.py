"""The one composition: confignest over normalized copies of the tree's files and of the run's YAML.

confignest 1.0.5 reads YAML 1.1, in which 2e-4 is a string, and it can neither select a file with nested mappings nor
replace a value by a mapping. The copies avoid all three: they are JSON, keys of nested mappings are joined, and a
mapping that is a single value is wrapped in a list. Only `joined`, `encode` and `decode` depend on this form.
"""

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_wrap.config.reading.tree import INHERIT, MANIFEST, Folder, TreeFile

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

    class JsonNest(ConfigNest):
        """confignest with the files of a tree in JSON."""

        @classmethod
        def load_manifest_from_file(cls, folder: str) -> ConfigNestManifest:
            return ConfigNestManifest(**json.loads(Path(folder, MANIFEST).read_text()))

        @classmethod
        def handle_inherit(cls, folder: str, target: str) -> ConfigNestNamespace:
            values = json.loads(Path(folder, target).read_text())
            parent = values.pop(INHERIT, None)
            namespace = ConfigNestNamespace() if parent is None else cls.handle_inherit(folder, parent)
            ConfigNestUtils.override_namespace(namespace, ConfigNestUtils.dict_to_namespace(values))
            return namespace

    composed = ConfigNestNamespace()
    with tempfile.TemporaryDirectory(prefix="megatron-wrap-") as scratch:
        nest = Path(scratch, "nest")
        _write_folder(root, nest, files)
        JsonNest.parse(ConfigNestUtils.dict_to_namespace(json.loads(json.dumps(view))), composed, str(nest))
    return _values(composed, root)


def _write_folder(folder: Folder, target: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Files that the run does not use are empty, and left out where one of a folder is selected."""
    target.mkdir()
    manifest: dict[str, Any] = {"selection_mode": "one" if folder.selects_one else "all"}
    if folder.default is not None:
        manifest.update(if_no_selection="default", default_selection=folder.default)
    elif folder.skipped_without_selection:
        manifest.update(if_no_selection="skip")
    (target / MANIFEST).write_text(json.dumps(manifest))
    for name, entry in folder.entries.items():
        if isinstance(entry, Folder):
            _write_folder(entry, target / name, files)
        elif entry.relative in files or not folder.selects_one:
            (target / f"{name}.yaml").write_text(json.dumps(files.get(entry.relative, {})))


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

"""Keys of Megatron: the fields of Megatron-Core's own configuration dataclasses, read from the installed files without
importing them, and advice on keys that are retired, misplaced, or set by the program from another key
(`retired_keys.yaml`).
"""

import ast
import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from megatron_wrap.config.reading.yaml_nodes import read_yaml
from megatron_wrap.config.schema.keys import field_docstrings
from megatron_wrap.config.schema.run import CATCH_ALL, SECTION_AT, SECTION_PATHS, RunConfig
from megatron_wrap.errors import PlatformError

_FILES = {
    "ModelParallelConfig": "core/model_parallel_config.py",
    "TransformerConfig": "core/transformer/transformer_config.py",
    "OptimizerConfig": "core/optimizer/optimizer_config.py",
    "DistributedDataParallelConfig": "core/distributed/distributed_data_parallel_config.py",
}


@dataclass(frozen=True)
class UpstreamField:
    """A field: annotation and default as source text (None: no default), and the docstring under it."""

    name: str
    annotation: str
    default: str | None
    doc: str


@functools.cache
def upstream_fields(class_name: str) -> Mapping[str, UpstreamField]:
    """Fields of a Megatron-Core dataclass by name, those of its bases first.

    Args:
        class_name: TransformerConfig, OptimizerConfig or DistributedDataParallelConfig.

    Raises:
        PlatformError: Megatron-Core is not installed, or its file has no such class.
    """
    path = _find(_FILES[class_name])
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ClassDef) and statement.name == class_name:
            break
    else:
        raise PlatformError(f"{path}: no class {class_name}; megatron-core 0.16 or 0.19 is needed")
    upstream: dict[str, UpstreamField] = {}
    for base in statement.bases:
        if isinstance(base, ast.Name) and base.id in _FILES:
            upstream.update(upstream_fields(base.id))
    docs = field_docstrings(statement)
    for item in statement.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.target.id[0] != "_":
            name, default = item.target.id, _default(item.value)
            upstream[name] = UpstreamField(name, ast.unparse(item.annotation), default, docs[name])
    return upstream


@functools.cache
def upstream_enums() -> Mapping[str, tuple[str, ...]]:
    """Names of the members of each enum among the fields of Megatron-Core's model configuration.

    Raises:
        PlatformError: Megatron-Core is not installed.
    """
    enums = {}
    for statement in ast.parse(_find("core/transformer/enums.py").read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ClassDef) and any("Enum" in ast.unparse(base) for base in statement.bases):
            assigned = [item.targets[0] for item in statement.body if isinstance(item, ast.Assign)]
            enums[statement.name] = tuple(target.id for target in assigned if isinstance(target, ast.Name))
    return enums


def _default(value: ast.expr | None) -> str | None:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        keywords = {keyword.arg: keyword.value for keyword in value.keywords}
        value = keywords.get("default", keywords.get("default_factory"))
    return None if value is None else ast.unparse(value)


def _find(relative: str) -> Path:
    # find_spec on a top-level name imports nothing; `megatron` is a namespace package
    spec = importlib.util.find_spec("megatron")
    for location in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(location) / relative
        if path.is_file():
            return path
    raise PlatformError(f"there is no file megatron/{relative}; install it with: pip install megatron-core")


@functools.cache
def _tables() -> Mapping[str, Any]:
    return read_yaml(Path(__file__).with_name("retired_keys.yaml")).plain()  # type: ignore[no-any-return]


@functools.cache
def retired_keys() -> Mapping[str, str]:
    """Retired keys of Megatron-LM, in any section -> advice."""
    return _by_name(_tables()["retired"])


@functools.cache
def set_elsewhere(section: str) -> Mapping[str, str]:
    """Fields of Megatron-Core that the program fills from other keys, for a field of `RunConfig` -> advice."""
    return _by_name(_tables()["set_elsewhere"].get(section, {}))


def _by_name(table: Mapping[str, str]) -> dict[str, str]:
    return {name: text.replace("*", name) for names, text in table.items() for name in names.split(", ")}


def key_advice(section_path: str, key: str) -> str | None:
    """Advice on a key that does not belong in this section; None for an unknown key."""
    advice = set_elsewhere(SECTION_AT.get(section_path, "")).get(key) or retired_keys().get(key)
    if advice is not None:
        return advice
    hints = get_type_hints(RunConfig)
    for section, path in SECTION_PATHS.items():
        if path != section_path and key in {field.name for field in fields(hints[section])} - CATCH_ALL:
            return f"belongs to {path}"
    return None

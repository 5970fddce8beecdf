"""Decoding of a run's YAML into the frozen dataclasses of `schema`; `checks` refuses contradictions between their
values."""

import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_type_hints

from megatron_wrap.config.checks.contradictions import applies
from megatron_wrap.config.hugging_face import add_hugging_face
from megatron_wrap.config.reading.composition import ComposedConfig, read_nest
from megatron_wrap.config.reading.tree import KeyRules, Origin, SetBy
from megatron_wrap.config.reading.yaml_nodes import Node, describe, read_yaml, shown_path
from megatron_wrap.config.schema.data import decode_evaluation_sets, decode_sources
from megatron_wrap.config.schema.familiar_names import familiar_advice, unknown_key_hint
from megatron_wrap.config.schema.keys import Mismatch, check_value, parse_annotation, with_default
from megatron_wrap.config.schema.reference_models import decode_reference_model
from megatron_wrap.config.schema.run import CATCH_ALL, SECTION_AT, SECTION_PATHS, UPSTREAM, RunConfig
from megatron_wrap.config.schema.upstream import key_advice, set_elsewhere, upstream_enums, upstream_fields
from megatron_wrap.errors import ConfigError, Mistakes
from megatron_wrap.hidden_secrets import remember_secrets

_PLUG_INS = {SECTION_PATHS["flow"]: "flow_key"}
_DECODERS: dict[tuple[str, str], Callable[[Node, str], Any]] = {
    ("data", "train"): decode_sources,
    ("data", "validation"): decode_evaluation_sets,
    ("models", "reference"): decode_reference_model,
    ("models", "teacher"): decode_reference_model,
}


def load_run_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read, validate and decode a run's YAML; imports no torch and writes nothing.

    Args:
        path: the YAML; a `nest/` folder in its folder overlays the shipped tree.
        overrides: command-line `a.b.c=value`, applied last, in their order.

    Raises:
        ConfigError: an unknown key, a wrong type or a missing value; the message names file, line and dotted path.
        PlatformError: further Megatron-Core keys are used and it is not installed.
    """
    return decode(load_tree(path, overrides), Path(path).stem)


def load_tree(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> ComposedConfig:
    """The composed values of a run's YAML, including the architecture of `model_provider.hf_path`. Keys are validated,
    types are not."""
    tree = read_view(path, overrides)
    add_hugging_face(tree)
    return tree


def read_view(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> ComposedConfig:
    """A run's YAML over the tree, without the architecture of `model_provider.hf_path`; keys are validated."""
    return read_nest(Path(path), overrides, KeyRules(_more_keys, _PLUG_INS, key_advice, familiar_advice, applies))


def decode(tree: ComposedConfig, name: str) -> RunConfig:
    """The run's dataclasses from a composed tree; `name` is the name of the run."""
    mistakes, sections = Mistakes(), {}
    for field in SECTION_PATHS:
        with mistakes.collected():
            sections[field] = _decode_section(tree, field)
    mistakes.raise_first()
    remember_secrets(tree.values)
    leaves = tree.leaves()
    origins = {path: settings[-1] for path, settings in leaves.items()}
    undeclared = frozenset(path for path, settings in leaves.items() if settings[0].set_by >= SetBy.RUN)
    return RunConfig(name=name, **sections, resolved=tree.values, origins=origins, undeclared=undeclared)


def write_resolved(config: RunConfig, path: str | os.PathLike[str]) -> None:
    """Write all resolved values but secrets as YAML, each with its origin as a comment."""
    Path(path).write_text(config.record, encoding="utf-8")


def load_resolved(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """The values in a file of `write_resolved`, equal to `RunConfig.resolved` without its secrets."""
    return read_yaml(Path(path)).plain()


@functools.cache
def section_hints(section: str) -> dict[str, Any]:
    """Key -> type, for the keys that a section's dataclass declares."""
    return {key: hint for key, hint in get_type_hints(_section_class(section)).items() if key not in CATCH_ALL}


def _more_keys(path: str) -> Collection[str]:
    section = SECTION_AT.get(path)
    if section is None:
        return ()
    upstream = upstream_fields(UPSTREAM[section]) if section in UPSTREAM else ()
    further = [name for name in upstream if name not in set_elsewhere(section)]
    return [*further, *sorted(with_default(_section_class(section)) - CATCH_ALL)]


def _decode_section(tree: ComposedConfig, section: str) -> Any:
    path = SECTION_PATHS[section]
    if path not in tree.sections:
        raise ConfigError(f"{tree.view_file} {path}: the section is missing from the tree")
    values, origins = tree.section_values(path), tree.sections[path].origins
    hints = section_hints(section)
    section_class = _section_class(section)
    decoded: dict[str, Any] = {}
    defaults = with_default(section_class)
    mistakes = Mistakes()
    for key, hint in hints.items():
        if key not in values and key in defaults:
            continue  # a file of the tree that is older than the key
        if key not in values:
            file = shown_path(tree.sections[path].files[-1].path)
            raise ConfigError(f"{file} {path}.{key}: missing; define it, or inherit a file of this section that does")
        try:
            if (section, key) in _DECODERS:
                decoded[key] = _DECODERS[section, key](_last_node(origins[key]), f"{path}.{key}")
            else:
                decoded[key] = _checked(tree, values[key], origins[key], hint, f"{path}.{key}")
        except ConfigError as mistake:
            mistakes.add(mistake)
    catch_all = CATCH_ALL & {field.name for field in dataclasses.fields(section_class)}
    further = [key for key in values if key not in hints]
    for name in catch_all:
        decode_further = _decode_upstream if name == "upstream" else _decode_option
        decoded[name] = {}
        for key in further:
            with mistakes.collected():
                decoded[name][key] = decode_further(tree, section, key)
    if further and not catch_all:
        origin = _first_origin(origins[further[0]])
        raise ConfigError(
            f"{origin.node.where} {path}.{further[0]}: unknown key{unknown_key_hint(f'{path}.{further[0]}', hints)}"
        )
    mistakes.raise_first()
    return section_class(**decoded)


@functools.cache  # typing evaluates the hints at each call
def _section_class(section: str) -> Any:
    return get_type_hints(RunConfig)[section]


def _last_node(origins: Any) -> Node:
    """The last node that sets a value, with the positions of its parts."""
    if isinstance(origins, dict):
        return Node({key: _last_node(nested) for key, nested in origins.items()}, _first_origin(origins).node.file)
    last: Node = origins[-1].node
    return last


def _first_origin(origins: Any) -> Origin:
    while isinstance(origins, dict):
        origins = next(iter(origins.values()))
    return origins[0]


def _checked(tree: ComposedConfig, value: Any, origins: Any, hint: Any, path: str) -> Any:
    if isinstance(origins, dict):
        raise ConfigError(f"{_first_origin(origins).node.where} {path}: a single value is expected, not a mapping")
    try:
        return check_value(value, hint)
    except Mismatch as mismatch:
        where = origins[-1].node.where
        if value is None and not origins[-1].by_run:
            raise ConfigError(_missing_value(tree, path, mismatch, where)) from None
        raise ConfigError(f"{where} {path}: {mismatch}, not {describe(value)}") from None


def _missing_value(tree: ComposedConfig, path: str, mismatch: Mismatch, where: str) -> str:
    section_path, _, key = path.rpartition(".")
    section = tree.sections[section_path]
    rule = f"{tree.view_file} {path}: not set; it {mismatch}; write {key} under {section_path}"
    if section.selected is None:
        return rule
    return f"{rule}.__override__, or select a file that defines it ({section.selected} leaves it null at {where})"


def _decode_upstream(tree: ComposedConfig, section: str, key: str) -> Any:
    section_path = SECTION_PATHS[section]
    path, class_name = f"{section_path}.{key}", UPSTREAM[section]
    origins = tree.sections[section_path].origins[key]
    where = _first_origin(origins).node.where
    fields = upstream_fields(class_name)
    if key in set_elsewhere(section):
        raise ConfigError(f"{where} {path}: {set_elsewhere(section)[key]}")
    if key not in fields:
        hint = unknown_key_hint(path, section_hints(section), fields)
        raise ConfigError(f"{where} {path}: unknown key{hint}")
    annotation = fields[key].annotation
    members = upstream_enums().get(annotation)  # set by name; `model/transformer_config.py` converts it
    kind: Any = parse_annotation(annotation) if members is None else Literal[members]
    if kind is None:
        raise ConfigError(
            f"{where} {path}: Megatron-Core's field has the type {annotation}, which YAML cannot express; delete it, "
            "or write a model provider that sets it"
        )
    return _checked(tree, tree.section_values(section_path)[key], origins, kind, path)


def _decode_option(tree: ComposedConfig, section: str, key: str) -> Any:
    """An option of a flow or a provider, of the type of its value in the tree's file, if the file has the key."""
    section_path = SECTION_PATHS[section]

    def typed(value: Any, origins: Any, path: str) -> Any:
        if isinstance(origins, dict):
            return {key: typed(value[key], nested, f"{path}.{key}") for key, nested in origins.items()}
        kind = type(origins[0].node.plain())
        if section == "flow" and kind is str and isinstance(value, list):
            return value  # a name or a list of names: the flow's Config decides
        if kind in (bool, int, float, str, list, dict) and not (kind is dict and value is None):
            return _checked(tree, value, origins, kind, path)
        return value

    values, origins = tree.section_values(section_path), tree.sections[section_path].origins
    return typed(values[key], origins[key], f"{section_path}.{key}")

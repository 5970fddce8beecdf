"""The JSON schema (draft 2020-12) of the configuration, with which an editor completes and checks keys.

It describes three kinds of files: a run's YAML, a file of the tree (`configs/nest`, or a `nest/` folder beside a run's
YAML), and the resolved configuration beside a checkpoint. The sections are those of `RunConfig`, selections those of
the tree, keys those that a dataclass or Megatron-Core declares.
"""

import dataclasses
import itertools
import json
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_wrap.config.decode import section_hints
from megatron_wrap.config.reading.tree import INHERIT, OVERRIDE, SELECT, Folder, TreeFile, flow_definition
from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.config.schema.keys import documentation, has_yaml_form, key_ranges, parse_annotation, with_default
from megatron_wrap.config.schema.reference_models import SOURCES as MODEL_SOURCES
from megatron_wrap.config.schema.reference_models import ReferenceModelConfig
from megatron_wrap.config.schema.run import CATCH_ALL, SECTION_AT, SECTION_PATHS, UPSTREAM, RunConfig
from megatron_wrap.config.schema.upstream import UpstreamField, set_elsewhere, upstream_enums, upstream_fields

Schema = dict[str, Any]

SOURCES, EVALUATION_SETS, REFERENCE = "sources-of-samples", "evaluation-sets", "reference-model"
"""Names of the definitions that keys of sections refer to, see `definitions`."""
_FORMS = {
    ("DataConfig", "train"): SOURCES,
    ("DataConfig", "validation"): EVALUATION_SETS,
    ("ModelsConfig", "reference"): REFERENCE,
    ("ModelsConfig", "teacher"): REFERENCE,
}
_NAMES: Mapping[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string", list: "array"}
_JSON_NAMES = {**_NAMES, dict: "object", type(None): "null"}


def type_schema(hint: Any) -> Schema:
    """The YAML values that `check_value` accepts for a type.

    4.0 is an integer in a JSON schema; the reader refuses it where an integer is required.
    """
    if hint is Any:
        return {}
    if hint in _JSON_NAMES:
        return {"type": _JSON_NAMES[hint]}
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, types.UnionType):
        # typing caches unions: a union has the order of the first equal one in the process
        return _any_of(sorted(map(type_schema, arguments), key=json.dumps))
    if origin is tuple and Ellipsis not in arguments:
        items = [type_schema(argument) for argument in arguments]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    if origin in (list, tuple):
        return {"type": "array", "items": type_schema(arguments[0])}
    return {"type": "object"}


def keys_schema(section: type, without: frozenset[str] = frozenset()) -> dict[str, Schema]:
    """Key -> the schema of its values, for the fields of a dataclass: type, range, default and documentation."""
    hints, documents = get_type_hints(section), documentation(section)
    keys = {}
    for field in dataclasses.fields(section):
        if field.name in without or not field.init:
            continue
        form = _FORMS.get((section.__name__, field.name))
        schema: Schema = {"$ref": f"#/$defs/{form}"} if form else type_schema(hints[field.name])
        allowed = key_ranges(section).get(field.name)
        if allowed is not None:
            bounds = {"minimum": allowed.at_least, "exclusiveMinimum": allowed.above}
            bounds |= {"maximum": allowed.at_most, "exclusiveMaximum": allowed.below}
            schema |= {name: bound for name, bound in bounds.items() if bound is not None}
        if _is_plain(field.default) and not has_yaml_form(field):
            schema["default"] = field.default
        keys[field.name] = described(schema, documents.get(field.name, ""))
    return keys


def upstream_keys(section: str) -> dict[str, Schema]:
    """Key -> schema, for the keys of a section that are fields of the installed Megatron-Core's dataclass.

    Fields of types that YAML cannot express, and fields that the program sets, are left out: the reader refuses them.
    """
    keys = {}
    for name, field in upstream_fields(UPSTREAM[section]).items():
        members = upstream_enums().get(field.annotation)
        hint: Any = parse_annotation(field.annotation) if members is None else Literal[members]
        if hint is not None and name not in set_elsewhere(section) and name not in section_hints(section):
            keys[name] = described(type_schema(hint), _upstream_text(UPSTREAM[section], field))
    return keys


def described(schema: Schema, text: str) -> Schema:
    """The schema with a description, unless the text is empty."""
    return {**schema, "description": text} if text else schema


def or_null(schema: Schema) -> Schema:
    """The schema, extended by null."""
    return _any_of([schema, {"type": "null"}])


def definitions() -> dict[str, Schema]:
    """The definitions that the keys of sections refer to: sources of samples and reference models."""
    source = _closed(SourceConfig)
    nullable = {name: or_null(key) for name, key in source["properties"].items() if name != "path"}
    nullable["columns"] = or_null({"type": "object", "additionalProperties": {"type": "string"}}) | {
        "description": source["properties"]["columns"]["description"]
    }
    source |= {"properties": source["properties"] | nullable, "required": ["path"]}
    single = {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/source"}]}
    many: Schema = {"anyOf": [{"type": "null"}, *single["anyOf"], {"type": "array", "minItems": 1, "items": single}]}
    sets = {"type": "object", "additionalProperties": {"$ref": f"#/$defs/{SOURCES}"}}
    return {
        "source": source,
        SOURCES: many,
        EVALUATION_SETS: {"anyOf": [{"type": ["string", "null"]}, sets]},
        REFERENCE: {
            "anyOf": [{"enum": ["copy", "base", None]}, _closed(ReferenceModelConfig) | {"allOf": _one_model()}]
        },
    }


def _one_model() -> list[Schema]:
    """The rules of a reference model: one key names the weights; with `precomputed`, which excludes other keys, none is
    needed."""

    def with_key(name: str, value: Schema) -> Schema:
        return {"properties": {name: value}, "required": [name]}

    text: Schema = {"type": "string", "minLength": 1}
    sources = [with_key(name, {"const": True} if name in ("copy", "base") else text) for name in MODEL_SOURCES]
    precomputed = with_key("precomputed", {"type": "string"})
    policies = with_key("base", {"const": True}), with_key("adapter", text)
    unset = {name: {"type": "null"} for name in ("refresh_interval", "ema_decay")} | {"offload": {"const": False}}
    return [
        {"anyOf": [*sources, precomputed]},
        *({"not": {"allOf": list(pair)}} for pair in itertools.combinations(sources, 2)),
        *({"if": model, "then": {"properties": unset}} for model in (precomputed, *policies)),
    ]


def _closed(section: type) -> Schema:
    text = " ".join((section.__doc__ or "").split())
    schema = {"type": "object", "properties": keys_schema(section), "additionalProperties": False}
    return described(schema, text)


def _any_of(schemas: list[Schema]) -> Schema:
    """The schema of a value that one of the schemas accepts; types alone, and null with one schema, are joined into
    `type` and `enum`."""
    if all(set(schema) == {"type"} for schema in schemas):
        names = list(dict.fromkeys(name for schema in schemas for name in _listed(schema["type"])))
        names.sort(key="null".__eq__)
        return {"type": names[0] if len(names) == 1 else names}
    null, others = {"type": "null"}, [schema for schema in schemas if schema != {"type": "null"}]
    if len(others) == 1 and len(others) < len(schemas):
        (schema,) = others
        if "enum" in schema:
            return {**schema, "enum": list(dict.fromkeys([*schema["enum"], None]))}
        if "type" in schema:
            return {**schema, "type": list(dict.fromkeys([*_listed(schema["type"]), "null"]))}
    return {"anyOf": [*others, *([null] if len(others) < len(schemas) else [])]}


def _listed(names: str | list[str]) -> Iterator[str]:
    yield from [names] if isinstance(names, str) else names


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | bool | int) or (isinstance(value, float) and math.isfinite(value))


def _upstream_text(class_name: str, field: UpstreamField) -> str:
    ending = "" if field.default is None else f", default {field.default}"
    return f"{field.doc} (Megatron-Core's {class_name}{ending})".strip()


DIALECT = "https://json-schema.org/draft/2020-12/schema"
FLOW, PROVIDER = SECTION_PATHS["flow"], SECTION_PATHS["model_provider"]
_TREE_FILE, _RESOLVED = "file-of-the-tree", "resolved-configuration"

FlowKeys = Mapping[str, Mapping[str, Schema]]
"""flow_key -> key -> schema, for the flows whose keys are known."""
UpstreamKeys = Mapping[str, Mapping[str, Schema]]
"""Section with keys of Megatron-Core -> key -> schema."""


def installed_upstream_keys() -> UpstreamKeys:
    """Keys that are fields of the installed Megatron-Core's dataclasses.

    Raises:
        PlatformError: Megatron-Core is not installed.
    """
    return {section: upstream_keys(section) for section in UPSTREAM}


def json_schema(root: Folder, flows: FlowKeys, upstream: UpstreamKeys) -> Schema:
    """The schema of configurations over the tree `root`.

    Args:
        flows: keys of the known flows; of further flows, any key is accepted.
    """
    defs = definitions()
    for key, keys in flows.items():
        defs[flow_definition(key)] = {"properties": dict(keys), "additionalProperties": False}
    files: list[Schema] = []
    for path, entry in root.sections().items():
        keys = defs[keys_name(path)] = _keys(path, entry, flows, upstream.get(SECTION_AT[path], {}))
        defs[path] = _selection(entry, path, flows) if isinstance(entry, Folder) else _ref(keys_name(path))
        files.append(_tree_file(entry, path, keys["properties"], flows))
    defs[_TREE_FILE] = {"anyOf": files}
    defs["run"] = _folder(root, "", _ref)
    defs[_RESOLVED] = _folder(root, "", lambda path: _ref(keys_name(path)))
    flow_is_resolved: Schema = {"type": "object", "required": ["flow_key"]}
    for name in reversed(FLOW.split(".")):
        flow_is_resolved = {"type": "object", "properties": {name: flow_is_resolved}, "required": [name]}
    return {
        "$schema": DIALECT,
        "title": "megatron-wrap",
        "description": "A run's YAML, a file of the tree, or a resolved configuration (docs/configuration.md).",
        "type": "object",
        "if": {"anyOf": [*({"required": [name]} for name in root.entries), {"maxProperties": 0}]},
        "then": {"if": flow_is_resolved, "then": _ref(_RESOLVED), "else": _ref("run")},
        "else": _ref(_TREE_FILE),
        "$defs": defs,
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def keys_name(path: str) -> str:
    """Name of the definition of a section's keys."""
    return f"keys-of-{path}"


def _when(condition: Schema, then: Schema) -> Schema:
    return {"if": condition, "then": then}


def _is(key: str, value: Any) -> Schema:
    return {"properties": {key: {"const": value}}, "required": [key]}


def _folder(folder: Folder, path: str, section: Callable[[str], Schema]) -> Schema:
    """A mapping with the sections below a folder; section(path) is the schema of each."""
    properties = {}
    for name, entry in folder.entries.items():
        entry_path = f"{path}.{name}" if path else name
        if isinstance(entry, Folder) and not entry.selects_one:
            properties[name] = _folder(entry, entry_path, section)
        else:
            properties[name] = section(entry_path)
    return {"type": ["object", "null"], "properties": properties, "additionalProperties": False}


def _section_class(path: str) -> type:
    section_class: type = get_type_hints(RunConfig)[SECTION_AT[path]]
    return section_class


def _keys(path: str, entry: Folder | TreeFile, flows: FlowKeys, upstream: Mapping[str, Schema]) -> Schema:
    """The keys of a section."""
    section_class = _section_class(path)
    schema: Schema = {
        "type": ["object", "null"],
        "description": " ".join((section_class.__doc__ or "").split()),
        "properties": {**keys_schema(section_class, without=CATCH_ALL), **upstream},
    }
    if path == FLOW:
        schema["allOf"] = [_when(_is("flow_key", key), _ref(flow_definition(key))) for key in flows]
        return schema
    # a file of an overlay may define options of a provider
    defined = {key for file in _files(entry).values() for key in file.read().value} if path == PROVIDER else set()
    schema["properties"] |= {key: {} for key in sorted(defined - {INHERIT, *schema["properties"]})}
    return {**schema, "additionalProperties": False}


def _within_run(path: str, flow_key: str | None = None) -> Schema:
    """The keys of a section as a run's YAML sets them.

    Args:
        flow_key: flow of the selected file, which applies unless the run names another.
    """
    keys = _ref(keys_name(path))
    if flow_key is None:
        return keys
    return {**keys, **_when({"not": {"required": ["flow_key"]}}, _ref(flow_definition(flow_key)))}


def _files(entry: Folder | TreeFile) -> dict[str, TreeFile]:
    """Name -> file, for the files of which a section selects one, or for its only file."""
    entries = entry.entries if isinstance(entry, Folder) else {entry.name: entry}
    return {name: file for name, file in entries.items() if isinstance(file, TreeFile)}


def _flow_key(files: Mapping[str, TreeFile], name: str, flows: FlowKeys) -> str | None:
    """The flow of a file of the tree, inherited ones included; None: its keys are not known."""
    seen: set[str] = set()
    while name in files and name not in seen:
        seen.add(name)
        content = files[name].read().value
        if "flow_key" in content:
            key = content["flow_key"].value
            return key if key in flows else None
        name = str(content[INHERIT].value).removesuffix(".yaml") if INHERIT in content else ""
    return None


def _selection(folder: Folder, path: str, flows: FlowKeys) -> Schema:
    """A section of a run that selects a file: `__select__`, and keys below `__override__` or the file's name."""
    files = _files(folder)
    keys = {name: _within_run(path, _flow_key(files, name, flows) if path == FLOW else None) for name in files}
    any_keys = _within_run(path)
    rules = []
    for name in files:
        is_selected: Schema = {"properties": {SELECT: {"enum": [name, None]}}}
        if name != folder.default:
            is_selected = {"properties": {SELECT: {"const": name}}, "required": [SELECT]}
        rules.append(_when({"required": [name]}, is_selected))
        if keys[name] != any_keys:
            rules.append(_when(_is(SELECT, name), {"properties": {OVERRIDE: keys[name], name: keys[name]}}))
    default = [] if folder.default is None else [None]
    text = f"File of {folder.relative}" + (f"; {folder.default} if none is named." if folder.default else ".")
    section = {
        "type": ["object", "null"],
        "description": " ".join((_section_class(path).__doc__ or "").split()),
        "properties": {
            SELECT: described({"enum": [*files, *default]}, text),
            OVERRIDE: described(any_keys, "Keys that differ from the selected file."),
            **dict.fromkeys(files, any_keys),
        },
        "additionalProperties": False,
    }
    return {**section, "allOf": rules}


def _tree_file(entry: Folder | TreeFile, path: str, keys: Mapping[str, Schema], flows: FlowKeys) -> Schema:
    """A file of the tree for the section at the dotted `path`. It may leave a required key null, and inherit a file of
    the same folder."""
    files = _files(entry) if isinstance(entry, Folder) else {}
    inherited: Schema = {INHERIT: {"enum": [f"{name}.yaml" for name in files]}} if files else {}
    optional = with_default(_section_class(path))
    required = {
        name: or_null(_key_ref(keys_name(path), name))
        for name in section_hints(SECTION_AT[path])
        if name not in optional
    }
    properties = {**inherited, **{name: _key_ref(keys_name(path), name) for name in keys}, **required}
    file: Schema = {"type": "object", "properties": properties}
    if path not in (FLOW, PROVIDER):
        return {**file, "additionalProperties": False}
    # options have any name, unless they are those of a known flow
    name = "flow_key" if path == FLOW else "provider_key"
    file["anyOf"] = [{"required": [name]}, {"required": [INHERIT]}]
    if path == FLOW:
        options = {key: _closed_file(inherited, flow_definition(key), flows[key]) for key in flows}
        file["allOf"] = [_when(_is("flow_key", key), options[key]) for key in flows]
        for file_name in files:
            flow_key = _flow_key(files, file_name, flows)
            if flow_key is not None:
                condition = {**_is(INHERIT, f"{file_name}.yaml"), "not": {"required": ["flow_key"]}}
                file["allOf"].append(_when(condition, options[flow_key]))
    return file


def _closed_file(inherited: Schema, definition: str, keys: Mapping[str, Schema]) -> Schema:
    properties = {**inherited, **{name: _key_ref(definition, name) for name in keys}}
    return {"properties": properties, "additionalProperties": False}


def _key_ref(definition: str, name: str) -> Schema:
    return _ref(f"{definition}/properties/{name}")

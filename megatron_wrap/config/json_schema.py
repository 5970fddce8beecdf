"""The JSON schema (draft 2020-12) of the configuration, with which an editor completes and checks keys.

It describes three kinds of files: a run's YAML, a file of the tree (`configs/nest`, or a `nest/` folder beside a run's
YAML), and the resolved configuration beside a checkpoint. The sections are those of `RunConfig`, selections those of
the tree.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from megatron_wrap.config.decode import section_hints
from megatron_wrap.config.json_types import (
    Schema,
    definitions,
    described,
    keys_schema,
    or_null,
    upstream_keys,
)
from megatron_wrap.config.reading.tree import INHERIT, OVERRIDE, SELECT, Folder, TreeFile, shipped_schema
from megatron_wrap.config.schema.keys import with_default
from megatron_wrap.config.schema.run import CATCH_ALL, SECTION_AT, SECTION_PATHS, UPSTREAM, RunConfig
from megatron_wrap.errors import ConfigError

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FLOW, PROVIDER = SECTION_PATHS["flow"], SECTION_PATHS["model_provider"]
_TREE_FILE, _RESOLVED = "file-of-the-tree", "resolved-configuration"

FlowKeys = Mapping[str, Mapping[str, Schema]]
"""flow_key -> key -> schema, for the flows whose keys are known."""
UpstreamKeys = Mapping[str, Mapping[str, Schema]]
"""Section with keys of Megatron-Core -> key -> schema."""


def shipped_flow_keys() -> FlowKeys:
    """The keys of the shipped flows, which the shipped schema has: their dataclasses cannot be imported without torch.

    Raises:
        ConfigError: the file is missing.
    """
    path = shipped_schema()
    if not path.is_file():
        raise ConfigError(f"{path}: the schema of the package is missing; install megatron-wrap again")
    shipped = json.loads(path.read_text(encoding="utf-8"))["$defs"]
    prefix = _flow_name("")
    return {name.removeprefix(prefix): keys["properties"] for name, keys in shipped.items() if name.startswith(prefix)}


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
        defs[_flow_name(key)] = {"properties": dict(keys), "additionalProperties": False}
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


def _flow_name(flow_key: str) -> str:
    return f"keys-of-flow-{flow_key}"


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
        schema["allOf"] = [_when(_is("flow_key", key), _ref(_flow_name(key))) for key in flows]
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
    return {**keys, **_when({"not": {"required": ["flow_key"]}}, _ref(_flow_name(flow_key)))}


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
        options = {key: _closed_file(inherited, _flow_name(key), flows[key]) for key in flows}
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

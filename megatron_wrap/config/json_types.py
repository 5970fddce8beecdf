"""JSON schemas (draft 2020-12) of types, and of the keys that a dataclass or Megatron-Core declares."""

import dataclasses
import itertools
import json
import math
import types
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_wrap.config.decode import section_hints
from megatron_wrap.config.schema.keys import documentation, has_yaml_form, key_range
from megatron_wrap.config.schema.reference_models import SOURCES as MODEL_SOURCES
from megatron_wrap.config.schema.reference_models import ReferenceModelConfig
from megatron_wrap.config.schema.retired_keys import set_elsewhere
from megatron_wrap.config.schema.run import UPSTREAM
from megatron_wrap.config.schema.sources import SourceConfig
from megatron_wrap.config.schema.types import parse_annotation
from megatron_wrap.config.schema.upstream import UpstreamField, upstream_enums, upstream_fields

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
        allowed = key_range(field)
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

"""A key of a configuration is a field of a dataclass, the only definition of its type, default, range and meaning.

Types are strict: a value from YAML is validated against a type annotation.
"""

import ast
import dataclasses
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from megatron_wrap.config.reading.yaml_nodes import Node, describe
from megatron_wrap.config.schema.familiar_names import unknown_key_hint
from megatron_wrap.errors import ConfigError

_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string", list: "a list"}
_NAMES.update({dict: "a mapping", type(None): "null"})


class Mismatch(Exception):
    """A value is not of the required type; the text describes the type."""


def check_value(value: Any, hint: Any) -> Any:
    """`value` converted to `hint`: lists to tuples, and integers to floats, where the hint is one.

    Strict otherwise: 4.0 is no integer, and 1 or "yes" no boolean.

    Raises:
        Mismatch: it is of another type.
    """
    converted = _convert(value, hint)
    if converted is _NO:
        raise Mismatch(f"must be {describe_type(hint)}")
    return converted


def describe_type(hint: Any) -> str:
    """The annotation in words: `an integer or null`, `one of bf16, fp16`."""
    if hint is Any:
        return "any value"
    if hint in _NAMES:
        return _NAMES[hint]
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(str(choice) for choice in arguments)}"
    if origin in (Union, types.UnionType):
        words = [describe_type(argument) for argument in arguments]
        return " or ".join(words)
    if origin is tuple and Ellipsis not in arguments:
        return f"a list of {len(arguments)} values, each {_each(arguments)}"
    if origin in (list, tuple):
        return f"a list, each value {_each(arguments[:1])}"
    return "a mapping" if origin is not None else str(hint)


def parse_annotation(text: str) -> Any:
    """The type that the source text of an annotation names; None: YAML cannot express it.

    Members of a union that YAML cannot express (an enum, a callable) are left out.
    """
    return _parse_node(ast.parse(text, mode="eval").body)


_NO = object()


def _each(arguments: tuple[Any, ...]) -> str:
    return " or ".join(dict.fromkeys(describe_type(argument) for argument in arguments))


def _convert(value: Any, hint: Any) -> Any:
    if hint is Any:
        return value
    if hint is type(None):
        return None if value is None else _NO
    if hint is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if is_number and math.isfinite(value) else _NO
    if hint in (int, bool, str, list, dict):
        return value if type(value) is hint else _NO
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value if any(value == choice and type(value) is type(choice) for choice in arguments) else _NO
    if origin in (Union, types.UnionType):
        attempts = (_convert(value, argument) for argument in arguments)
        return next((converted for converted in attempts if converted is not _NO), _NO)
    if origin in (list, tuple) and isinstance(value, list):
        fixed = origin is tuple and Ellipsis not in arguments
        if fixed and len(value) != len(arguments):
            return _NO
        items = [_convert(item, arguments[index] if fixed else arguments[0]) for index, item in enumerate(value)]
        return _NO if any(item is _NO for item in items) else origin(items)
    if origin is not None and isinstance(value, dict) and issubclass(origin, Mapping):
        return value
    return _NO


def _parse_node(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and node.value is None:
        return type(None)
    if isinstance(node, ast.Name):
        known = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict, "List": list}
        return known.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([_parse_node(node.left), _parse_node(node.right)])
    if not isinstance(node, ast.Subscript):
        return None
    outer = node.value.id if isinstance(node.value, ast.Name) else ""
    inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    if outer == "Optional":
        member = _parse_node(inner[0])
        return None if member is None else _union([member, type(None)])
    if outer == "Union":
        return _union([_parse_node(item) for item in inner])
    if outer == "Literal":
        return Literal[tuple(ast.literal_eval(item) for item in inner)]  # type: ignore[misc]
    if outer in ("List", "list", "Tuple", "tuple"):
        members = [Ellipsis if isinstance(i, ast.Constant) and i.value is ... else _parse_node(i) for i in inner]
        if any(member is None for member in members):
            return None
        return list[members[0]] if outer in ("List", "list") else tuple[tuple(members)]  # type: ignore[misc,valid-type]
    return None


def _union(members: list[Any]) -> Any:
    parsed = [member for member in members if member is not None]
    if not [member for member in parsed if member is not type(None)]:
        return None
    return typing.Union[tuple(parsed)]  # noqa: UP007 - the members are only known now


_RANGE, _KIND = "range", "kind"


@dataclass(frozen=True)
class Range:
    """The values that a number may have; a bound of None is no limit."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    null_means_off: bool = False
    """Whether null disables what the key configures; a refusal then suggests it."""

    def holds(self, value: float) -> bool:
        """Whether the value is in the range."""
        return (
            (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        bounds = {"at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{words} {bound:g}" for words, bound in bounds.items() if bound is not None)


def key(
    default: Any = MISSING,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
    null_means_off: bool = False,
    kind: str | None = None,
) -> Any:
    """A field with a range; `Config.name: type = default` is enough for a key without one.

    Args:
        default: the value in the shipped YAML; without it a run must set the key.
        at_least, above, at_most, below: the range, for values other than null.
        null_means_off: null disables what the key configures.
        kind: the type in words, if the YAML has another form than the field.
    """
    allowed = Range(at_least, above, at_most, below, null_means_off)
    metadata = {_RANGE: allowed if str(allowed) else None, _KIND: kind}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def key_ranges(section: type) -> Mapping[str, Range]:
    """Name of each field of a dataclass whose values have a range -> the range."""
    ranges = {field.name: field.metadata.get(_RANGE) for field in dataclasses.fields(section)}
    return {name: allowed for name, allowed in ranges.items() if allowed is not None}


def has_yaml_form(field: Field[Any]) -> bool:
    """Whether the YAML has another form than the field, which `kind` describes."""
    return field.metadata.get(_KIND) is not None


@functools.cache
def with_default(section: type) -> frozenset[str]:
    """Names of the fields of a dataclass that have a default."""
    fields = dataclasses.fields(section)
    return frozenset(
        field.name for field in fields if field.default is not MISSING or field.default_factory is not MISSING
    )


def describe_key(section: type, name: str) -> str:
    """The type and the range of a key in words, such as `a number or null, above 0`."""
    field = next(field for field in dataclasses.fields(section) if field.name == name)
    kind = field.metadata.get(_KIND) or describe_type(get_type_hints(section)[name])
    allowed = key_ranges(section).get(name)
    return kind if allowed is None else f"{kind}, {allowed}"


@functools.cache
def documentation(section: type) -> Mapping[str, str]:
    """Name of each field of a dataclass, inherited ones first -> the docstring under it, as one line."""
    docstrings: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if dataclasses.is_dataclass(base):
            definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(definition, ast.ClassDef)
            docstrings.update(field_docstrings(definition))
    return docstrings


def field_docstrings(definition: ast.ClassDef) -> dict[str, str]:
    """Name of each annotated attribute of a class -> the docstring under it, as one line; "" where there is none."""
    docstrings = {}
    for item, following in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            text = str(following.value.value) if is_text else ""  # type: ignore[union-attr]
            docstrings[item.target.id] = " ".join(text.split())
    return docstrings


def checked_field(node: Node, into: type, name: str, path: str) -> Any:
    """The value of the key `name` of a YAML mapping.

    Args:
        into: dataclass with a field for each key.
        path: dotted path of the mapping.

    Raises:
        ConfigError: an unknown key, a wrong type, or a value out of range; the message has file, line and dotted path.
    """
    hints, path = get_type_hints(into), f"{path}.{name}"
    if name not in hints:
        hint = unknown_key_hint(path, hints) or f"; the keys are {', '.join(hints)}"
        raise ConfigError(f"{node.where} {path}: unknown key{hint}")
    try:
        value = check_value(node.plain(), hints[name])
    except Mismatch as mismatch:
        raise ConfigError(f"{node.where} {path}: {mismatch}, not {describe(node.plain())}") from None
    allowed = key_ranges(into).get(name)
    if allowed is not None and value is not None and not allowed.holds(value):
        raise ConfigError(f"{node.where} {path}: must be {allowed}, not {value}")
    return value

"""Strict types: a value from YAML is validated against a type annotation."""

import ast
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

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
    return _parse(ast.parse(text, mode="eval").body)


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


def _parse(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and node.value is None:
        return type(None)
    if isinstance(node, ast.Name):
        known = {"int": int, "float": float, "bool": bool, "str": str, "list": list, "dict": dict, "List": list}
        return known.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([_parse(node.left), _parse(node.right)])
    if not isinstance(node, ast.Subscript):
        return None
    outer = node.value.id if isinstance(node.value, ast.Name) else ""
    inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    if outer == "Optional":
        member = _parse(inner[0])
        return None if member is None else _union([member, type(None)])
    if outer == "Union":
        return _union([_parse(item) for item in inner])
    if outer == "Literal":
        return Literal[tuple(ast.literal_eval(item) for item in inner)]  # type: ignore[misc]
    if outer in ("List", "list", "Tuple", "tuple"):
        members = [Ellipsis if isinstance(i, ast.Constant) and i.value is ... else _parse(i) for i in inner]
        if any(member is None for member in members):
            return None
        return list[members[0]] if outer in ("List", "list") else tuple[tuple(members)]  # type: ignore[misc,valid-type]
    return None


def _union(members: list[Any]) -> Any:
    parsed = [member for member in members if member is not None]
    if not [member for member in parsed if member is not type(None)]:
        return None
    return typing.Union[tuple(parsed)]  # noqa: UP007 - the members are only known now

"""A key of a configuration is a field of a dataclass, the only definition of its type, default, range and meaning."""

import ast
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass
from typing import Any, get_type_hints

from megatron_wrap.config.reading.yaml_nodes import Node, describe
from megatron_wrap.config.schema.familiar_names import unknown_key_hint
from megatron_wrap.config.schema.types import Mismatch, check_value, describe_type
from megatron_wrap.errors import ConfigError

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


def key_range(field: Field[Any]) -> Range | None:
    """The range of a key; None: its type alone limits it."""
    allowed: Range | None = field.metadata.get(_RANGE)
    return allowed


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
    allowed = key_range(field)
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
    fields = {field.name: field for field in dataclasses.fields(into)}
    if name not in fields:
        hint = unknown_key_hint(path, fields) or f"; the keys are {', '.join(fields)}"
        raise ConfigError(f"{node.where} {path}: unknown key{hint}")
    try:
        value = check_value(node.plain(), hints[name])
    except Mismatch as mismatch:
        raise ConfigError(f"{node.where} {path}: {mismatch}, not {describe(node.plain())}") from None
    allowed = key_range(fields[name])
    if allowed is not None and value is not None and not allowed.holds(value):
        raise ConfigError(f"{node.where} {path}: must be {allowed}, not {value}")
    return value

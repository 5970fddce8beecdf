"""A key of a configuration is a field of a dataclass: it has its type, default, range and documentation there alone."""

import ast
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass
from typing import Any, get_type_hints

from megatron_wrap.config.types import describe_type

_RANGE, _KIND = "range", "kind"


@dataclass(frozen=True)
class Range:
    """The values that a number may have; a bound of None does not limit it."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    null_means_off: bool = False
    """Null disables what the key configures; a refusal then suggests it."""

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
        default: the value in the shipped YAML; without one a run must give the key.
        at_least, above, at_most, below: the range, for values other than null.
        null_means_off: null disables what the key configures.
        kind: the type in words, where the YAML has another form than the field.
    """
    allowed = Range(at_least, above, at_most, below, null_means_off)
    metadata = {_RANGE: allowed if str(allowed) else None, _KIND: kind}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def key_range(field: Field[Any]) -> Range | None:
    """The range of a key; None: its type alone limits it."""
    found: Range | None = field.metadata.get(_RANGE)
    return found


def has_own_kind(field: Field[Any]) -> bool:
    """Whether the YAML has another form than the field, so that `kind` describes the type."""
    return field.metadata.get(_KIND) is not None


def describe_key(section: type, name: str) -> str:
    """The type and the range of a key in words, such as `a number or null, above 0`."""
    field = next(field for field in dataclasses.fields(section) if field.name == name)
    kind = field.metadata.get(_KIND) or describe_type(get_type_hints(section)[name])
    allowed = key_range(field)
    return kind if allowed is None else f"{kind}, {allowed}"


@functools.cache
def documentation(section: type) -> Mapping[str, str]:
    """Name of each field of a dataclass, inherited ones first -> the docstring under it, as one line."""
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if dataclasses.is_dataclass(base):
            definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
            assert isinstance(definition, ast.ClassDef)
            found.update(field_docstrings(definition))
    return found


def field_docstrings(definition: ast.ClassDef) -> dict[str, str]:
    """Name of each annotated attribute of a class -> the docstring under it, as one line; "" where there is none."""
    found = {}
    for item, below in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            is_text = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            found[item.target.id] = " ".join(str(below.value.value).split()) if is_text else ""  # type: ignore[union-attr]
    return found

"""Validation of a YAML mapping that a value of the tree contains, against the dataclass that declares its keys."""

import dataclasses
from typing import Any, get_type_hints

from megatron_wrap.config.keys import key_range
from megatron_wrap.config.reading import Node, describe
from megatron_wrap.config.types import Mismatch, check_value
from megatron_wrap.errors import ConfigError, did_you_mean


def checked_field(node: Node, into: type, name: str, path: str) -> Any:
    """The value of the key `name` of a mapping.

    Args:
        into: dataclass with a field for each key.
        path: dotted path of the mapping.

    Raises:
        ConfigError: an unknown key, a wrong type, or a value out of range; the message has file, line and dotted path.
    """
    hints, path = get_type_hints(into), f"{path}.{name}"
    fields = {field.name: field for field in dataclasses.fields(into)}
    if name not in fields:
        hint = did_you_mean(name, fields) or f"; the keys are {', '.join(fields)}"
        raise ConfigError(f"{node.where} {path}: unknown key{hint}")
    try:
        value = check_value(node.plain(), hints[name])
    except Mismatch as mismatch:
        raise ConfigError(f"{node.where} {path}: {mismatch}, not {describe(node.plain())}") from None
    allowed = key_range(fields[name])
    if allowed is not None and value is not None and not allowed.holds(value):
        raise ConfigError(f"{node.where} {path}: must be {allowed}, not {value}")
    return value

"""Advice on keys that are retired, misplaced, or set by the program from another key, read from `retired_keys.yaml`."""

import functools
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from megatron_wrap.config.reading.yaml_nodes import read_yaml
from megatron_wrap.config.schema.run import CATCH_ALL, SECTION_AT, SECTION_PATHS, RunConfig


@functools.cache
def _tables() -> Mapping[str, Any]:
    return read_yaml(Path(__file__).with_suffix(".yaml")).plain()  # type: ignore[no-any-return]


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

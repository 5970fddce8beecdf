"""YAML with comments, which PyYAML cannot write."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml
from yaml.reader import Reader

_COLUMNS = 110
_PLAIN = re.compile(r"[A-Za-z/][\w./:@-]+")


class Noted(NamedTuple):
    """A value of a mapping with a comment, which is written above its key."""

    value: Any
    note: str


def commented_yaml(value: Mapping[str, Any]) -> str:
    """Nested mappings and lists as YAML in block style; keys whose value is None are left out.

    Texts are plain where every version of YAML reads them as texts, else quoted; those of several lines are literal
    blocks.
    """
    return "\n".join(_mapping(value)) + "\n"


def comment(text: str) -> list[str]:
    """Lines of a comment."""
    return textwrap.wrap(text, _COLUMNS, initial_indent="# ", subsequent_indent="# ")


def _mapping(mapping: Mapping[str, Any]) -> Iterator[str]:
    for key, entry in mapping.items():
        value, note = entry if isinstance(entry, Noted) else (entry, "")
        if value is None:
            continue
        yield from comment(note)
        name = _scalar(key)
        if value and isinstance(value, Mapping):
            yield f"{name}:"
            yield from (f"  {line}" for line in _mapping(value))
        elif value and isinstance(value, list | tuple):
            yield f"{name}:"
            yield from _items(value)
        elif isinstance(value, str) and "\n" in value and not Reader.NON_PRINTABLE.search(value):
            yield from _block(name, value)
        else:
            yield f"{name}: {_scalar(value)}"


def _items(values: Sequence[Any]) -> Iterator[str]:
    for value in values:
        if value and isinstance(value, Mapping):
            lines = list(_mapping(value))
            # a comment of the first key stays above its item
            first = next(index for index, line in enumerate(lines) if not line.startswith("# "))
            yield from lines[:first]
            yield f"- {lines[first]}"
            yield from (f"  {line}" for line in lines[first + 1 :])
        else:
            yield f"- {_scalar(value)}"


def _block(name: str, text: str) -> Iterator[str]:
    body = text.rstrip("\n")
    keep = {0: "-", 1: ""}.get(len(text) - len(body), "+")
    indicator = "2" if text[0] in " \n" else ""
    yield f"{name}: |{indicator}{keep}"
    for line in text.removesuffix("\n").split("\n"):
        yield f"  {line}" if line else ""


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and yaml.safe_load(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)

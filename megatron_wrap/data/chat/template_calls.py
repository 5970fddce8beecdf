"""Calls of a chat template whose result is much larger than their arguments. Each is a single function written in C,
which no limit of time can stop, so it is estimated before it is called."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

METHODS = frozenset(
    ("ljust", "rjust", "center", "zfill", "expandtabs", "replace", "join", "format", "format_map", "translate")
)
"""Of str."""
FILTERS = ("center", "indent", "wordwrap", "batch", "slice", "tojson", "format", "replace", "join")
"""Of jinja2."""
_OF_WIDTHS = frozenset(
    ("ljust", "rjust", "center", "zfill", "expandtabs", "indent", "wordwrap", "batch", "slice", "tojson")
)
"""Their integers are widths or counts."""
_FIELD = re.compile(r"\{[^{}]*:([^{}]*)(\{)?")
_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*([\d*]*\.?[\d*]*)")
_NUMBER = re.compile(r"\d+")


def size_of_result(name: str, value: Any, arguments: Sequence[Any]) -> int:
    """Upper bound of the characters that a method or filter returns, beyond those of its arguments.

    Args:
        name: one of METHODS, FILTERS or `%`.
        value: the text of the method, or what the filter is applied to.
        arguments: positional and named ones.
    """
    text = value if isinstance(value, str) else ""
    sizes: list[int] = []
    if name in _OF_WIDTHS:
        repeats = 1 + text.count("\n") + text.count("\t")
        sizes = [repeats * number for number in _integers(arguments)]
    elif name in ("format", "format_map", "%"):
        sizes = _widths(text, arguments)
    elif name == "replace" and len(arguments) > 1:
        old, new = map(str, arguments[:2])
        sizes.append((text.count(old) if old else len(text) + 1) * len(new))
    elif name == "translate" and arguments and isinstance(arguments[0], Mapping):
        sizes.append(len(text) * max((len(item) for item in arguments[0].values() if isinstance(item, str)), default=0))
    elif name == "join":
        separator, items = (text, arguments[:1]) if isinstance(value, str) else (arguments[:1], [value])
        listed = items[0] if items else ()
        if isinstance(listed, list | tuple):
            between = separator if isinstance(separator, str) else str(separator[0]) if separator else ""
            sizes.append(weight(listed) + len(listed) * len(between))
    return max(sizes, default=0)


def weight(value: Any) -> int:
    """Length of a text, or of the texts in a list."""
    if isinstance(value, list | tuple):
        return sum(len(item) if isinstance(item, str | list | tuple) else 1 for item in value)
    return len(value)


def method_of(function: Any) -> tuple[str, str] | None:
    """Name and text of a method of str in METHODS, which jinja2 may have wrapped; None for other functions."""
    function = getattr(function, "__wrapped__", function)
    text, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    return (name, text) if isinstance(text, str) and name in METHODS else None


def bounded_filter(name: str, function: Callable[..., Any], check: Callable[[str, int], None]) -> Callable[..., Any]:
    """A filter that calls `check(name, size of the result)` first."""
    skipped = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0  # jinja2's environment or context

    @functools.wraps(function)
    def filtered(*arguments: Any, **named: Any) -> Any:
        value, *others = arguments[skipped:]
        check(name, size_of_result(name, value, [*others, *named.values()]))
        return function(*arguments, **named)

    return filtered


def _widths(text: str, arguments: Sequence[Any]) -> list[int]:
    """The widths and precisions of a text with fields of `str.format` or `%`; all integers if an argument is one."""
    widths = [(match[1], match[2] == "{") for match in _FIELD.finditer(text)]
    widths += [(match[1], "*" in match[1]) for match in _PERCENT.finditer(text)]
    numbers = [int(digits) for width, _ in widths for digits in _NUMBER.findall(width)]
    return numbers + (_integers(arguments) if any(by_argument for _, by_argument in widths) else [])


def _integers(arguments: Iterable[Any]) -> list[int]:
    every = [item for argument in arguments for item in (argument if isinstance(argument, tuple) else (argument,))]
    return [item for item in every if isinstance(item, int)]

"""YAML files as nodes with file and line, read and written; `2e-4` is a number (YAML 1.2), unlike in PyYAML."""

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_wrap.errors import ConfigError, special_file
from megatron_wrap.nearest_names import did_you_mean

COMMAND_LINE = "command line"

MAX_BYTES = 1 << 22
"""Largest size of a file, in bytes."""
MAX_DEPTH = 64
"""Largest depth of nested lists and mappings."""
MAX_VALUES = 200_000
"""Largest number of values in a file, where an alias counts as the values that it stands for."""
_MANY_INDICATORS = 1000
_PLAIN = re.compile(r"[A-Za-z_][\w-]{0,98}", re.ASCII)
"""Text that needs no quotes, unless it is one of `_WORDS`."""
_WORDS = frozenset(("null", "true", "false", "yes", "no", "on", "off", "y", "n"))
"""Texts that YAML 1.1 or 1.2 reads as null or a boolean, in any case."""
_TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9_]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """A loader that resolves plain scalars by the core schema of YAML 1.2 (yaml.org/spec/1.2.2, section 10.3.2);
    `1_000` is a number, as in PyYAML."""

    yaml_implicit_resolvers: dict[Any, Any] = {}


def _add_resolvers(target: Any) -> None:
    for tag, pattern, first in (
        ("null", re.compile(r"~|null|Null|NULL|"), ["~", "n", "N", ""]),
        ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), list("tTfF")),
        ("int", _INT, list("-+0123456789")),
        ("float", _FLOAT, list("-+.0123456789")),
        ("merge", re.compile("<<"), ["<"]),
    ):
        target.add_implicit_resolver(_TAG + tag, re.compile(f"^(?:{pattern.pattern})$"), first)


_add_resolvers(_Loader)


@dataclass(frozen=True)
class Node:
    """A value of a YAML file or of the command line.

    `value` is a scalar, a plain list, or a dictionary of further nodes. `line` counts from 1; 0: no line. `items` are
    the nodes of a list's items.
    """

    value: Any
    file: str
    line: int = 0
    items: tuple["Node", ...] = ()

    @property
    def where(self) -> str:
        """`file:line`, or `command line`."""
        return f"{self.file}:{self.line}" if self.line else self.file

    def plain(self) -> Any:
        """The node's value without positions."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):  # a copy: later readings of a file share its nodes
            return [item.plain() for item in self.items] if self.items else list(self.value)
        return self.value


def shown_path(path: str | os.PathLike[str]) -> str:
    """The path as messages show it: relative to the working directory where it lies below it."""
    text, folder = os.fspath(path), os.getcwd()
    below = os.path.abspath(text).removeprefix(folder if folder.endswith(os.sep) else folder + os.sep)
    return text if os.path.isabs(below) else below


def read_yaml(path: Path, missing_hint: str = "") -> Node:
    """The mapping of a YAML file, with positions.

    Raises:
        ConfigError: the file is missing, empty, not a mapping, not YAML, sets a key twice, or exceeds MAX_BYTES,
            MAX_DEPTH or MAX_VALUES.
    """
    shown = shown_path(path)
    if reason := special_file(path):
        raise ConfigError(reason)
    if not os.path.isfile(path):  # Path.is_file raises if a folder may not be entered
        kind = "is a folder, not a YAML file" if os.path.isdir(path) else "no such file"
        siblings = [entry.name for entry in path.parent.glob("*.y*ml")]
        raise ConfigError(f"{shown}: {kind}{missing_hint or did_you_mean(path.name, siblings)}")
    try:
        if (size := os.path.getsize(path)) > MAX_BYTES:
            raise ConfigError(f"{shown}: {size:,} bytes, more than the {MAX_BYTES:,} of a configuration; is it one?")
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{shown}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{shown}: cannot be read ({error.strerror})") from error
    node = _parse(text, shown)
    if node is None or (node.value is None and not text.strip().startswith(("null", "~"))):
        raise ConfigError(f"{shown}: empty; a YAML mapping (key: value lines) is expected")
    if not isinstance(node.value, dict):
        raise ConfigError(
            f"{node.where}: a mapping (key: value lines) is expected, not {describe(node.value)}; "
            "is there a space after the colon?"
        )
    return node


def read_value(text: str) -> Node:
    """The value of a command-line `key=value`, read as YAML."""
    node = _parse(text, COMMAND_LINE)
    return Node(None, COMMAND_LINE) if node is None else node


def describe(value: Any) -> str:
    """A value and its YAML type, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    kinds = {int: "integer", float: "float", str: "string", list: "list", tuple: "list", dict: "mapping"}
    kind = kinds.get(type(value), type(value).__name__)
    text = repr(list(value) if isinstance(value, tuple) else value)
    return f"the {kind} {text if len(text) <= 60 else text[:57] + '...'}"


@functools.lru_cache(maxsize=1024)  # each run of a process, as of check-parity, reads the same 30 of 150 files
def _parse(text: str, shown: str) -> Node | None:
    loader = _Loader(text)
    try:
        _check_depth(text, shown)
        root = loader.get_single_node()
        if root is None:
            return None
        _check_size(root, shown)
        return _convert(root, shown, ())
    except RecursionError as error:
        raise ConfigError(_too_deep(shown)) from error
    except yaml.MarkedYAMLError as error:
        raise ConfigError(_syntax_message(error, text, shown)) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{shown}: not YAML ({' '.join(str(error).split())})") from error
    finally:
        loader.dispose()


def _check_depth(text: str, shown: str) -> None:
    """Refuse very deep nesting before nodes are composed: libyaml's composer recurses in C, which can crash Python."""
    if sum(map(text.count, "[{-?")) < _MANY_INDICATORS:
        return
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(_too_deep(shown))


def _check_size(root: yaml.Node, shown: str) -> None:
    """Refuse more values or levels than the limits: aliases of aliases multiply."""
    sizes: dict[int, int] = {}

    def measure(node: yaml.Node, depth: int) -> int:
        if depth > MAX_DEPTH:
            raise ConfigError(_too_deep(shown))
        if id(node) not in sizes:
            sizes[id(node)] = 1  # for an alias that contains itself, which `_convert` refuses
            if isinstance(node, yaml.MappingNode):
                # the value of a merge is read once more for its keys
                below = [(value, 2 if key.tag == _TAG + "merge" else 1) for key, value in node.value]
            else:
                below = [(item, 1) for item in node.value] if isinstance(node, yaml.SequenceNode) else []
            sizes[id(node)] = 1 + sum(times * measure(value, depth + 1) for value, times in below)
        return sizes[id(node)]

    if measure(root, 1) > MAX_VALUES:
        raise ConfigError(
            f"{shown}: more than {MAX_VALUES:,} values once its aliases (*name) are replaced; write fewer aliases"
        )


def _too_deep(shown: str) -> str:
    return f"{shown}: lists or mappings nested more than {MAX_DEPTH} levels deep; a configuration needs fewer"


def _syntax_message(error: yaml.MarkedYAMLError, text: str, shown: str) -> str:
    mark = error.problem_mark or error.context_mark
    line = mark.line if mark else 0
    lines = text.splitlines()
    where = shown if shown == COMMAND_LINE else f"{shown}:{line + 1}"
    for number in range(line, max(line - 2, -1), -1):  # the parser may stop at the line after the tab
        content = lines[number] if number < len(lines) else ""
        if "\t" in content[: len(content) - len(content.lstrip())]:
            return f"{shown}:{number + 1}: a tab in the indentation; YAML is indented with spaces"
    context = f" ({error.context})" if error.context else ""
    column = f", column {mark.column + 1}" if mark else ""
    return f"{where}: YAML syntax error{column}: {error.problem}{context}"


def _convert(node: yaml.Node, shown: str, parents: tuple[int, ...]) -> Node:
    line = 0 if shown == COMMAND_LINE else node.start_mark.line + 1
    where = f"{shown}:{line}" if line else shown
    if id(node) in parents:
        raise ConfigError(f"{where}: an alias that contains itself; write the value out")
    if isinstance(node, yaml.MappingNode):
        return Node(_convert_mapping(node, shown, (*parents, id(node))), shown, line)
    if isinstance(node, yaml.SequenceNode):
        items = tuple(_convert(item, shown, (*parents, id(node))) for item in node.value)
        return Node([item.plain() for item in items], shown, line, items)
    return Node(_scalar(node, where), shown, line)


def _convert_mapping(node: yaml.MappingNode, shown: str, parents: tuple[int, ...]) -> dict[str, Node]:
    merged: dict[str, Node] = {}
    explicit: dict[str, Node] = {}
    for key_node, value_node in node.value:
        line = 0 if shown == COMMAND_LINE else key_node.start_mark.line + 1
        where = f"{shown}:{line}" if line else shown
        value = _convert(value_node, shown, parents)
        if key_node.tag == _TAG + "merge":
            sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
            for source in sources:
                content = _convert(source, shown, parents).value
                if not isinstance(content, dict):
                    raise ConfigError(f"{where}: `<<` takes a mapping or a list of mappings")
                merged = {**content, **merged}
            continue
        key = _scalar(key_node, where) if isinstance(key_node, yaml.ScalarNode) else None
        if not isinstance(key, str):
            raise ConfigError(f"{where}: the key {key_node.value!r} is not a string; put it in quotes")
        if key in explicit:
            raise ConfigError(f"{where} {key}: set twice in a mapping, first at line {explicit[key].line}; delete one")
        # the line of the key: a value may begin a line later
        explicit[key] = Node(value.value, shown, line, value.items)
    return {**merged, **explicit}


def _scalar(node: yaml.Node, where: str) -> Any:
    text = node.value
    kind = node.tag.removeprefix(_TAG)
    try:
        if kind == "null":
            return None
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        if kind == "int":
            digits = text.replace("_", "")
            return int(digits, 0) if digits[:2] in ("0x", "0o") else int(digits)
        if kind == "float":
            return float(text.replace("_", "").replace(".inf", "inf").replace(".Inf", "inf").replace(".nan", "nan"))
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{where}: {text!r} is not of the YAML type {kind}") from error
    if kind in ("str", "merge"):
        return text
    raise ConfigError(f"{where}: the YAML tag {node.tag} is not supported; write a plain value")


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes every string that YAML 1.1 or 1.2 would read as another type."""

    yaml_implicit_resolvers = {key: list(value) for key, value in yaml.SafeDumper.yaml_implicit_resolvers.items()}

    def ignore_aliases(self, data: Any) -> bool:
        return True


_add_resolvers(_Dumper)
_Dumper.add_representer(  # a text of several lines stays on one line of the file
    str, lambda dumper, text: dumper.represent_scalar(_TAG + "str", text, style='"' if "\n" in text else None)
)


def dump_yaml(value: Any, comments: Mapping[str, object] | None = None) -> str:
    """`value` as YAML text that PyYAML and `read_yaml` both read back equal.

    Args:
        comments: dotted path of a value -> comment at the end of its line.
    """
    if not isinstance(value, dict) or not value:
        return _dump(value, in_blocks=True)
    lines: list[str] = []
    _add_block(lines, value, "", "", comments or {})
    return "".join(lines)


def _add_block(
    lines: list[str], mapping: dict[str, Any], indent: str, prefix: str, comments: Mapping[str, object]
) -> None:
    """Add the lines of a mapping as PyYAML writes them, in a tenth of its time."""
    for key, value in mapping.items():
        path, is_simple = f"{prefix}{key}", type(key) is str and 0 < len(key) < 100 and key.isprintable()
        end = f"  # {comments[path]}\n" if path in comments else "\n"
        if not is_simple or (isinstance(value, list | tuple) and value):
            first, *more = _dump({key: value}, in_blocks=True).split("\n")[:-1]
            lines += [f"{indent}{first}{end}", *(f"{indent}{line}\n" for line in more)]
        elif isinstance(value, dict) and value:
            lines.append(f"{indent}{inline_yaml(key)}:{end}")
            _add_block(lines, value, indent + "  ", f"{path}.", comments)
        else:
            lines.append(f"{indent}{inline_yaml(key)}: {inline_yaml(value)}{end}")


def inline_yaml(value: Any) -> str:
    """`value` as YAML text on one line."""
    if value is None or type(value) in (bool, int):  # most values of a configuration; an emitter costs 0.5 ms
        return "null" if value is None else str(value).lower()
    if type(value) is float:
        return _inline_float(repr(value))
    if type(value) in (list, dict) and not value:
        return "[]" if type(value) is list else "{}"
    if type(value) is not str:
        return _inline(value)
    return value if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else _inline_text(value)


@functools.lru_cache(maxsize=1024)  # names that many values and runs have
def _inline_text(text: str) -> str:
    return _inline(text)


@functools.lru_cache(maxsize=1024)
def _inline_float(digits: str) -> str:
    return _inline(float(digits))


def _inline(value: Any) -> str:
    return _dump(value, in_blocks=False).removesuffix("...\n").strip()


def _dump(value: Any, in_blocks: bool) -> str:
    text: str = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=not in_blocks, sort_keys=False, allow_unicode=True, width=10**6
    )
    return text

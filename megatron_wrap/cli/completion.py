"""`megatron-wrap completion SHELL`: print the code by which a shell completes commands, options, files and
overrides."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megatron_wrap.cli.main import COMMANDS, command_parser
from megatron_wrap.config.decode import read_view, section_hints
from megatron_wrap.config.reading.tree import SELECT, Folder, open_tree
from megatron_wrap.config.schema.run import SECTION_AT, SECTION_PATHS
from megatron_wrap.errors import MegatronWrapError

_BREAKS = "=:"
"""Characters at which bash begins another word."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")
    parser.add_argument("--line", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Prints the code for the shell, which calls this command with the line up to the cursor for the candidates."""
    if arguments.line is None:
        code = Path(__file__).parent / "templates" / f"completion.{arguments.shell}"
        print(code.read_text(encoding="utf-8"), end="")
        return 0
    words = _words(arguments.line)
    begin = max(map(words[-1].rfind, _BREAKS)) + 1 if arguments.shell == "bash" else 0
    for candidate in candidates(words[1:]):
        print(candidate[begin:])
    return 0


def candidates(words: list[str]) -> list[str]:
    """Completions of the last word, which may be empty.

    Args:
        words: of the command line, without the program's name.

    Returns:
        Whole words. One that ends with =, . or / continues."""
    *before, current = words or [""]
    if not before:
        return _matching(current, [*COMMANDS, "--help", "--version"])
    if before[0] not in COMMANDS:
        return []
    _, parser = command_parser(before[0])
    options = parser._option_string_actions
    action = options.get(before[-1])
    if action is not None and action.nargs != 0:
        return _matching(current, map(str, action.choices)) if action.choices else _files(current)
    if current.startswith("-"):
        return _matching(current, [option for option in options if option.startswith("--")])
    positional = {each.dest: each for each in parser._actions if not each.option_strings}
    choices = next((each.choices for each in positional.values() if each.choices), None)
    if choices is not None:
        return _matching(current, choices)
    if "config" not in positional:
        return _files(current)
    config = next((word for word in before[1:] if word.endswith((".yaml", ".yml"))), None)
    if config is None:
        return _files(current, (".yaml", ".yml"))
    overrides = _overrides(config, current)
    # of explain the key alone is a word as well
    return [text.removesuffix("=") for text in overrides] if before[0] == "explain" else overrides


def _words(line: str) -> list[str]:
    """The words of a command line, the last of which ends at the cursor."""
    for closing in ("", '"', "'"):
        with contextlib.suppress(ValueError):
            words = shlex.split(line + closing)
            return [*words, ""] if not words or (not closing and line[-1:].isspace()) else words
    return [""]


def _matching(prefix: str, words: Iterable[str]) -> list[str]:
    return sorted(word for word in set(words) if word.startswith(prefix))


def _files(prefix: str, endings: tuple[str, ...] = ("",)) -> list[str]:
    """Paths that begin with `prefix`: folders, and files with one of these endings."""
    folder, name = os.path.split(prefix)
    paths = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(os.path.expanduser(folder) or "."):
            hidden = entry.name.startswith(".") and not name.startswith(".")
            if entry.name.startswith(name) and not hidden and (entry.is_dir() or entry.name.endswith(endings)):
                paths.append(shlex.quote(os.path.join(folder, entry.name)) + ("/" if entry.is_dir() else ""))
    return sorted(paths)


def _overrides(config: str, prefix: str) -> list[str]:
    """Overrides of a run that begin with `prefix`, up to the next dot or equals sign."""
    path, equals, value = prefix.partition("=")
    root = _root(config)
    if equals:
        section, _, key = path.rpartition(".")
        return [f"{path}={text}" for text in _matching(value, _values(root, section, key))]
    overrides = set()
    for known in (f"{section}.{key}" for section, keys in _keys(config, root).items() for key in keys):
        if known.startswith(path):
            end = known.find(".", len(path))
            overrides.add(f"{known}=" if end < 0 else known[: end + 1])
    return sorted(overrides)


def _keys(config: str, root: Folder) -> dict[str, set[str]]:
    """Dotted path of each section -> its keys: of the dataclasses, and where the run can be read, of the files that it
    selects, such as those of its flow."""
    keys = {path: set(section_hints(section)) for section, path in SECTION_PATHS.items()}
    for path, entry in root.sections().items():
        keys.setdefault(path, set()).update([SELECT] if isinstance(entry, Folder) and entry.entries else [])
    with contextlib.suppress(MegatronWrapError):
        for path, section in read_view(config).sections.items():
            keys.setdefault(path, set()).update(section.origins)
    return keys


def _values(root: Folder, section: str, key: str) -> list[str]:
    """The values of a key that has few."""
    if key == SELECT:
        selection = root.sections().get(section)
        return list(selection.entries) if isinstance(selection, Folder) else []
    hint: Any = section_hints(SECTION_AT[section]).get(key) if section in SECTION_AT else None
    texts: list[str] = []
    for part in (hint, *get_args(hint)) if get_origin(hint) is not Literal else (hint,):
        if part is bool:
            texts += ["true", "false"]
        elif part is type(None):
            texts.append("null")
        elif get_origin(part) is Literal:
            texts += [str(value) for value in get_args(part)]
    return texts


def _root(config: str) -> Folder:
    with contextlib.suppress(MegatronWrapError):
        return open_tree(Path(config))
    return Folder("", "")

"""`megatron-wrap completion SHELL`: print the shell code that completes commands, options, files and overrides by
argcomplete."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from megatron_wrap.cli.main import COMMANDS, command_parser
from megatron_wrap.config.decode import read_view, section_hints
from megatron_wrap.config.reading.tree import SELECT, Folder, open_tree
from megatron_wrap.config.schema.run import SECTION_AT, SECTION_PATHS
from megatron_wrap.errors import MegatronWrapError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def run(arguments: argparse.Namespace) -> int:
    """Prints the code for the shell, which calls `megatron-wrap` with the environment variables of argcomplete."""
    import argcomplete

    print(argcomplete.shellcode(["megatron-wrap"], shell=arguments.shell))
    return 0


def complete() -> None:
    """Writes the candidates for the command line in COMP_LINE, and ends the process."""
    from argcomplete import autocomplete

    program = argparse.ArgumentParser(prog="megatron-wrap")
    program.add_argument("--version", action="store_true")
    commands = program.add_subparsers()
    for name in COMMANDS:
        # only the module of the command in the line is imported
        is_named = name in os.environ["COMP_LINE"].split()[1:2]
        parents = [command_parser(name)[1]] if is_named else []
        command = commands.add_parser(name, parents=parents, conflict_handler="resolve")
        for action in command._actions:
            if action.nargs == "*":  # argparse expects no such argument after an option
                action.nargs = "+"
    completer: Any = _complete_argument  # argcomplete accepts any function with these parameters
    autocomplete(program, always_complete_options=False, default_completer=completer)


def _complete_argument(prefix: str, action: argparse.Action, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """Values that complete an argument without choices."""
    from argcomplete.completers import FilesCompleter

    if action.dest in ("overrides", "rest"):
        return complete_override(prefix, vars(parsed_args).get("config"), "" if action.dest == "rest" else "=")
    return list(FilesCompleter(("yaml", "yml") if action.dest == "config" else ())(prefix))


def complete_override(prefix: str, config: str | None, ending: str = "=") -> list[str]:
    """Overrides of a run that begin with `prefix`, up to the next dot or the end of a key. If only one section begins
    with it, the overrides of that section."""
    path, equals, value = prefix.partition("=")
    root = _root(config or "")
    if equals:
        section, _, key = path.rpartition(".")
        return [f"{path}={text}" for text in _values(root, section, key) if text.startswith(value)]
    names = [f"{section}.{key}" for section, keys in _keys(config or "", root).items() for key in keys]
    while True:
        candidates = set()
        for name in names:
            if name.startswith(path):
                end = name.find(".", len(path))
                candidates.add(name + ending if end < 0 else name[: end + 1])
        if len(candidates) != 1 or not min(candidates).endswith("."):
            return sorted(candidates)
        [path] = candidates


def _keys(config: str, root: Folder) -> Mapping[str, set[str]]:
    """Dotted path of each section -> its keys: keys of the dataclasses, and, where the run can be read, keys of the
    files that it selects, such as its flow's file."""
    keys = {path: set(section_hints(section)) for section, path in SECTION_PATHS.items()}
    for path, entry in root.sections().items():
        keys.setdefault(path, set()).update([SELECT] if isinstance(entry, Folder) and entry.entries else [])
    with contextlib.suppress(MegatronWrapError):
        for path, section in read_view(config).sections.items():
            keys.setdefault(path, set()).update(section.origins)
    return keys


def _values(root: Folder, section: str, key: str) -> list[str]:
    """Completions of a key's value: files of a selection, booleans, null and literals; empty for other types."""
    if key == SELECT:
        selection = root.sections().get(section)
        return list(selection.entries) if isinstance(selection, Folder) else []
    hint: Any = section_hints(SECTION_AT[section]).get(key) if section in SECTION_AT else None
    texts: list[str] = []
    for part in (hint, *get_args(hint)):
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

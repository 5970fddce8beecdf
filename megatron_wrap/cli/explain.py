"""`megatron-wrap explain CONFIG [KEY] [a.b.c=value ...]`: value, type, meaning and origins of a key."""

import argparse
import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_type_hints

from megatron_wrap.bridge.adapters.run_adapter import run_adapter
from megatron_wrap.bridge.adapters.trained_parameters import adapter_lines, trained_shape
from megatron_wrap.bridge.loading.hub import with_downloads
from megatron_wrap.config.checks.run import check_configuration
from megatron_wrap.config.decode import decode, load_tree, section_hints
from megatron_wrap.config.defaults import (
    CONNECTIONS,
    Choice,
    all_choices,
    has_transformer_engine_layers,
    layer_choices,
    with_choices,
)
from megatron_wrap.config.reading.composition import ComposedConfig
from megatron_wrap.config.reading.tree import Origin, Section
from megatron_wrap.config.reading.yaml_nodes import inline_yaml
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.familiar_names import familiar_advice
from megatron_wrap.config.schema.keys import describe_key, describe_type, documentation
from megatron_wrap.config.schema.run import SECTION_AT, SECTION_PATHS, UPSTREAM, RunConfig
from megatron_wrap.config.schema.upstream import upstream_enums, upstream_fields
from megatron_wrap.errors import ConfigError, LayoutError, Mistakes
from megatron_wrap.launch.interface import nodes_of
from megatron_wrap.nearest_names import closest, did_you_mean
from megatron_wrap.plan.context_exchange import exchange_choice
from megatron_wrap.plan.pipeline_split import split_choice
from megatron_wrap.platform.base.machine import this_machine

_COMMENT = re.compile(r"""(?:'[^']*'|"[^"]*"|(?<!\s)#|[^'"#])+(?<=\s)#\s*(\S.*)""")
"""Matches a line of YAML with a comment after the value; `#` in quotes, or not after a space, does not begin one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the subcommand."""
    parser.add_argument("config", metavar="CONFIG", help="YAML of the run")
    parser.add_argument(
        "rest",
        nargs="*",
        default=[],
        metavar="[KEY] [a.b.c=value ...]",
        help="dotted path of a key or section (default: the whole configuration), and overrides, applied last",
    )


def run(args: argparse.Namespace) -> int:
    """Prints value, type, meaning and origins of KEY, or a table of a section or of the whole configuration. Includes
    the values that this machine and `megatron-wrap train` would choose for keys that the YAML leaves open, and, after
    the section `megatron_wrap.adapter`, the modules that it adapts.

    Raises:
        MegatronWrapError: a contradiction of the configuration alone, after the values are printed.
    """
    keys = [text for text in args.rest if "=" not in text]
    if len(keys) > 1:
        raise ConfigError(f"one KEY at a time, not {len(keys)}: {', '.join(keys)}; an override is written a.b.c=value")
    overrides = [text for text in args.rest if "=" in text]
    tree = with_downloads(lambda: load_tree(args.config, overrides))
    config = decode(tree, Path(args.config).stem)  # refuses a value of the wrong type
    mistakes = Mistakes()
    chosen: tuple[Choice, ...] = ()
    with mistakes.collected():
        check_configuration(config)
    with mistakes.collected():
        chosen = _choices_here(config)
    adapted: list[str] = []
    with mistakes.collected():
        adapter = run_adapter(config)
        adapted = [] if adapter is None else adapter_lines(adapter, config.arch.vocab_size)
    lines = [explain(tree, keys[0] if keys else None, chosen)]
    if keys == [SECTION_PATHS["adapter"]]:
        lines += adapted
    print("\n".join(lines), flush=True)
    mistakes.raise_first()
    return 0


def _choices_here(config: RunConfig) -> tuple[Choice, ...]:
    """The choices that `megatron-wrap train` would make, with the processes that it would start on this machine."""
    processes = derived.processes_needed(config)
    with contextlib.suppress(LayoutError):  # the environment of a node describes no run
        processes = nodes_of(config).world_size
    shards = derived.data_parallel_size(config, processes) * config.parallel.context_parallel_size
    machine = this_machine(config.init.platform)
    chosen = all_choices(config, machine, max(1, shards), os.environ.get(CONNECTIONS))
    tokens = config.arch.vocab_size  # without a tokenizer nothing more is known, and explain loads none
    split = None
    if tokens is not None and derived.splits_by_cost(config):
        split = split_choice(config, trained_shape(config, tokens), machine.device)
    here = with_choices(config, layer_choices(config, machine))
    exchange = exchange_choice(here, has_transformer_engine_layers(here, machine))
    return (*chosen, *(choice for choice in (split, exchange) if choice is not None))


@dataclass(frozen=True)
class Explanation:
    """Explanation of a value: `value` as YAML text, `kind` its type in words, `origins` last first."""

    path: str
    value: str
    kind: str
    doc: str
    origins: tuple[str, ...]
    choice: Choice | None = None
    """The choice on this machine for a key that the YAML leaves null; None for other keys."""
    left_out: str = ""
    """The line of the run's YAML that sets the key for a file of the tree which the command line does not select;
    empty: none."""

    def __str__(self) -> str:
        lines = [f"{self.path} = {self.value}", f"  type: {self.kind}"]
        lines += [f"  {self.doc}"] if self.doc else []
        lines += [f"  set at {self.origins[0]}"]
        lines += [f"  over {origin}" for origin in self.origins[1:]]
        lines += [f"  left out {self.left_out}"] if self.left_out else []
        lines += [] if self.choice is None else [_here(self.choice)]
        return "\n".join(lines)


def explain(tree: ComposedConfig, key: str | None = None, chosen: Sequence[Choice] = ()) -> str:
    """Text about the value at the dotted `key`, about the values below it, or about all values.

    Args:
        chosen: choices on this machine for keys that the YAML leaves null, and for environment variables.

    Raises:
        ConfigError: nothing is at `key`; the message names the nearest path.
    """
    leaves, by_path = tree.leaves(), {choice.path: choice for choice in chosen}
    if key is None:
        unset = [choice for path, choice in by_path.items() if path not in leaves]
        table = _table(leaves, by_path, tree.left_out())
        return "\n".join([table, *(f"{_assigned(choice)}  # {choice.reason}" for choice in unset)])
    key = key.replace(".__override__.", ".").removesuffix(".__override__")
    if key in leaves:
        return str(explain_value(tree, key, by_path.get(key)))
    if key in by_path and "." not in key:
        return f"{_assigned(by_path[key])}\n  {by_path[key].reason}"
    nested = {path: origins for path, origins in leaves.items() if path.startswith(key + ".")}
    if nested:
        left_out = {path: origin for path, origin in tree.left_out().items() if path.startswith(key + ".")}
        return _table(nested, by_path, left_out)
    not_set = _unset_upstream(key)
    if not_set is not None:
        return "\n".join([not_set, *([_here(by_path[key])] if key in by_path else [])])
    ends = [path for path in leaves if path.endswith("." + key)]
    if len(ends) == 1:  # a key's last name is enough if it is unique
        return str(explain_value(tree, ends[0], by_path.get(ends[0])))
    if ends:
        raise ConfigError(f"{key}: is a key of several sections: {', '.join(ends)}")
    raise ConfigError(f"{key}: unknown key{_nearest_path(key, leaves)}")


def explain_value(tree: ComposedConfig, path: str, choice: Choice | None = None) -> Explanation:
    """The explanation of the value at the dotted `path`, which must be one of `tree.leaves()`."""
    origins = tree.origins(path)
    section = next(section for section in tree.sections.values() if path.startswith(section.path + "."))
    key = path[len(section.path) + 1 :]
    kind, doc = _kind_and_doc(section, key, [origin.node.plain() for origin in origins])
    steps = [f"{origin}: {inline_yaml(origin.node.plain())}" for origin in reversed(origins)]
    left = tree.left_out().get(path)
    left_out = "" if left is None else f"{left}: {inline_yaml(left.node.plain())}"
    return Explanation(path, inline_yaml(origins[-1].node.plain()), kind, doc, tuple(steps), choice, left_out)


def _here(choice: Choice) -> str:
    return f"  here: {inline_yaml(choice.value)}, because {choice.reason}"


def _assigned(choice: Choice) -> str:
    value = choice.value if isinstance(choice.value, str) else inline_yaml(choice.value)
    return f"{choice.path} = {value}"


def _table(leaves: Mapping[str, Sequence[Any]], chosen: Mapping[str, Choice], left_out: Mapping[str, Origin]) -> str:
    rows = []
    for path, origins in leaves.items():
        here = f" (here {inline_yaml(chosen[path].value)})" if path in chosen else ""
        rows.append((f"{path} = {inline_yaml(origins[-1].node.plain())}{here}", str(origins[-1])))
    rows += [(f"left out: {path} = {inline_yaml(of.node.plain())}", str(of)) for path, of in left_out.items()]
    width = min(max((len(left) for left, _ in rows), default=0), 88)
    return "\n".join(f"{left:<{width}}  # {right}" for left, right in rows)


def _kind_and_doc(section: Section, key: str, values: Sequence[Any]) -> tuple[str, str]:
    """Kind and documentation of a key.

    Args:
        values: all values that were set, the default first; they determine the type of a plug-in's key.
    """
    name = SECTION_AT.get(section.path)
    if name is not None:
        section_class = get_type_hints(RunConfig)[name]
        if key in section_hints(name):
            return describe_key(section_class, key), documentation(section_class)[key]
        if name in UPSTREAM:
            field = upstream_fields(UPSTREAM[name])[key]
            return _upstream_kind(UPSTREAM[name], field.annotation, field.default), field.doc
    kinds = [describe_type(type(value)) for value in values if value is not None]
    kind = f"{kinds[0]}{' or null' * (values[0] is None)}" if kinds else "null, or a value as described"
    return kind, _comment(section, key)


def _upstream_kind(class_name: str, annotation: str, default: str | None) -> str:
    ending = f", default {default}" if default is not None else ""
    members = upstream_enums().get(annotation)
    annotation = annotation if members is None else describe_type(Literal[members])
    return f"{annotation} (Megatron-Core's {class_name}{ending})"


def _unset_upstream(path: str) -> str | None:
    """Text about a field of Megatron-Core that the YAML could set; None for another path."""
    section_path, _, key = path.rpartition(".")
    for name, class_name in UPSTREAM.items():
        if SECTION_PATHS[name] == section_path and key in upstream_fields(class_name):
            field = upstream_fields(class_name)[key]
            kind = _upstream_kind(class_name, field.annotation, field.default)
            doc = f"\n  {field.doc}" if field.doc else ""
            return f"{path} is not set\n  type: {kind}{doc}"
    return None


def _nearest_path(key: str, leaves: Mapping[str, Any]) -> str:
    last = key.rpartition(".")[2]
    ends = {path.rpartition(".")[2]: path for path in leaves}
    end = closest(last, ends)
    familiar = familiar_advice(key)
    if familiar is not None and last not in ends:
        return f"; {familiar}"
    return did_you_mean(key, leaves) or ("" if end is None else f"; did you mean {ends[end]}?")


def _comment(section: Section, key: str) -> str:
    """The YAML comment after or above the key in the first file of the tree that sets it."""
    for file in section.files:
        lines = file.path.read_text(encoding="utf-8").splitlines()
        for number, line in enumerate(lines):
            if line.strip().partition(":")[0].strip("'\"") != key.rpartition(".")[2]:
                continue
            comment = _COMMENT.match(line)
            if comment:
                return comment[1].strip()
            lines_above: list[str] = []
            while number > 0 and lines[number - 1].strip().startswith("#"):
                number -= 1
                lines_above.insert(0, lines[number].strip().lstrip("# "))
            if lines_above and number > 0:  # a comment at the top of a file describes the file
                return " ".join(lines_above)
    return ""

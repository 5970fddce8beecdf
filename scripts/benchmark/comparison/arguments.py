"""The command lines of compare.py and of each line of a file of tasks."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
from collections.abc import Mapping
from pathlib import Path

from comparison.pool import Launch
from megatron_wrap.errors import ConfigError

AGAINST = {
    "trainer": "transformers",
    "trainer-flex": "transformers-flex",
    "trainer-liger": "transformers-liger",
    "trainer-liger-fp32": "transformers-liger-fp32",
    "bare": "megatron-core",
    "bare-best": "megatron-core",
    "trl": "trl",
}
"""Name of a program in the tables -> name of the processes that run it."""
BY_DEFAULT = ("trainer", "bare", "bare-best", "trl")
Runs = Mapping[str, tuple[str, Launch, list[str]]]
"""Name of each run of megatron-wrap -> (its process, how that is started, its overrides)."""


def parse(description: str) -> tuple[argparse.Namespace, dict[str, argparse.Namespace]]:
    """The parsed command line, and the tasks by name: those of its presets, then the lines of `--tasks`."""
    parser = _parser(description)
    arguments = parser.parse_intermixed_args()
    presets = _split(parser, arguments)
    tasks = {name: argparse.Namespace(**vars(arguments), preset=name) for name in presets}
    for line in Path(arguments.tasks).read_text().splitlines() if arguments.tasks else ():
        name, _, options = line.partition(":")
        defaults = argparse.Namespace(**{**vars(arguments), "variant": list(arguments.variant)})
        task = parser.parse_intermixed_args(shlex.split(options), defaults)
        task.overrides = arguments.overrides
        chosen = _split(parser, task)
        if len(chosen) != 1:
            parser.error(f"{arguments.tasks}: {line!r} is not 'NAME: PRESET [a.b=c or options]'")
        task.preset = chosen[0]
        tasks[name] = task
    if not tasks:
        parser.error("name a preset, a run's YAML, or a file of --tasks")
    return arguments, tasks


def _split(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[str]:
    """Split presets from overrides, which are added to the overrides in `arguments`."""
    texts = vars(arguments).pop("presets_and_overrides")
    arguments.overrides = [*getattr(arguments, "overrides", ()), *(text for text in texts if "=" in text)]
    unknown = set(arguments.against.split(",")) - {*AGAINST, ""}
    if unknown:
        parser.error(f"unknown in --against: {sorted(unknown)}")
    return [text for text in texts if "=" not in text]


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("presets_and_overrides", nargs="*", default=[], metavar="PRESET|CONFIG|a.b=c")
    parser.add_argument("--tasks", metavar="FILE", help="lines 'NAME: PRESET [a.b=c or options]', one task each")
    parser.add_argument("--against", default=",".join(BY_DEFAULT), help=f"of {', '.join(AGAINST)}")
    parser.add_argument("--variant", action="append", default=[], metavar='"ours-NAME: a.b=c ..."')
    parser.add_argument("--tree", action="append", default=[], metavar='"ours-NAME: FOLDER"', help="another checkout")
    parser.add_argument("--only-variants", action="store_true", help="without `ours` itself")
    parser.add_argument("--devices", type=int, default=0, help="processes (default: one for each GPU; one on a CPU)")
    parser.add_argument("--platform", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    parser.add_argument("--fresh", action="store_true", help="new processes for each run: for models that fill the GPU")
    parser.add_argument("--standby", action="store_true", help="keep processes ready for the run after a failed one")
    parser.add_argument("--flags", metavar="NAME,...", help="changes that bare-best begins with; alone: no search")
    parser.add_argument("--changes", metavar="NAME,...", help="what the search for bare-best tries (default: all)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5, help="measured steps of a round")
    parser.add_argument("--warmup", type=int, default=2, help="steps of a round before those; 0 also times the start")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one program in one round")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all, after which nothing starts")
    parser.add_argument("--output", default="outputs/compare", metavar="FOLDER")
    parser.add_argument("--compare", metavar="OLD.json", help="compare.json of an earlier run")
    parser.add_argument("--threshold", type=float, default=0.02, help="share that counts as a regression")
    return parser


def runs_of(arguments: argparse.Namespace) -> Runs:
    """Runs of megatron-wrap in a task, by name."""
    ours = ("megatron-wrap", Launch("megatron-wrap"))
    runs: dict[str, tuple[str, Launch, list[str]]] = {} if arguments.only_variants else {"ours": (*ours, [])}
    for name, overrides in map(_named, arguments.variant):
        runs[name] = (*ours, shlex.split(overrides))
    for name, folder in map(_named, arguments.tree):
        runs[name] = (name, Launch("megatron-wrap", Path(folder).resolve()), [])
    return runs


def against_of(arguments: argparse.Namespace) -> list[str]:
    """Names of the other programs of a task, without those that are not installed."""
    return [name for name in arguments.against.split(",") if name and _is_installed(name)]


def _named(text: str) -> tuple[str, str]:
    """("ours-NAME", rest) of a value of --variant or --tree."""
    name, _, rest = text.partition(":")
    if not name.startswith("ours-") or not rest.strip():
        raise ConfigError(f'{text!r} is not "ours-NAME: a.b=c" (--variant) or "ours-NAME: FOLDER" (--tree)')
    return name.strip(), rest.strip()


def _is_installed(name: str) -> bool:
    package = {"trainer": "transformers", "trl": "trl"}.get(name, "liger_kernel" if "liger" in name else None)
    if package is None or importlib.util.find_spec(package):
        return True
    print(f"{name} is left out: {package} is not installed")
    return False

"""Misspelled keys at every level of the configuration: each is refused, and nearly all with the right suggestion.

python scripts/drill/config_typos.py --count 2000 [--seed 0]

A typo drops, doubles, swaps or replaces a character of a root, section, key, option of a flow, field of Megatron-Core
or selection, exchanges `-` and `_`, or changes the case, on the command line or in the YAML. Exits with 1 if a typo is
accepted, or if less than 97% of the errors suggest the intended key.
"""

from __future__ import annotations

import random
import re
import string
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import _counted
import yaml

from megatron_wrap.config import load_run_config
from megatron_wrap.config.decode import load_tree
from megatron_wrap.config.schema.run import SECTION_PATHS, UPSTREAM
from megatron_wrap.config.schema.upstream import retired_keys, set_elsewhere, upstream_fields
from megatron_wrap.errors import MegatronWrapError

CONFIGS = Path(__file__).parents[2] / "configs"
RIGHT_AT_LEAST = 0.97
LEVELS = {"section": 3, "key": 8, "option": 2, "field": 5, "selection": 2}
"""Kind of name -> share of the typos."""


@dataclass(frozen=True)
class Run:
    """A shipped configuration: its content and, for each kind of `LEVELS`, the dotted paths that end in such a name."""

    config: Path
    content: dict[str, Any]
    selected: dict[str, str]
    """Section with a selection -> the selected name."""
    names: dict[str, list[str]]
    valid: frozenset[str]
    """Valid names, which are never used as typos."""


def read(config: Path) -> Run:
    """The names of a shipped configuration."""
    tree = load_tree(config)
    selected = {section.path: section.selected for section in tree.sections.values() if section.selected is not None}
    flow = SECTION_PATHS["flow"]
    sections = {path.rsplit(".", end)[0] for path in tree.sections for end in range(path.count(".") + 1)}
    fields = [
        f"{SECTION_PATHS[name]}.{field}"
        for name, class_name in UPSTREAM.items()
        for field in upstream_fields(class_name)
        if field not in set_elsewhere(name)
    ]
    names = {
        "section": sorted(sections),
        "key": sorted(path for path in tree.leaves() if not path.startswith(flow)),
        "option": sorted(path for path in tree.leaves() if path.startswith(flow)),
        "field": sorted(fields),
        "selection": sorted(f"{path}.{name}" for path, name in selected.items()),
    }
    elsewhere = [key for keys in (*map(set_elsewhere, UPSTREAM), retired_keys()) for key in keys]
    segments = {segment for paths in names.values() for path in paths for segment in path.split(".")}
    choices = [entry.stem for entry in (CONFIGS / "nest").rglob("*")]
    valid = frozenset([*elsewhere, *segments, *choices])
    return Run(config, yaml.safe_load(config.read_text(encoding="utf-8")), selected, names, valid)


def misspelled(name: str, valid: frozenset[str], generator: random.Random) -> str:
    """The name with one typo; never a valid name."""
    while True:
        at = generator.randrange(len(name))
        edits = {
            "drop": name[:at] + name[at + 1 :],
            "double": name[:at] + name[at] * 2 + name[at + 1 :],
            "swap": name[:at] + name[at + 1 : at + 2] + name[at] + name[at + 2 :],
            "replace": name[:at] + generator.choice(string.ascii_lowercase) + name[at + 1 :],
            "dash": name.translate(str.maketrans("-_", "_-")),
            "case": generator.choice((name.upper(), name.title(), name[:at] + name[at].upper() + name[at + 1 :])),
        }
        typo = edits[generator.choice(list(edits))]
        if typo and typo not in valid and "." not in typo and set(typo) - {"_"}:
            return typo


def on_the_command_line(run: Run, path: str, kind: str, typo: str) -> str:
    """The override with the typo instead of the last name of the path."""
    section = path.rpartition(".")[0]
    if kind == "selection":
        return f"{section}.__select__={typo}"
    misspelled_path = f"{section}.{typo}" if section else typo
    return f"{misspelled_path}.key=1" if kind == "section" else f"{misspelled_path}=1"


def in_the_yaml(run: Run, path: str, kind: str, typo: str, target: Path) -> Path:
    """A copy of the run with the typo as a further key, or as its selection."""
    content = yaml.safe_load(yaml.safe_dump(run.content))
    below, *parts = content, *path.split(".")[:-1]
    for depth, part in enumerate(parts, 1):
        below[part] = below.get(part) or {}
        below = below[part]
        if ".".join(parts[:depth]) in run.selected:
            below.setdefault("__select__", run.selected[".".join(parts[:depth])])
            if kind != "selection":
                below["__override__"] = below.get("__override__") or {}
                below = below["__override__"]
    below["__select__" if kind == "selection" else typo] = {
        "section": {"key": 1},
        "selection": typo,
    }.get(kind, 1)
    target.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return target


def error_of(config: Path, overrides: list[str]) -> str | None:
    """The error's message; None: the configuration was accepted."""
    try:
        load_run_config(config, overrides)
    except MegatronWrapError as error:
        return str(error)
    return None


def drill(count: int, seed: int, folder: Path) -> list[str]:
    """Make `count` typos, and print how many were refused with the right suggestion; returns the failures."""
    generator = random.Random(seed)
    runs = [read(config) for config in sorted(CONFIGS.glob("*.yaml"))]
    accepted, unhelpful = [], []
    for kind in generator.choices(list(LEVELS), list(LEVELS.values()), k=count):
        run = generator.choice(runs)
        path = generator.choice(run.names[kind])
        meant = path.rpartition(".")[2]
        typo = misspelled(meant, run.valid, generator)
        if generator.random() < 0.5:
            config, overrides = run.config, [on_the_command_line(run, path, kind, typo)]
        else:
            config, overrides = in_the_yaml(run, path, kind, typo, folder / run.config.name), []
        message = error_of(config, overrides)
        suggested = re.search(r"did you mean (\S+?)\?", message or "")
        if message is None:
            accepted.append(f"accepted: {path} as {typo}")
        elif suggested is None or suggested[1].rpartition(".")[2] != meant:
            unhelpful.append(f"unhelpful: {path} as {typo}: {message}")
    right = count - len(accepted) - len(unhelpful)
    print(f"{count} typos: {right} with the right suggestion ({right / count:.1%}; at least {RIGHT_AT_LEAST:.0%})")
    return accepted + (unhelpful if right < RIGHT_AT_LEAST * count else [])


if __name__ == "__main__":
    sys.exit(_counted.run(drill, __doc__ or "", 2000, "typos"))

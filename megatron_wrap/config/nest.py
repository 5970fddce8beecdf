"""Strict reading over confignest: a run's YAML (the view) and a tree of YAML files (the nest) become one tree.

confignest composes the values; this module first walks view and nest with their positions and refuses what confignest
would drop, invent or crash on. For the composition every value is replaced by its number in a table of origins, so
the composed tree tells which line of which file each value came from.
"""

import json
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wrap.config.composed import Origin, Rules, Section, Tree
from megatron_wrap.config.reading import COMMAND_LINE, Node, describe, read_value, read_yaml
from megatron_wrap.config.tree import Folder, TreeFile, open_tree
from megatron_wrap.errors import ConfigError, did_you_mean

SELECT, OVERRIDE, INHERIT = "__select__", "__override__", "__inherit__"
NESTED = "\x1f"  # joins the keys of nested mappings: confignest 1.0.5 cannot select a file that has them


def read_tree(path: str | Path, overrides: Sequence[str] = (), rules: Rules | None = None) -> Tree:
    """Reads the run's YAML at `path` over the shipped tree and a `nest/` folder beside the YAML.

    Args:
        overrides: `a.b.c=value`, applied last; values are read as YAML.
        rules: further keys and advice.

    Raises:
        ConfigError: a file, section, key, selection or inheritance that does not fit; `file:line path: rule; way out`.
    """
    view = read_yaml(Path(path))
    composer = _Composer(view.file, open_tree(Path(path)), rules or Rules())
    command_line = [_parse_override(text) for text in overrides]
    effective = composer.folder(composer.root, view, "", command_line)
    return Tree(view.file, composer.sections, composer.compose(effective))


@dataclass(frozen=True)
class _Override:
    """One command-line `a.b=c`: the parts of the path that are still to walk."""

    parts: tuple[str, ...]
    node: Node
    path: str


def _parse_override(text: str) -> _Override:
    path, equals, value = text.partition("=")
    path = path.strip()
    if not equals or not path or "" in path.split("."):
        raise ConfigError(f"{COMMAND_LINE} {text}: not of the form a.b.c=value")
    try:
        node = read_value(value)
    except ConfigError as error:
        raise ConfigError(f"{COMMAND_LINE} {path}: {str(error).removeprefix(COMMAND_LINE + ': ')}") from error
    parts = tuple(part for part in path.split(".") if part != OVERRIDE)
    return _Override(parts, node, path)


class _Composer:
    """Walks view and nest together, then lets confignest compose the numbered values."""

    def __init__(self, view_file: str, root: Folder, rules: Rules) -> None:
        self.view_file = view_file
        self.root = root
        self.rules = rules
        self.sections: dict[str, Section] = {}
        self._origins: list[Origin] = []
        self._numbered: dict[str, dict[str, Any]] = {}  # path of a tree file -> its content with numbers for values

    # ---- folders

    def folder(self, folder: Folder, view: Node | None, path: str, command_line: Sequence[_Override]) -> dict[str, Any]:
        """Checks one folder of the tree against its part of the view; returns confignest's view of it."""
        content = self._mapping(view, path)
        if folder.selects_one:
            return self._selection(folder, content, view, path, command_line)
        for key, node in content.items():
            if key not in folder.entries:
                self._refuse_section(folder, key, node, path)
        for override in command_line:
            if not override.parts or override.parts[0] not in folder.entries:
                self._refuse_command_line(folder, override, path)
        effective: dict[str, Any] = {}
        for name, entry in folder.entries.items():
            below = [_Override(o.parts[1:], o.node, o.path) for o in command_line if o.parts[0] == name]
            below_path = f"{path}.{name}" if path else name
            if isinstance(entry, Folder):
                effective[name] = self.folder(entry, content.get(name), below_path, below)
            else:
                section = self._open_section(folder, name, below_path, "default")
                view_part = content.get(name)
                effective[name] = self._override_all(section, self._mapping(view_part, below_path), below)
        return effective

    def _selection(
        self, folder: Folder, content: dict[str, Node], view: Node | None, path: str, command_line: Sequence[_Override]
    ) -> dict[str, Any]:
        select = content.get(SELECT)
        for override in command_line:
            if override.parts == (SELECT,):
                select = override.node
        if select is not None and select.value is None:
            view, select = select, None
        if select is None and folder.default is None:
            if folder.skipped_without_selection:
                return {}
            where = view.where if view is not None else self.view_file
            raise ConfigError(
                f"{where} {path}: nothing is selected; write {path.rpartition('.')[2]}: {{{SELECT}: NAME}} with one of "
                f"{', '.join(folder.entries)}"
            )
        name: Any = folder.default if select is None else select.value
        if not isinstance(name, str) or name not in folder.entries:
            where = select.where if select is not None else self.view_file
            raise ConfigError(
                f"{where} {path}.{SELECT}: there is no {name!r}{did_you_mean(str(name), folder.entries)} "
                f"Choices: {', '.join(folder.entries)}"
            )
        section = self._open_section(folder, name, path, "default selection" if select is None else "selected")
        section.selected = name
        for key, node in content.items():
            if key not in (SELECT, OVERRIDE, name):
                self._refuse_beside_select(folder, section, key, node, path)
        overrides = self._mapping(content.get(OVERRIDE), f"{path}.{OVERRIDE}")
        inline = self._mapping(content.get(name), f"{path}.{name}")
        for key, node in inline.items():
            if key in overrides:
                raise ConfigError(
                    f"{node.where} {path}.{name}.{key}: also set by {OVERRIDE} at {overrides[key].where}; keep one"
                )
        rest = [override for override in command_line if override.parts != (SELECT,)]
        return {SELECT: name, OVERRIDE: self._override_all(section, {**overrides, **inline}, rest)}

    def _mapping(self, node: Node | None, path: str) -> dict[str, Node]:
        if node is None or node.value is None:  # a section whose every line is commented out
            return {}
        if not isinstance(node.value, dict):
            raise ConfigError(
                f"{node.where} {path}: a section with keys of its own is expected, not {describe(node.value)}"
            )
        return node.value

    # ---- files and their keys

    def _open_section(self, folder: Folder, name: str, path: str, how: str) -> Section:
        """Reads a tree file and what it inherits, base first, into a new section."""
        chain = self._inherit_chain(folder, name, path)
        section = Section(path, [file for file, _ in chain])
        for file, node in chain:
            step = how if file is chain[-1][0] else f"inherited by {name}"
            step += ", overlay" if file.overlaid else ""
            numbered: dict[str, Any] = {}
            for key, value in node.value.items():
                if key == INHERIT:
                    numbered[key] = value.value
                else:
                    self._merge(section.values, numbered, key, value, step, f"{path}.{key}", grow=True)
            self._numbered[file.relative] = numbered
        self.sections[path] = section
        return section

    def _inherit_chain(self, folder: Folder, name: str, path: str) -> list[tuple[TreeFile, Node]]:
        chain: list[tuple[TreeFile, Node]] = []
        seen: list[str] = []
        while True:
            entry = folder.entries[name]
            if isinstance(entry, Folder):
                raise ConfigError(f"{entry.shown} {path}: {name} is a folder; only a file can be selected or inherited")
            node = entry.read()
            chain.insert(0, (entry, node))
            seen.append(f"{name}.yaml")
            parent = node.value.get(INHERIT)
            if parent is None:
                return chain
            files = [f"{entry_name}.yaml" for entry_name in folder.entries]
            if parent.value in seen:
                circle = " -> ".join([*seen[seen.index(parent.value) :], parent.value])
                raise ConfigError(f"{parent.where} {path}.{INHERIT}: a circle, {circle}; remove one of these lines")
            if parent.value not in files:
                raise ConfigError(
                    f"{parent.where} {path}.{INHERIT}: there is no file {parent.value!r} in this folder"
                    f"{did_you_mean(str(parent.value), files)}"
                )
            name = parent.value.removesuffix(".yaml")

    def _merge(
        self, values: dict[str, Any], numbered: dict[str, Any], key: str, node: Node, how: str, path: str, grow: bool
    ) -> None:
        """Puts `node` into `values` and its number into `numbered`. A mapping is gone into where one is there already
        (or, in a tree file, where nothing is); elsewhere it is one value, such as data.validation's names."""
        name = key.rpartition(NESTED)[2]
        known = values.get(name)
        into = isinstance(known, dict) or (grow and name not in values and isinstance(node.value, dict) and node.value)
        if not into:
            values.setdefault(name, []).append(Origin(node, how))
            self._origins.append(values[name][-1])
            numbered[key] = len(self._origins) - 1
            return
        if not isinstance(node.value, dict):
            raise ConfigError(f"{node.where} {path}: a mapping is expected, not {describe(node.value)}")
        below = values.setdefault(name, {})
        for sub_key, sub_node in node.value.items():
            if not grow and sub_key not in below:
                raise ConfigError(f"{sub_node.where} {path}.{sub_key}: unknown key{did_you_mean(sub_key, below)}")
            self._merge(below, numbered, key + NESTED + sub_key, sub_node, how, f"{path}.{sub_key}", grow)

    def _override_all(
        self, section: Section, content: Mapping[str, Node], command_line: Sequence[_Override]
    ) -> dict[str, Any]:
        """Applies the view's keys, then the command line's; returns them numbered for confignest."""
        numbered: dict[str, Any] = {}
        plug_in = self.rules.plug_ins.get(section.path)
        section.takes_any = plug_in in content or any(override.parts[:1] == (plug_in,) for override in command_line)
        for key, node in content.items():
            self._check_key(section, key, node)
            self._merge(section.values, numbered, key, node, "override", f"{section.path}.{key}", grow=False)
        for override in command_line:
            if not override.parts:
                raise ConfigError(
                    f"{COMMAND_LINE} {override.path}: names a section; name a key of it, such as "
                    f"{section.path}.{next(iter(section.values), 'KEY')}=VALUE"
                )
            key, *rest = override.parts
            self._check_key(section, key, override.node)
            node = self._wrapped(section, key, rest, override)
            self._merge(section.values, numbered, key, node, COMMAND_LINE, f"{section.path}.{key}", grow=False)
        return numbered

    def _wrapped(self, section: Section, key: str, rest: Sequence[str], override: _Override) -> Node:
        """`a.b.c=v` below a key: a mapping that changes only `c`, also where the mapping is one value."""
        node = override.node
        for part in reversed(rest):
            node = Node({part: node}, COMMAND_LINE)
        known = section.values.get(key)
        if not rest or not isinstance(known, list):
            return node
        present = known[-1].node.value
        if present is not None and not isinstance(present, dict):
            raise ConfigError(f"{COMMAND_LINE} {override.path}: {section.path}.{key} has no keys below it")
        return Node({**(present or {}), **node.value}, COMMAND_LINE)

    def _check_key(self, section: Section, key: str, node: Node) -> None:
        if key in section.values:
            return
        more = self.rules.more_keys(section.path)
        if key in more or (section.takes_any and key not in (SELECT, OVERRIDE, INHERIT)):
            return
        # a name of the section itself is the likelier meaning; Megatron-Core's are hundreds
        raise ConfigError(f"{node.where} {section.path}.{key}: " + self._unknown(section, key, more))

    def _unknown(self, section: Section, key: str, more: Collection[str]) -> str:
        advice = self.rules.advice(section.path, key)
        if advice:
            return advice
        if key == OVERRIDE:
            return "only a section with a selection takes it; write its keys here directly"
        if key == SELECT:
            return "nothing is to be selected here; delete it"
        if key == INHERIT:
            return "belongs in a file of the tree, not in a run's YAML"
        hint = did_you_mean(key, section.values) or did_you_mean(key, more)
        return f"unknown key{hint or '; the keys are ' + ', '.join(section.values)}"

    # ---- refusals of whole sections

    def _refuse_section(self, folder: Folder, key: str, node: Node, path: str) -> None:
        here = f"{path}.{key}" if path else key
        if key == SELECT:
            raise ConfigError(f"{node.where} {here}: nothing is to be selected here; delete it")
        advice = self.rules.advice(path, key)
        if advice is None and key in (OVERRIDE, INHERIT):
            advice = "does not belong here; name the section and write its keys there"
        hint = did_you_mean(key, folder.entries) or f"; the sections are {', '.join(folder.entries)}"
        raise ConfigError(f"{node.where} {here}: {advice or 'unknown section' + hint}")

    def _refuse_beside_select(self, folder: Folder, section: Section, key: str, node: Node, path: str) -> None:
        if key in section.values or key in self.rules.more_keys(path):
            rule = f"a key beside {SELECT} has no effect; put it under {OVERRIDE}"
        elif key in folder.entries:
            rule = f"{section.name} is selected, so this has no effect; delete it or select {key}"
        elif key in (INHERIT,):
            rule = "belongs in a file of the tree, not in a run's YAML"
        else:
            near = did_you_mean(key, [SELECT, OVERRIDE]) or did_you_mean(key, section.values)
            rule = self.rules.advice(path, key) or f"unknown key{near}; only {SELECT} and {OVERRIDE} stand here"
        raise ConfigError(f"{node.where} {path}.{key}: {rule}")

    def _refuse_command_line(self, folder: Folder, override: _Override, path: str) -> None:
        if not override.parts:
            raise ConfigError(
                f"{COMMAND_LINE} {override.path}: names a folder; go on with one of {', '.join(folder.entries)}"
            )
        self._refuse_section(folder, override.parts[0], override.node, path)

    # ---- composition

    def compose(self, effective: dict[str, Any]) -> dict[str, Any]:
        """Lets confignest compose the numbered files and view, then puts the values in."""
        from confignest import ConfigNest

        with tempfile.TemporaryDirectory(prefix="megatron-wrap-") as scratch:
            nest, view = Path(scratch, "nest"), Path(scratch, "view.yaml")
            self.root.write(nest, self._numbered)
            view.write_text(json.dumps(effective), encoding="utf-8")
            composed = ConfigNest(str(nest), str(view)).nest_instance

        return self._valued(composed, self.root)

    def _valued(self, composed: Any, folder: Folder | TreeFile) -> dict[str, Any]:
        """confignest's namespaces with values for numbers, in the tree's order (confignest's is the disk's)."""
        content = vars(composed)
        if not isinstance(folder, Folder) or folder.selects_one:
            values: dict[str, Any] = {}
            for key, number in content.items():
                *outer, last = key.split(NESTED)
                place = values
                for part in outer:
                    place = place.setdefault(part, {})
                place[last] = self._origins[number].node.plain()
            return values
        return {name: self._valued(content[name], entry) for name, entry in folder.entries.items() if name in content}

"""Strict reading of a run's YAML (the view) over the tree of YAML files (the nest).

The format is confignest's. The view and the files that it selects are validated key by key, with file and line: keys
that confignest would drop, invent or crash on are refused here. The walk records the origins of each value; the last
one applies, which the tests compare with what confignest composes.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_wrap.config.reading.tree import (
    INHERIT,
    OVERRIDE,
    SELECT,
    Folder,
    KeyRules,
    Origin,
    Section,
    SetBy,
    TreeFile,
    open_tree,
)
from megatron_wrap.config.reading.yaml_nodes import COMMAND_LINE, Node, describe, read_value, read_yaml
from megatron_wrap.errors import ConfigError, Mistakes
from megatron_wrap.nearest_names import did_you_mean


def read_nest(path: str | Path, overrides: Sequence[str] = (), rules: KeyRules | None = None) -> "ComposedConfig":
    """Read the run's YAML at `path` over the shipped tree and a `nest/` folder beside the YAML, and validate its keys.

    Args:
        overrides: `a.b.c=value`, applied last; values are read as YAML.

    Raises:
        ConfigError: a file, section, key, selection or inheritance that does not fit; `file:line path: rule; hint`.
    """
    view = read_yaml(Path(path))
    nest = ComposedConfig(view.file, open_tree(Path(path)), rules or KeyRules())
    nest.walk(view, [_parse_override(text) for text in overrides])
    return nest


@dataclass(frozen=True)
class _Override:
    """A command-line `a.b=c`; `parts` are the names of its path below the current section."""

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


def _nested(node: Node, parts: Sequence[str]) -> Node:
    """The node of a command-line `a.b=c`, as nested mappings for its parts a, b."""
    for part in reversed(parts):
        node = Node({part: node}, COMMAND_LINE)
    return node


class ComposedConfig:
    """A run's YAML over the tree: validated keys, with the values that apply and the origins of each; returned by
    `read_nest`. Types are not checked."""

    def __init__(self, view_file: str, root: Folder, rules: KeyRules) -> None:
        self.view_file = view_file
        self.sections: dict[str, Section] = {}
        """Dotted path -> section, in the order of the tree."""
        self._root = root
        self._rules = rules
        self._mistakes = Mistakes()

    @functools.cached_property
    def values(self) -> Mapping[str, Any]:
        """The values that apply, as nested plain dictionaries, equal to what confignest composes."""
        values: dict[str, Any] = {}
        for path, section in self.sections.items():
            *folders, name = path.split(".")
            folder = values
            for part in folders:
                folder = folder.setdefault(part, {})
            folder[name] = _applying(section.origins)
        return values

    def section_values(self, path: str) -> Mapping[str, Any]:
        """The composed values of the section at the dotted `path`."""
        values: Any = self.values
        for part in path.split("."):
            values = values[part]
        return values

    def leaves(self) -> dict[str, Sequence[Origin]]:
        """Dotted path of every value -> its origins, first to last."""
        return {path: origins for section in self.sections.values() for path, origins in section.leaves()}

    def origins(self, path: str) -> Sequence[Origin]:
        """Origins of the value at the dotted `path`, first to last; empty if nothing sets it."""
        return self.leaves().get(path, ())

    def left_out(self) -> dict[str, Origin]:
        """Dotted path of every key of the run's YAML that is left out (`Section.left_out`) -> its origin."""
        sections = self.sections.values()
        return {f"{section.path}.{key}": origin for section in sections for key, origin in section.left_out.items()}

    def add(self, section_path: str, key: str, origin: Origin) -> None:
        """Set a value of a section over all of its other origins."""
        self._set(self.sections[section_path].origins, key, origin, f"{section_path}.{key}")

    def walk(self, view: Node, command_line: Sequence[_Override]) -> None:
        """Validate the view and the command line; called once."""
        with self._mistakes.collected():
            self._folder(self._root, view, "", command_line)
        self._mistakes.raise_first()

    # ---- folders

    def _folder(self, folder: Folder, view: Node | None, path: str, command_line: Sequence[_Override]) -> None:
        """Validate a folder of the tree with its part of the view."""
        content = self._mapping(view, path)
        if folder.selects_one:
            self._selection(folder, content, view, path, command_line)
            return
        for key, node in content.items():
            if key not in folder.entries:
                with self._mistakes.collected():
                    self._rules.refuse_section(folder, key, node, path)
        for override in command_line:
            with self._mistakes.collected():
                self._check_override(folder, override, path)
        for name, entry in folder.entries.items():
            overrides = [_Override(o.parts[1:], o.node, o.path) for o in command_line if o.parts[:1] == (name,)]
            entry_path = f"{path}.{name}" if path else name
            view_part = content.get(name)
            with self._mistakes.collected():
                if isinstance(entry, Folder):
                    self._folder(entry, view_part, entry_path, overrides)
                else:
                    section = self._open_section(folder, name, entry_path, "default")
                    self._override_all(section, self._mapping(view_part, entry_path), overrides)

    def _check_override(self, folder: Folder, override: _Override, path: str) -> None:
        if not override.parts:
            sections = ", ".join(folder.entries)
            raise ConfigError(f"{COMMAND_LINE} {override.path}: names a folder; add one of {sections}")
        if override.parts[0] not in folder.entries:
            name, *below = override.parts
            self._rules.refuse_section(folder, name, _nested(override.node, below), path)

    def _selection(
        self, folder: Folder, content: dict[str, Node], view: Node | None, path: str, command_line: Sequence[_Override]
    ) -> None:
        select = view_select = content.get(SELECT)
        for override in command_line:
            if override.parts == (SELECT,):
                select = override.node
        if select is not None and select.value is None:
            view, select = select, None
        if select is None and folder.default is None:
            if folder.skipped_without_selection:
                return
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
        in_view = folder.default if view_select is None else view_select.value
        is_left = isinstance(in_view, str) and in_view in folder.entries and in_view != name
        left = self._open_section(folder, str(in_view), path, "selected") if is_left else None
        section = self._open_section(folder, name, path, "default selection" if select is None else "selected")
        section.selected = name
        files = (name, left.name) if left is not None else (name,)
        for key, node in content.items():
            if key not in (SELECT, OVERRIDE, *files):
                with self._mistakes.collected():
                    self._rules.refuse_beside_select(folder, section, key, node)
        keys = self._keys_of_view(content, path, files)
        rest = [override for override in command_line if override.parts != (SELECT,)]
        if left is not None:
            keys = self._without_left_keys(section, left, keys, rest)
        self._override_all(section, keys, rest)

    def _keys_of_view(self, content: Mapping[str, Node], path: str, files: Sequence[str]) -> dict[str, Node]:
        """The keys under `__override__` and under the names of `files`."""
        keys = dict(self._mapping(content.get(OVERRIDE), f"{path}.{OVERRIDE}"))
        for name in files:
            for key, node in self._mapping(content.get(name), f"{path}.{name}").items():
                if key in keys:
                    raise ConfigError(
                        f"{node.where} {path}.{name}.{key}: also set by {OVERRIDE} at {keys[key].where}; keep one"
                    )
                keys[key] = node
        return keys

    def _without_left_keys(
        self, section: Section, left: Section, content: Mapping[str, Node], command_line: Sequence[_Override]
    ) -> dict[str, Node]:
        """The view's keys without those that belong only to the file `left`, which the view selects and the command
        line does not: keys that `section` lacks, and those that need another value than its file has."""
        plug_in = self._rules.plug_ins.get(section.path)
        values = {key: origins[-1].node.value for key, origins in section.origins.items() if isinstance(origins, list)}
        set_here = {**content, **{override.parts[0]: override.node for override in command_line if override.parts}}
        values |= {key: node.value for key, node in set_here.items() if key != plug_in}
        kept = {}
        for key, node in content.items():
            is_known = key in section.origins or key in self._rules.more_keys(section.path)
            of_left = key == plug_in or (not is_known and (key in left.origins or plug_in in content))
            if of_left or not self._rules.applies(section.path, key, values):
                section.left_out[key] = Origin(node, SetBy.RUN, f"for {left.name}")
            else:
                kept[key] = node
        return kept

    def _mapping(self, node: Node | None, path: str) -> dict[str, Node]:
        if node is None or node.value is None:  # all lines of the section are commented out
            return {}
        if not isinstance(node.value, dict):
            raise ConfigError(f"{node.where} {path}: a section with keys is expected, not {describe(node.value)}")
        return node.value

    # ---- files and their keys

    def _open_section(self, folder: Folder, name: str, path: str, how: str) -> Section:
        """Read a file of the tree and the files that it inherits, base first, into a new section."""
        chain = self._inherit_chain(folder, name, path)
        section = Section(path, [file for file, _ in chain])
        for file, node in chain:
            step = how if file is chain[-1][0] else f"inherited by {name}"
            step += ", overlay" if file.overlaid else ""
            for key, value in node.value.items():
                if key != INHERIT:
                    self._set(section.origins, key, Origin(value, SetBy.TREE, step), f"{path}.{key}")
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
                raise ConfigError(f"{parent.where} {path}.{INHERIT}: a cycle, {circle}; remove one of these lines")
            if parent.value not in files:
                raise ConfigError(
                    f"{parent.where} {path}.{INHERIT}: there is no file {parent.value!r} in this folder"
                    f"{did_you_mean(str(parent.value), files)}"
                )
            name = parent.value.removesuffix(".yaml")

    def _set(self, origins: dict[str, Any], key: str, origin: Origin, path: str) -> None:
        """Record that `origin` sets `key`.

        A mapping changes the keys that it names where the value is a mapping already (or, in a file of the tree, where
        there is no value yet); elsewhere it is a single value, such as the sets of data.validation.

        Args:
            origins: of the mapping that contains the key.
        """
        node, add_keys = origin.node, origin.set_by is SetBy.TREE
        new_mapping = add_keys and key not in origins and isinstance(node.value, dict) and bool(node.value)
        if not (isinstance(origins.get(key), dict) or new_mapping):
            origins.setdefault(key, []).append(origin)
            return
        if not isinstance(node.value, dict):
            raise ConfigError(f"{node.where} {path}: a mapping is expected, not {describe(node.value)}")
        nested = origins.setdefault(key, {})
        for sub_key, sub_node in node.value.items():
            if not add_keys and sub_key not in nested:
                hint = self._rules.familiar_hint(f"{path}.{sub_key}", sub_node) or did_you_mean(sub_key, nested)
                raise ConfigError(f"{sub_node.where} {path}.{sub_key}: unknown key{hint}")
            self._set(nested, sub_key, replace(origin, node=sub_node), f"{path}.{sub_key}")

    def _override_all(self, section: Section, content: Mapping[str, Node], command_line: Sequence[_Override]) -> None:
        """Apply the view's keys, then the command line's."""
        plug_in = self._rules.plug_ins.get(section.path)
        section.takes_any = plug_in in content or any(override.parts[:1] == (plug_in,) for override in command_line)
        for key, node in content.items():
            with self._mistakes.collected():
                self._rules.check_key(section, key, node)
                self.add(section.path, key, Origin(node, SetBy.RUN, "override"))
        for override in command_line:
            with self._mistakes.collected():
                if not override.parts:
                    raise ConfigError(
                        f"{COMMAND_LINE} {override.path}: names a section; name a key of it, such as "
                        f"{section.path}.{next(iter(section.origins), 'KEY')}=VALUE"
                    )
                key, *rest = override.parts
                self._rules.check_key(section, key, override.node)
                self.add(section.path, key, Origin(self._wrapped(section, key, rest, override), SetBy.COMMAND_LINE))

    def _wrapped(self, section: Section, key: str, rest: Sequence[str], override: _Override) -> Node:
        """The node of `a.b.c=v` for key `a`: a mapping that changes only `c`, even where the mapping counts as a single
        value."""
        node = _nested(override.node, rest)
        origins = section.origins.get(key)
        if not rest or not isinstance(origins, list):
            return node
        value = origins[-1].node.value
        if value is not None and not isinstance(value, dict):
            raise ConfigError(f"{COMMAND_LINE} {override.path}: {section.path}.{key} has no keys below it")
        return Node({**(value or {}), **node.value}, COMMAND_LINE)


def _applying(origins: Any) -> Any:
    """The value of the last of several origins, or of each key of a dictionary of origins."""
    if isinstance(origins, dict):
        return {key: _applying(nested) for key, nested in origins.items()}
    node = origins[-1].node
    return node.plain() if isinstance(node.value, dict | list) else node.value

"""A composed tree: sections, their values, and every place that gave each value."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_wrap.config.reading import Node
from megatron_wrap.config.tree import TreeFile


@dataclass(frozen=True)
class Origin:
    """One place that gave a value: `how` is default, selected, inherited, override or command line."""

    node: Node
    how: str

    def __str__(self) -> str:
        return self.node.where if self.node.where == self.how else f"{self.node.where} ({self.how})"


@dataclass
class Section:
    """The keys of one tree file as composed, `values[key]` being an `Origin` list (last one wins) or a nested dict."""

    path: str
    files: list[TreeFile]
    values: dict[str, Any] = field(default_factory=dict)
    selected: str | None = None
    takes_any: bool = False
    """Whether keys that no file gives are taken, see `Rules.plug_ins`."""

    @property
    def name(self) -> str:
        """The name of the last file that the section is made of."""
        return self.files[-1].name


@dataclass(frozen=True)
class Tree:
    """A run's composed tree. `sections`: dotted path -> `Section`; `values`: nested plain dictionaries."""

    view_file: str
    sections: Mapping[str, Section]
    values: Mapping[str, Any]

    def origins(self, path: str) -> Sequence[Origin]:
        """Every place that gave the value at the dotted `path`, first to last; empty where nothing is there."""
        for section in self.sections.values():
            if path.startswith(section.path + "."):
                found: Any = section.values
                for part in path[len(section.path) + 1 :].split("."):
                    if not isinstance(found, dict) or part not in found:
                        return ()
                    found = found[part]
                return found if isinstance(found, list) else ()
        return ()

    def leaves(self) -> dict[str, Sequence[Origin]]:
        """Dotted path of every value -> its origins."""
        return {path: origins for section in self.sections.values() for path, origins in _leaves(section)}


@dataclass(frozen=True)
class Rules:
    """What the tree's files do not say: further legal keys of a section, and advice for a key that is not there.

    `plug_ins`: section -> its key that names a plug-in. Where the view names another plug-in than the tree's file does,
    the file does not know the plug-in's keys: any is taken, for the plug-in to check.
    """

    more_keys: Callable[[str], Collection[str]] = lambda section: ()
    plug_ins: Mapping[str, str] = field(default_factory=dict)
    advice: Callable[[str, str], str | None] = lambda section, key: None


def _leaves(section: Section) -> list[tuple[str, list[Origin]]]:
    found: list[tuple[str, list[Origin]]] = []

    def collect(values: dict[str, Any], prefix: str) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                collect(value, f"{prefix}.{key}")
            else:
                found.append((f"{prefix}.{key}", value))

    collect(section.values, section.path)
    return found

"""Where each value of a configuration was set: a record beside the composition, from which no run takes a value."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_wrap.config.reading import Node
from megatron_wrap.config.tree import TreeFile


@dataclass(frozen=True)
class Origin:
    """One place that sets a value: `how` is default, selected, inherited, hf_path, override or command line."""

    node: Node
    how: str

    def __str__(self) -> str:
        return self.node.where if self.node.where == self.how else f"{self.node.where} ({self.how})"


@dataclass
class Section:
    """One section of the tree: its files, base first, and for each key the places that set it."""

    path: str
    files: list[TreeFile]
    origins: dict[str, Any] = field(default_factory=dict)
    """Key -> list of `Origin`, the last of which wins; or a dictionary of further keys."""
    selected: str | None = None
    takes_any: bool = False
    """Whether keys that no file defines are accepted, see `Rules.plug_ins`."""

    @property
    def name(self) -> str:
        """The name of the section's last file."""
        return self.files[-1].name

    def leaves(self) -> list[tuple[str, list[Origin]]]:
        """Dotted path of every value with its origins."""
        found: list[tuple[str, list[Origin]]] = []

        def collect(origins: dict[str, Any], prefix: str) -> None:
            for key, below in origins.items():
                if isinstance(below, dict):
                    collect(below, f"{prefix}.{key}")
                else:
                    found.append((f"{prefix}.{key}", below))

        collect(self.origins, self.path)
        return found


@dataclass(frozen=True)
class Tree:
    """A run's configuration before its types are checked."""

    view_file: str
    sections: Mapping[str, Section]
    """Dotted path -> record of the section."""
    values: Mapping[str, Any]
    """What confignest composed, as nested plain dictionaries."""

    def origins(self, path: str) -> Sequence[Origin]:
        """Every place that sets the value at the dotted `path`, first to last; empty where there is none."""
        return find_origins(self.sections, path)

    def leaves(self) -> dict[str, Sequence[Origin]]:
        """Dotted path of every value -> its origins."""
        return {path: origins for section in self.sections.values() for path, origins in section.leaves()}

    def section_values(self, path: str) -> Mapping[str, Any]:
        """The composed values of the section at the dotted `path`."""
        values: Any = self.values
        for part in path.split("."):
            values = values[part]
        return values


def find_origins(sections: Mapping[str, Section], path: str) -> Sequence[Origin]:
    """Every place that sets the value at the dotted `path`, first to last; empty where there is none."""
    for section in sections.values():
        if path.startswith(section.path + "."):
            found: Any = section.origins
            for part in path[len(section.path) + 1 :].split("."):
                if not isinstance(found, dict) or part not in found:
                    return ()
                found = found[part]
            return found if isinstance(found, list) else ()
    return ()


@dataclass(frozen=True)
class Rules:
    """What the files of the tree do not define: further legal keys of a section, and advice on an unknown key.

    `plug_ins`: section -> the key that names a plug-in. Where the run names another plug-in than the file of the tree,
    the file does not define the plug-in's keys: any key is accepted, for the plug-in to check.
    """

    more_keys: Callable[[str], Collection[str]] = lambda section: ()
    plug_ins: Mapping[str, str] = field(default_factory=dict)
    advice: Callable[[str, str], str | None] = lambda section, key: None

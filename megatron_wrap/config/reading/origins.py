"""The origins of a configuration's values, the last of which applies: for the run, messages and `explain`."""

import enum
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_wrap.config.reading.tree import TreeFile
from megatron_wrap.config.reading.yaml_nodes import Node


class SetBy(enum.IntEnum):
    """The kind of origin of a value; a higher one takes precedence."""

    MACHINE = enum.auto()
    """A default that depends on the machine (`defaults.py`)."""
    TREE = enum.auto()
    """A file of the tree."""
    HF_PATH = enum.auto()
    """The file config.json of `hf_path`."""
    RUN = enum.auto()
    """The run's YAML."""
    COMMAND_LINE = enum.auto()


@dataclass(frozen=True)
class Origin:
    """A line that sets a value. `how` describes it in messages: default, selected, inherited by NAME, hf_path,
    override."""

    node: Node
    set_by: SetBy
    how: str = ""

    @property
    def by_run(self) -> bool:
        """Whether the run's YAML or its command line sets the value, and not a file of the tree."""
        return self.set_by >= SetBy.RUN

    def __str__(self) -> str:
        return f"{self.node.where} ({self.how})" if self.how else self.node.where


@dataclass
class Section:
    """A section of the tree: its files, base first, and the origins of each key."""

    path: str
    files: list[TreeFile]
    origins: dict[str, Any] = field(default_factory=dict)
    """Key -> list of `Origin`, the last of which applies; or a dictionary of further keys."""
    selected: str | None = None
    left_out: dict[str, Origin] = field(default_factory=dict)
    """Keys of the run's YAML that belong to the file it selects, where the command line selects another file."""
    takes_any: bool = False
    """Whether keys that no file defines are accepted, see `KeyRules.plug_ins`."""

    @property
    def name(self) -> str:
        """The name of the section's last file."""
        return self.files[-1].name

    def leaves(self) -> list[tuple[str, list[Origin]]]:
        """Dotted path of every value with its origins."""
        leaves: list[tuple[str, list[Origin]]] = []

        def collect(origins: dict[str, Any], prefix: str) -> None:
            for key, nested in origins.items():
                if isinstance(nested, dict):
                    collect(nested, f"{prefix}.{key}")
                else:
                    leaves.append((f"{prefix}.{key}", nested))

        collect(self.origins, self.path)
        return leaves


@dataclass(frozen=True)
class ComposedConfig:
    """A run's configuration before its types are checked."""

    view_file: str
    sections: Mapping[str, Section]
    """Dotted path -> section, in the order of the tree."""

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

    def origins(self, path: str) -> Sequence[Origin]:
        """Origins of the value at the dotted `path`, first to last; empty if nothing sets it."""
        return self.leaves().get(path, ())

    def leaves(self) -> dict[str, Sequence[Origin]]:
        """Dotted path of every value -> its origins."""
        return leaves(self.sections)

    def left_out(self) -> dict[str, Origin]:
        """Dotted path of every key of the run's YAML that is left out (`Section.left_out`) -> its origin."""
        sections = self.sections.values()
        return {f"{section.path}.{key}": origin for section in sections for key, origin in section.left_out.items()}

    def section_values(self, path: str) -> Mapping[str, Any]:
        """The composed values of the section at the dotted `path`."""
        values: Any = self.values
        for part in path.split("."):
            values = values[part]
        return values


def leaves(sections: Mapping[str, Section]) -> dict[str, Sequence[Origin]]:
    """Dotted path of every value -> its origins, first to last."""
    return {path: origins for section in sections.values() for path, origins in section.leaves()}


def _applying(origins: Any) -> Any:
    """The value of the last of several origins, or of each key of a dictionary of origins."""
    if isinstance(origins, dict):
        return {key: _applying(nested) for key, nested in origins.items()}
    return origins[-1].node.plain()

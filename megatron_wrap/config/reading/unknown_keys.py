"""The refusal of misspelled keys, of keys in the wrong section, and of keys where the form of a run's YAML allows
none."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_wrap.config.reading.origins import Section
from megatron_wrap.config.reading.tree import INHERIT, OVERRIDE, SELECT, Folder
from megatron_wrap.config.reading.yaml_nodes import Node
from megatron_wrap.errors import ConfigError, did_you_mean

_KEYWORDS = {
    SELECT: "nothing can be selected here; delete it",
    OVERRIDE: "only a section with a selection takes it; write its keys here directly",
    INHERIT: "belongs in a file of the tree, not in a run's YAML",
}


@dataclass(frozen=True)
class KeyRules:
    """Rules for keys that the files of the tree do not define: legal ones, and advice on unknown ones.

    `plug_ins`: section -> the key that names a plug-in. If the run names another plug-in than the file of the tree, the
    file does not define the plug-in's keys: any key is accepted, and the plug-in validates it.
    `applies`: (section, key, values of the section's other keys) -> whether the key has an effect with them.
    `familiar`: dotted path -> our counterpart of the argument of another library that it ends with; None for another
        name.
    """

    more_keys: Callable[[str], Collection[str]] = lambda section: ()
    plug_ins: Mapping[str, str] = field(default_factory=dict)
    advice: Callable[[str, str], str | None] = lambda section, key: None
    familiar: Callable[[str], str | None] = lambda path: None
    applies: Callable[[str, str, Mapping[str, Any]], bool] = lambda section, key, values: True

    def check_key(self, section: Section, key: str, node: Node) -> None:
        """Refuse a key that is not one of the section's."""
        if key in section.origins:
            return
        more = self.more_keys(section.path)
        if key not in more and not (section.takes_any and key not in _KEYWORDS):
            # a key of the section is likelier than one of Megatron-Core's hundreds
            self._refuse(node, section.path, key, "key", section.origins, more)

    def refuse_section(self, folder: Folder, key: str, node: Node, path: str) -> None:
        """Refuse a key of a folder at the dotted `path` that is not one of its sections."""
        self._refuse(node, path, key, "section", folder.entries)

    def refuse_beside_select(self, folder: Folder, section: Section, key: str, node: Node) -> None:
        """Refuse a key next to `__select__`."""
        if key in section.origins or key in self.more_keys(section.path):
            rule: str | None = f"a key next to {SELECT} has no effect; put it under {OVERRIDE}"
        elif key in folder.entries:
            rule = f"{section.name} is selected, so this has no effect; delete it or select {key}"
        else:
            rule = _KEYWORDS.get(key) or self.advice(section.path, key)
        near = did_you_mean(key, [SELECT, OVERRIDE]) or did_you_mean(key, section.origins)
        near = self.familiar_hint(f"{section.path}.{key}", node) or near
        rule = rule or f"unknown key{near}; only {SELECT} and {OVERRIDE} are allowed here"
        raise ConfigError(f"{node.where} {section.path}.{key}: {rule}")

    def _refuse(
        self, node: Node, path: str, key: str, kind: str, known: Collection[str], further: Collection[str] = ()
    ) -> None:
        key_path, is_mapping = f"{path}.{key}" if path else key, isinstance(node.value, dict)
        near = did_you_mean(key, known, further)
        # a mapping is a misspelled section rather than an argument
        familiar = "" if near and is_mapping else self.familiar_hint(key_path, node)
        hint = familiar or near or f"; the {kind}s are {', '.join(known)}"
        advice = None if familiar and is_mapping else self.advice(path, key)
        rule = _KEYWORDS.get(key) or advice or f"unknown {'key' if familiar else kind}{hint}"
        raise ConfigError(f"{node.where} {key_path}: {rule}")

    def familiar_hint(self, path: str, node: Node) -> str:
        """The hint `; NAME is ...` for an argument of another library: the last name of `path`, or the first one below
        it."""
        advice = self.familiar(path)
        if advice is None and isinstance(node.value, dict):
            hints = (self.familiar_hint(f"{path}.{name}", below) for name, below in node.value.items())
            return next(filter(None, hints), "")
        return "" if advice is None else f"; {advice}"

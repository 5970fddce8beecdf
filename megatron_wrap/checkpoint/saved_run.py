"""Facts that a checkpoint of this package records about the run that saved it; needs neither torch nor
Megatron-Core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint.files.complete_checkpoints import RESOLVED, read_facts
from megatron_wrap.config import load_resolved
from megatron_wrap.config.schema.run import SECTION_PATHS


@dataclass(frozen=True)
class SavedRun:
    """The content of `resolved.yaml` and of the manifest."""

    resolved: Mapping[str, Any]
    facts: Mapping[str, Any]

    def section(self, name: str) -> Mapping[str, Any]:
        """The values of a section of `RunConfig`, such as `arch`."""
        return section_of(self.resolved, name)

    def value(self, name: str) -> Any:
        """The value of `section.key`; None if an older version did not have it."""
        section, _, key = name.partition(".")
        return self.section(section).get(key)

    def arch_selection(self) -> dict[str, Any]:
        """The content of `megatron_lm.model.arch` in a run's YAML that selects the saved architecture, with the sizes
        that were derived from tokenizer and sequence length."""
        values = dict(self.section("arch"))
        values["vocab_size"] = self.facts.get("vocab_size", values["vocab_size"])
        if values["max_position_embeddings"] is None:
            values["max_position_embeddings"] = self.section("train")["seq_length"]
        # language-model-base gives no dimensions; the saved values override all of its keys
        return {"__select__": "language-model-base", "__override__": values}


def read_saved_run(checkpoint: Path) -> SavedRun | None:
    """The run that saved a checkpoint; None if that was Megatron-LM, which records no configuration of ours."""
    path = checkpoint / RESOLVED
    return SavedRun(load_resolved(path), read_facts(checkpoint)) if path.is_file() else None


def section_of(resolved: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The values of a section in a resolved configuration; empty if an older version did not have the section."""
    values: Any = resolved
    for part in SECTION_PATHS[name].split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values if isinstance(values, Mapping) else {}

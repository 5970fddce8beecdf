"""A run that is about to begin, and what its validations report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_wrap.config import RunConfig


class Note(NamedTuple):
    """One line about what was validated."""

    text: str
    is_warning: bool = False
    """The run can begin, but this is unusual."""


@dataclass
class Candidate:
    """The run, and the results of a validation that later ones use."""

    config: RunConfig
    num_processes: int | None = None
    """Over all nodes, if a command is about to start them; None: this process is one of them."""
    own_script: bool = False
    """The processes run a script of the user, which may register the flow itself."""
    has_files: bool = True
    """The processes see the files and devices of this machine; False: the configuration alone can be validated."""
    runs_elsewhere: bool = False
    """The processes run on other machines than this one."""
    reference: RunConfig | None = None
    """The configuration of the reference or teacher model, from `reference_config`."""
    tokenizer: Any = None
    """The run's Hugging Face tokenizer."""
    vocab_size: int = 0
    """Of the model, without padding."""
    unreadable: set[str] = field(default_factory=set)
    """Paths of sources that cannot be read."""

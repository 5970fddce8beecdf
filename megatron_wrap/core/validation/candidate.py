"""A run that is about to begin, and the notes that its validations report."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from megatron_wrap.config import RunConfig


class Note(NamedTuple):
    """One line about a validated item."""

    text: str
    is_warning: bool = False
    """Whether the note is a warning: the run can begin, but the situation is unusual."""


@dataclass
class Candidate:
    """The run, and results of validations that later ones use."""

    config: RunConfig
    num_processes: int | None = None
    """Number of processes over all nodes, if a command is about to start them; None: this process is one of them."""
    own_script: bool = False
    """Whether the processes run a script of the user, which may register the flow itself."""
    has_files: bool = True
    """Whether the processes see the files and devices of this machine; False: only the configuration can be
    validated."""
    runs_elsewhere: bool = False
    """Whether the processes run on other machines than this one."""
    reference: RunConfig | None = None
    """Configuration of the reference or teacher model, from `reference_config`; None: there is none."""
    tokenizer: Any = None
    """The run's Hugging Face tokenizer; None: there is none."""
    vocab_size: int = 0
    """Vocabulary size of the model without padding; 0 before it is known."""
    unreadable: set[str] = field(default_factory=set)
    """Paths of sources that cannot be read."""

"""Functions that run programs of examples/ on each rank."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from _started import refusal_of

EXAMPLES = Path(__file__).parents[2] / "examples"


def grpo(*calls: Sequence[str]) -> list[str]:
    """Call examples/grpo/train.py with each list of words; the messages of those that ended with an error."""
    main = runpy.run_path(str(EXAMPLES / "grpo" / "train.py"))["main"]
    messages = [refusal_of(main, list(words)) for words in calls]
    sys.modules.pop("task", None)
    return messages

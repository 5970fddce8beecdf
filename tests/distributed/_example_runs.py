"""Functions that run programs of examples/ on each rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def grpo(*calls: Sequence[str]) -> list[str]:
    """Call examples/grpo/train.py with each list of words; the messages of those that ended with an error."""
    import runpy

    from megatron_wrap.errors import MegatronWrapError

    errors = []
    for words in calls:
        try:
            runpy.run_path(str(EXAMPLES / "grpo" / "train.py"))["main"](list(words))
            errors.append("")
        except MegatronWrapError as error:
            errors.append(str(error))
    sys.modules.pop("task", None)
    return errors

"""megatron-wrap in the loop of its documentation."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from comparison.task import Outcome, StepClock, Task
from megatron_wrap.core import MegatronWrap

_RATE = "megatron_lm.train.learning-rate"
_SAME_RATE = (f"{_RATE}.lr_warmup_iters=0", f"{_RATE}.lr_decay_style=constant")


def run(task: Task, options: dict[str, Any]) -> Outcome:
    """Train.

    Args:
        options: `overrides`, further `a.b.c=value` of a variant, and `folder`, into which the run may write.
    """
    replica = int(os.environ.get("LOCAL_RANK", "0")) // task.world_size
    folder = Path(options["folder"], str(replica))
    settings = (*_SAME_RATE, f"megatron_wrap.logger.output_dir={folder}", f"megatron_wrap.profile.output_dir={folder}")
    with MegatronWrap(task.config, overrides=[*task.overrides, *settings, *options["overrides"]]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        samples = [{"input_ids": tokens, "loss_mask": [1] * len(tokens)} for tokens in task.samples()]
        batches = wrap.batches(samples)
        clock, losses = StepClock(task), []
        for batch in itertools.islice(batches, task.warmup + task.steps):
            losses.append(wrap.train(batch)["loss"])
            clock.step_ends()
        seconds = clock.measured_seconds()
        batches.close()
        return Outcome(seconds, losses, wrap.state.parallel.layout)

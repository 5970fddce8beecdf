"""megatron-wrap, in the loop that its documentation shows."""

from __future__ import annotations

import itertools
from typing import Any

from comparison.task import Outcome, StepClock, Task
from megatron_wrap.core import MegatronWrap

_RATE = "megatron_lm.train.learning-rate"
_SAME_RATE = (f"{_RATE}.lr_warmup_iters=0", f"{_RATE}.lr_decay_style=constant")


def run(task: Task, options: dict[str, Any]) -> Outcome:
    """Train.

    Args:
        options: `overrides`, further `a.b.c=value` of a variant.
    """
    overrides = [*task.overrides, *_SAME_RATE, *options.get("overrides", [])]
    with MegatronWrap(task.config, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        samples = [{"input_ids": tokens, "loss_mask": [1] * len(tokens)} for tokens in task.samples()]
        clock, losses = StepClock(task), []
        batches = wrap.batches(samples)
        for batch in itertools.islice(batches, task.warmup + task.steps):
            losses.append(wrap.train(batch)["loss"])
            clock.step_ends()
        batches.close()
        return Outcome(clock.measured_seconds(), losses, wrap.state.parallel.layout)

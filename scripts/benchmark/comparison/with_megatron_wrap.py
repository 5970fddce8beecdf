"""megatron-wrap, in the loop that its documentation shows."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from pathlib import Path
from typing import Any

from stage_times import stage_report, timed_passes

from comparison.task import Outcome, Parts, StepClock, Task
from megatron_wrap.core import MegatronWrap

_RATE = "megatron_lm.train.learning-rate"
_LONGEST = 15
"""Kernels that are listed of a profile."""
_SAME_RATE = (f"{_RATE}.lr_warmup_iters=0", f"{_RATE}.lr_decay_style=constant")


def run(task: Task, options: dict[str, Any]) -> Outcome:
    """Train.

    Args:
        options: `overrides`, further `a.b.c=value` of a variant, and `folder`, which the run may write.
    """
    parts, replica = Parts(), int(os.environ.get("LOCAL_RANK", "0")) // task.world_size
    folder = Path(options["folder"], str(replica))
    settings = (*_SAME_RATE, f"megatron_wrap.logger.output_dir={folder}", f"megatron_wrap.profile.output_dir={folder}")
    with MegatronWrap(task.config, overrides=[*task.overrides, *settings, *options["overrides"]]) as wrap:
        wrap.initialize()
        parts.end("processes")
        wrap.setup_model_and_optimizer()
        wrap.platform.synchronize()
        parts.end("model")
        samples = [{"input_ids": tokens, "loss_mask": [1] * len(tokens)} for tokens in task.samples()]
        batches, stages = wrap.batches(samples), wrap.config.parallel.pipeline_model_parallel_size
        with timed_passes() if stages == task.world_size > 1 else contextlib.nullcontext() as pass_seconds:
            parts.end("rows")
            clock, losses = StepClock(task, parts), []
            for batch in itertools.islice(batches, task.warmup + task.steps):
                losses.append(wrap.train(batch)["loss"])
                clock.step_ends()
            seconds = clock.measured_seconds()
            batches.close()
            times = pass_seconds() if pass_seconds else []
        notes = [wrap.state.parallel.layout]
        if times:
            notes.append(_stages(wrap, times, task))
        if steps := wrap.config.profile.steps:
            notes += _profile(folder / f"iterations-{min(steps)}-{max(steps)}" / "profile.json")
        return Outcome(seconds, losses, "; ".join(notes), parts)


def _stages(wrap: MegatronWrap, times: list[float], task: Task) -> str:
    """Predicted and measured times of the pipeline stages."""
    count = len(times) // (task.warmup + task.steps)
    per_step = [times[start : start + count] for start in range(task.warmup * count, len(times), count)]
    report = stage_report("", wrap, per_step)
    layers = "+".join(map(str, report["layers"]))
    pairs = zip(report["predicted_ms"], report["measured_ms"], report["difference"], strict=True)
    stages = ", ".join(f"{ours} for {real} ({difference:+.1%})" for ours, real, difference in pairs)
    return f"layers {layers}, predicted for measured ms a micro-batch: {stages}"


def _profile(path: Path) -> list[str]:
    """What the profile of each process contains, in shares of its step; only the first process has the file."""
    if not path.exists() or int(os.environ.get("RANK", "0")):
        return []
    ranks = json.loads(path.read_text())["ranks"]
    lines = [f"longest kernels of rank 0, {ranks[0]['step_ms']:,.1f} ms a step", *map(_kernel, _work(ranks[0]))]
    path.with_name("kernels.txt").write_text("\n".join([*lines, ""]))
    return [
        f"profile of rank {rank}, {step['step_ms']:,.1f} ms: "
        + ", ".join(f"{kind} {time / step['step_ms']:.1%}" for kind, time in step["milliseconds"].items())
        for rank, step in enumerate(ranks)
    ]


def _work(step: dict[str, Any]) -> list[dict[str, Any]]:
    """The longest kernels or operations, all calls of one name together."""
    return (step.get("kernels") or step.get("operations") or [])[:_LONGEST]


def _kernel(work: dict[str, Any]) -> str:
    return f"{work['milliseconds']:9.2f} ms {work['calls']:7.0f} calls  {work['kind']:<16} {work['name'][:150]}"

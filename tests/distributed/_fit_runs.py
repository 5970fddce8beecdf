"""Functions that the tests of `wrap.fit` run on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from _started import started

CONFIG = Path(__file__).parent / "layouts.yaml"
TRAIN, DATA, CHECKPOINT = "megatron_lm.train.common", "megatron_wrap.data", "megatron_wrap.checkpoint"


def fit(folder: str, overrides: tuple[str, ...], disagree: bool) -> tuple[dict[str, float], int, list[dict[str, Any]]]:
    """Metrics that fit returns, the iteration, and the metrics of each step.

    Args:
        folder: with train.jsonl and validation.jsonl, for the checkpoints.
        disagree: the hook returns False on the last rank alone, after step 7, and evaluations differ between ranks.
    """
    import torch.distributed as dist

    common = (
        *(f"{DATA}.__select__=jsonl", f"{DATA}.train={folder}/train.jsonl"),
        *(f"{DATA}.validation={folder}/validation.jsonl", f"{TRAIN}.train_iters=8", f"{TRAIN}.eval_interval=2"),
        *(f"{TRAIN}.save={folder}/checkpoints", f"megatron_wrap.logger.output_dir={folder}/records"),
        *(f"{CHECKPOINT}.best_metric=validation/loss", f"{TRAIN}.early_stop_patience=2", f"{CHECKPOINT}.keep=1"),
    )
    steps: list[dict[str, Any]] = []
    with started(CONFIG, [*common, *overrides]) as wrap:
        rank, last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
        if disagree:
            # better each time on rank 0 alone: the others would stop
            wrap.evaluate = lambda: {"eval/validation/loss": float(wrap.iteration if rank else -wrap.iteration)}

        def hook(run: Any, metrics: dict[str, float]) -> bool:
            steps.append(metrics)
            return not (disagree and last and run.iteration == 7)

        result = wrap.fit(hook)
        return result, wrap.iteration, steps

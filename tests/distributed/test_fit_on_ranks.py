"""`wrap.fit` on two ranks: all of them take the same steps and end after the same one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
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


PARALLEL = "megatron_lm.model.parallel"


@pytest.fixture
def folder(tmp_path):
    generator = numpy.random.default_rng(3)
    for name in ("train", "validation"):
        samples = [{"input_ids": generator.integers(0, 500, 20).tolist(), "loss_mask": [1] * 20} for _ in range(16)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return tmp_path


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((), id="dp2"),
        pytest.param((f"{PARALLEL}.pipeline_model_parallel_size=2",), id="pp2", marks=pytest.mark.matrix),
    ],
)
def test_ranks_that_disagree_decide_alike(ranks, folder, layout):
    first, other = ranks(2).run(fit, str(folder), layout, True)
    for result in (first, other):
        assert result[1] == 7  # only one rank's hook returned False
        assert [step["iteration"] for step in result[2]] == [*range(1, 8)]
    assert first[0]["best_value"] == other[0]["best_value"]
    assert first[0]["best_iteration"] == other[0]["best_iteration"] == 6  # by the evaluations of rank 0
    kept = sorted(path.name for path in (folder / "checkpoints").glob("iter_*"))
    assert kept == ["iter_0000006", "iter_0000007"]
    assert (folder / "checkpoints/best_checkpointed_iteration.txt").read_text() == "6"

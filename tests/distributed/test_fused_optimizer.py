"""Adam that clips gradients and writes the model's weights itself, over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import _engine_runs
import pytest
from _checkpoint_runs import BF16
from _engine_runs import everything, options, started


def trained(overrides: Sequence[str], samples: Sequence[Any]) -> list[Any]:
    """A hash of the state and the losses after three steps, with separate passes and with fused clipping."""
    results = []
    for fused in ("false", "true"):
        with started((*overrides, f"megatron_lm.train.optimizer.fused_clipping={fused}")) as wrap:
            size = wrap.global_batch_size
            losses = [wrap.train(samples[start : start + size])["loss"] for start in (0, size, 2 * size)]
            copies = [getattr(part.optimizer, "copies", None) for part in wrap.state.optimizer.chained_optimizers]
            assert all(map(bool, copies)) == (fused == "true")
            results.append((everything(wrap), losses))
    return results


OPTIMIZER, DDP = "megatron_lm.train.optimizer", "megatron_lm.misc.ddp"
OVERLAP = {"distributed": True, f"{DDP}.overlap_grad_reduce": True, f"{DDP}.overlap_param_gather": True}


@pytest.mark.parametrize("settings", [{"distributed": True}, OVERLAP], ids=["shards", "overlapping gather"])
def test_shards_of_weights_are_those_of_separate_passes(settings, ranks):
    samples = _engine_runs.weighted_samples(24)
    overrides = (*BF16, *options(micro=1, **settings, **{f"{OPTIMIZER}.clip_grad": 0.05}))
    for separate, fused in ranks(2).run(trained, overrides, samples):
        assert fused == separate

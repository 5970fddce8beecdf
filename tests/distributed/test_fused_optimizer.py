"""Adam that clips gradients and writes the model's weights itself, over data-parallel ranks."""

from __future__ import annotations

import _engine_runs
import _fused_optimizer_runs as runs
import pytest
from _checkpoint_runs import BF16
from _engine_runs import options

OPTIMIZER, DDP = "megatron_lm.train.optimizer", "megatron_lm.misc.ddp"
OVERLAP = {"distributed": True, f"{DDP}.overlap_grad_reduce": True, f"{DDP}.overlap_param_gather": True}


@pytest.mark.parametrize("settings", [{"distributed": True}, OVERLAP], ids=["shards", "overlapping gather"])
def test_shards_of_weights_are_those_of_separate_passes(settings, ranks):
    samples = _engine_runs.weighted_samples(24)
    overrides = (*BF16, *options(micro=1, **settings, **{f"{OPTIMIZER}.clip_grad": 0.05}))
    for separate, fused in ranks(2).run(runs.trained, overrides, samples):
        assert fused == separate

"""The attention that GPUs use, which splits and rotates in one operation, compared with Megatron-Core's."""

from __future__ import annotations

import _fused_runs as runs
import numpy
import pytest
from _checkpoint_runs import CP2, MLA, OVERLAP, PP2, TP2
from _covering import quick

PACKED = ("megatron_wrap.flow.packing=true",)
ARCH = "megatron_lm.model.arch"
INTERLEAVED = (f"{ARCH}.rotary_interleaved=true", f"{ARCH}.rotary_percent=0.5")
NORMS = (f"{ARCH}.qk_layernorm=true",)
DISTRIBUTED = ("megatron_lm.train.optimizer.use_distributed_optimizer=true", *OVERLAP)
SMALL_BUCKETS = ("megatron_lm.misc.ddp.ddp_bucket_size=8",)  # each weight has its own
LAYOUTS = {
    "one-rank": (1, INTERLEAVED),
    "packed": (1, PACKED),
    "tp2": (2, TP2),
    "cp2": (2, CP2),
    "pp2": (2, PP2),
    "norms": (1, (*NORMS, *INTERLEAVED, f"{ARCH}.apply_layernorm_1p=true")),
    "norms-tp2": (2, (*NORMS, *TP2)),
    "norms-dp2": (2, (*NORMS, *DISTRIBUTED, *SMALL_BUCKETS)),
    "norms-packed-cp2": (2, (*NORMS, *PACKED, *CP2)),
}
YARN = tuple(f"{ARCH}.{text}" for text in ("rope_type=yarn", "rotary_scaling_factor=4.0", "mscale=0.7"))
NO_QUERY_LATENT = (*MLA, f"{ARCH}.q_lora_rank=null")
RECOMPUTE = "megatron_lm.train.recompute"
RECOMPUTED = (
    *(f"{RECOMPUTE}.recompute_granularity=full", f"{RECOMPUTE}.recompute_method=uniform"),
    f"{RECOMPUTE}.recompute_num_layers=1",
)
UP_RECOMPUTED = (f"{RECOMPUTE}.recompute_granularity=selective", f"{RECOMPUTE}.recompute_modules=[mla_up_proj]")
LATENT = {
    "one-rank": (1, (*MLA, *YARN, *RECOMPUTED)),
    "packed": (1, (*NO_QUERY_LATENT, *PACKED, *UP_RECOMPUTED)),
    "tp2": (2, (*MLA, *TP2)),
    "packed-cp2": (2, (*MLA, *YARN, *CP2, *PACKED)),
}


def samples() -> list[dict[str, list[int]]]:
    generator = numpy.random.default_rng(2)
    return [
        {"input_ids": generator.integers(3, 500, 40 - 3 * index).tolist(), "loss_mask": [1] * (40 - 3 * index)}
        for index in range(8)
    ]


@pytest.mark.parametrize("name", quick(LAYOUTS, ("one-rank", "norms-tp2", "norms-dp2")))
def test_training_and_generation_are_those_of_megatron_core(ranks, name):
    processes, overrides = LAYOUTS[name]
    steps, completions, _ = ranks(processes).run(runs.train_and_generate, overrides, samples(), False)[0]
    result, own_losses, changed = ranks(processes).run(runs.train_and_generate, overrides, samples(), True)[0]
    assert changed > 0
    assert numpy.array(result) == pytest.approx(numpy.array(steps), rel=1e-6)
    assert own_losses == completions


@pytest.mark.parametrize("name", quick(LATENT, ("one-rank", "packed", "tp2")))
def test_latent_attention_in_one_kernel_is_that_of_megatron_core(ranks, name):
    processes, overrides = LATENT[name]
    pool = ranks(processes)
    steps, completions, unused = pool.run(runs.train_with_latent_attention, overrides, samples(), False)[0]
    result, own_completions, calls = pool.run(runs.train_with_latent_attention, overrides, samples(), True)[0]
    assert unused == 0 < calls
    assert numpy.array(result) == pytest.approx(numpy.array(steps), rel=1e-6)
    assert own_completions == completions

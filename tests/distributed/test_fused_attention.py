"""The attention that GPUs use, which splits and rotates in one operation, compared with Megatron-Core's."""

from __future__ import annotations

import _fused_runs as runs
import numpy
import pytest
from _checkpoint_runs import MLA
from _covering import quick
from _layouts import OVERLAP, layout

ARCH = "megatron_lm.model.arch."


def recompute(*values: str) -> tuple[str, ...]:
    return tuple(f"megatron_lm.train.recompute.recompute_{value}" for value in values)


SWITCHES = {
    "interleaved": (f"{ARCH}rotary_interleaved=true", f"{ARCH}rotary_percent=0.5"),
    "norms": (f"{ARCH}qk_layernorm=true",),
    "centered": (f"{ARCH}apply_layernorm_1p=true",),
    "buckets": (*OVERLAP, "megatron_lm.misc.ddp.ddp_bucket_size=8"),  # each weight has its own
    "latent": MLA,
    "no_query_latent": (*MLA, f"{ARCH}q_lora_rank=null"),
    "yarn": tuple(f"{ARCH}{text}" for text in ("rope_type=yarn", "rotary_scaling_factor=4.0", "mscale=0.7")),
    "recomputed": recompute("granularity=full", "method=uniform", "num_layers=1"),
    "up_recomputed": recompute("granularity=selective", "modules=[mla_up_proj]"),
}
LAYOUTS = (
    *("one-interleaved", "one-packed", "tp2", "cp2", "pp2", "one-norms-interleaved-centered"),
    *("tp2-norms", "dp2-norms-buckets", "cp2-norms-packed"),
)
LATENT = (
    *("one-latent-yarn-recomputed", "one-no_query_latent-packed-up_recomputed", "tp2-latent"),
    "cp2-latent-yarn-packed",
)


def samples() -> list[dict[str, list[int]]]:
    generator = numpy.random.default_rng(2)
    return [
        {"input_ids": generator.integers(3, 500, 40 - 3 * index).tolist(), "loss_mask": [1] * (40 - 3 * index)}
        for index in range(8)
    ]


@pytest.mark.parametrize("name", quick(LAYOUTS, ("one-interleaved", "tp2-norms", "dp2-norms-buckets")))
def test_training_and_generation_are_those_of_megatron_core(ranks, name):
    processes, overrides = layout(name, SWITCHES)
    steps, completions, _ = ranks(processes).run(runs.train_and_generate, overrides, samples(), False)[0]
    result, own_losses, changed = ranks(processes).run(runs.train_and_generate, overrides, samples(), True)[0]
    assert changed > 0
    assert numpy.array(result) == pytest.approx(numpy.array(steps), rel=1e-6)
    assert own_losses == completions


@pytest.mark.parametrize("name", quick(LATENT, LATENT[:3]))
def test_latent_attention_in_one_kernel_is_that_of_megatron_core(ranks, name):
    processes, overrides = layout(name, SWITCHES)
    pool = ranks(processes)
    steps, completions, unused = pool.run(runs.train_with_latent_attention, overrides, samples(), False)[0]
    result, own_completions, calls = pool.run(runs.train_with_latent_attention, overrides, samples(), True)[0]
    assert unused == 0 < calls
    assert numpy.array(result) == pytest.approx(numpy.array(steps), rel=1e-6)
    assert own_completions == completions

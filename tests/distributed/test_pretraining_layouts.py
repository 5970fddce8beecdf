"""The runs of configs/pretraining train on the CPU, at reduced size, in the shape of their layouts: each parallel size
above one becomes two, with as many data-parallel replicas as four processes allow. Compared with one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from _agreement import assert_layouts_agree
from _covering import quick

RUNS = Path(__file__).parents[2] / "configs/pretraining"
DATA, ARCH = "megatron_wrap.data", "megatron_lm.model.arch"
SHAPES = {
    "gpt3-125m": ("dp2", "dp4"),
    "gpt3-1.3b": ("dp4", "pp2-dp2"),
    "gpt3-13b": ("pp2-dp2", "tp2-sp-pp2"),
    "gpt3-175b": ("tp2-sp-pp2-vpp2",),
    "llama3-8b": ("cp2-dp2", "packed-cp2"),
    "llama3-70b": ("pp2-vpp2-cp2",),  # without its tensor parallelism, which would take eight processes
    "qwen3-30b-a3b": ("tp2-sp-pp2-ep2-etp1",),
    "deepseek-v3": ("pp2-ep2",),
}
"""Run -> names of layouts. gpt3-175b-tutorial has the model and the layout of gpt3-175b."""
ALWAYS = ("gpt3-175b",)
"""The others have axes that these and other files' tests cover."""


@pytest.mark.parametrize("run", quick(SHAPES, ALWAYS))
def test_a_run_trains_in_its_layout_s_shape_like_one_process(run, ranks, tmp_path):
    generated = (f"{DATA}.train=null", f"{DATA}.split=null", f"{DATA}.mock_data=true", f"{DATA}.cache_dir={tmp_path}")
    small = (f"{ARCH}.vocab_size=512", f"{DATA}.eod_token=1")
    short = ("megatron_lm.train.common.train_iters=4", "megatron_lm.train.learning-rate.lr_warmup_iters=0")
    assert_layouts_agree(ranks, SHAPES[run], (*generated, *small, *short), None, RUNS / f"{run}.yaml")

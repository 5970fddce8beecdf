"""Each kind of model has the same initial weights on every layout, bit for bit, and trains like one rank."""

from __future__ import annotations

from typing import Any

import _model_runs
import numpy
import pytest
from _agreement import assert_like_one_rank
from _covering import axes, covering, family_and_axes
from _layouts import OVERLAP, PARALLEL, layout

ARCH = "megatron_lm.model.arch."
RECOMPUTE = "megatron_lm.train.recompute."
STEPS = 2
"""Of a layout: the loss of the second depends on the update of the first, whose gradients are compared one by one."""


def _overrides(prefix: str, values: dict[str, Any]) -> tuple[str, ...]:
    texts = {key: str(value).lower() if isinstance(value, bool) else value for key, value in values.items()}
    return tuple(f"{prefix}{key}={text}" for key, text in texts.items())


MODELS: dict[str, dict[str, Any]] = _model_runs.ARCHITECTURES["dense"]
SELECTIVE = (f"{RECOMPUTE}recompute_granularity=selective",)
FULL = _overrides(
    RECOMPUTE, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2}
)
SWITCHES = {
    "full": FULL,
    "split_activations": (*FULL, f"{RECOMPUTE}distribute_saved_activations=true"),
    "block": _overrides(
        RECOMPUTE, {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    ),
    "selective": SELECTIVE,
    "modules": (*SELECTIVE, f"{RECOMPUTE}recompute_modules=[core_attn,mlp,layernorm]"),
    "uneven": (f"{PARALLEL}pipeline_model_parallel_layout=Et*3|tL",),
    "uneven_chunks": (f"{PARALLEL}pipeline_model_parallel_layout=Et|t*2|t|t*2L",),
}
"""Parts of names of layouts: kinds of recomputation, and splits of the pipeline."""
CASES = [
    *((model, name) for name in ("tp2", "pp2", "cp2", "tp2-pp2") for model in ("tied", "gpt2", "qk-norm")),
    *(("nemotron", "tp2"), ("unpadded-on-one-rank", "tp2"), ("qk-norm", "tp2-nosp"), ("tied", "pp2-vpp2")),
    *(("gpt2", "dp2-overlap"), ("tied", "pp2-dp2-overlap")),
    # 301 rows on four ranks of 128 rows: the third has some padding, the fourth only padding
    ("llama", "tp4"),
    *(("llama", "pp2-first1"), ("tied", "pp2-last1"), ("six-layers", "pp2-vpp2-first2")),
    *(("six-layers-tied", "pp4-first1-last1"), ("gpt2", "pp2-uneven"), ("six-layers", "pp2-uneven_chunks")),
    ("six-layers-tied", "pp4"),  # split by cost
    *(("llama", name) for name in ("dp2-overlap", "tp2-dp2-overlap", "pp2-vpp2-dp2-overlap", "cp2-overlap")),
    *(("llama", name) for name in ("one-full", "one-modules", "tp2-full", "tp2-nosp-split_activations")),
    *(("llama", name) for name in ("tp2-selective", "pp2-block", "cp2-modules")),
]
"""A model, and the name of a layout."""


def _run(model: str, name: str, *overrides: str, lone_token: bool = False, steps: int = 3) -> tuple[int, Any]:
    """Number of processes, and what they run."""
    processes, of_layout = layout(name, SWITCHES)
    arguments = (*_overrides(ARCH, MODELS[model]), *of_layout, *overrides), lone_token, steps
    return processes, (_model_runs.train, *arguments)


def _of_all_ranks(ranks: Any, *case: str, **options: Any) -> dict[str, Any]:
    """Results of a layout, checked to be the same on each rank."""
    processes, run = _run(*case, **options)
    of_ranks = ranks(processes).run(*run)
    for other in of_ranks[1:]:
        assert {**other, "embeddings": [], "gradients": {}} == {**of_ranks[0], "embeddings": [], "gradients": {}}
    return of_ranks[0]


@pytest.fixture(scope="module")
def one_rank(on_one_rank):
    """one_rank(model, *overrides) -> results of one rank."""
    return lambda model, *overrides, **options: on_one_rank(*_run(model, "one", *overrides, **options)[1])


@pytest.mark.parametrize(("model", "name"), covering(CASES, family_and_axes))
def test_a_model_trains_like_one_rank(model: str, name: str, one_rank, ranks):
    processes, run = _run(model, name, steps=STEPS)
    of_ranks = ranks(processes).run(*run)
    assert_like_one_rank(of_ranks, one_rank(model, steps=STEPS), 1e-5)
    if "tp" not in name:
        # the embedding's copies on the first and the last stage and on all replicas are equal after training
        embeddings = [digest for of_rank in of_ranks for digest in of_rank["embeddings"]]
        tied = not MODELS[model].get("untie_embeddings_and_output_weights", True)
        assert len(set(embeddings)) == 1
        assert len(embeddings) >= (2 if tied and "pp" in name else 1)


def test_another_seed_gives_other_weights(one_rank):
    usual, other = one_rank("gpt2")["initial"], one_rank("gpt2", "megatron_lm.train.common.seed=1235")["initial"]
    same = {name for name in usual if usual[name] == other[name]}
    assert same == {name for name in usual if "layernorm" in name or name.endswith("bias")}


HALF_LAYOUTS = ["dp2", "tp2", "pp2", "cp2", "dp2-overlap"]
BF16 = ("megatron_lm.train.dtype.bf16=true",)
FP16 = _overrides(
    "megatron_lm.train.dtype.", {"fp16": True, "hysteresis": 1, "loss_scale_window": 2, "initial_loss_scale": 2.0**16}
)


@pytest.mark.parametrize("name", covering(HALF_LAYOUTS, lambda name: axes(name) - {"pp2", "overlap"}))
def test_bf16_trains_the_same_on_every_layout(name: str, one_rank, ranks):
    expected, exact = one_rank("tied", *BF16), one_rank("tied")
    actual = _of_all_ranks(ranks, "tied", name, *BF16)
    assert actual["initial"] == expected["initial"] != exact["initial"]
    for reference in (expected, exact):
        numpy.testing.assert_allclose(actual["losses"], reference["losses"], rtol=5e-3)
        numpy.testing.assert_allclose(actual["grad_norms"], reference["grad_norms"], rtol=0.1)


@pytest.mark.parametrize("name", covering(HALF_LAYOUTS, lambda name: axes(name) - {"tp2", "cp2"}))
def test_fp16_skips_an_overflow_on_all_ranks(name: str, one_rank, ranks):
    """The second step overflows on some ranks: all skip it and halve the scale, which doubles after two good steps."""
    expected = one_rank("tied", *FP16, lone_token=True)
    actual = _of_all_ranks(ranks, "tied", name, *FP16, lone_token=True)
    assert expected["skipped"] == [0, 1, 1, 1]
    for key in ("initial", "skipped", "samples", "changed", "loss_scales"):
        assert actual[key] == expected[key], key
    assert actual["changed"] == [True, False, True, True]
    assert actual["samples"] == [4, 8, 12, 16]
    assert actual["loss_scales"] == [2.0**16, 2.0**15, 2.0**15, 2.0**16]
    assert actual["grad_norms"][1] == 0.0  # the step was skipped
    numpy.testing.assert_allclose(actual["losses"], expected["losses"], rtol=5e-3)
    numpy.testing.assert_allclose(actual["grad_norms"], expected["grad_norms"], rtol=0.1)


def test_fp16_trains_like_fp32(one_rank):
    """The growing loss scale does not affect gradients and updates."""
    exact, half = one_rank("tied"), one_rank("tied", *FP16)
    assert half["skipped"] == [0, 0, 0]
    assert half["loss_scales"] == [2.0**16, 2.0**17, 2.0**17]
    numpy.testing.assert_allclose(half["losses"], exact["losses"], rtol=5e-3)
    numpy.testing.assert_allclose(half["grad_norms"], exact["grad_norms"], rtol=0.1)


def test_a_run_that_gathers_parameters_in_the_forward_pass_is_freed(ranks):
    assert ranks(2).run(_model_runs.is_freed, OVERLAP) == [True, True]

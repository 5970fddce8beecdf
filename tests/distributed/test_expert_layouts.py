"""MoE models have the same initial weights on every layout, bit for bit, and train like one rank."""

from __future__ import annotations

from typing import Any

import _model_runs
import numpy
import pytest
from _agreement import assert_like_one_rank, assert_same_gradients
from _covering import covering, family_and_axes, quick
from _layouts import layout

ARCH = "megatron_lm.model.arch."
STEPS = 2

MODELS: dict[str, dict[str, Any]] = _model_runs.ARCHITECTURES["experts"]
LOSSES: dict[str, dict[str, Any]] = _model_runs.ARCHITECTURES["router_losses"]


def arch(*parts: dict[str, Any]) -> tuple[str, ...]:
    """Overrides of the architecture."""
    return tuple(f"{ARCH}{key}={value}" for part in parts for key, value in part.items())


STEPS_OF_RUN = (
    f"megatron_lm.train.common.train_iters={STEPS}",
    "megatron_wrap.logger.add_params_norm_to_metrics=true",
    "megatron_wrap.logger.add_expert_load_to_metrics=true",
)


@pytest.fixture(scope="module")
def one_rank(on_one_rank):
    """one_rank(*overrides) -> results of one rank."""
    return lambda *overrides: on_one_rank(_model_runs.train, (*STEPS_OF_RUN, *overrides), False, STEPS)


def train(
    ranks: Any, case: str, overrides: tuple[str, ...], function: Any = _model_runs.train, steps: int = STEPS
) -> list[dict[str, Any]]:
    """Results of the ranks of a layout."""
    processes, of_layout = layout(case)
    return ranks(processes).run(function, (*STEPS_OF_RUN, *overrides, *of_layout), False, steps)


LAYOUTS = {
    "mixtral": (
        *("dp2", "dp2-ep2-dopt", "dp4-ep2", "dp4-ep4", "tp2-etp1", "dp2-tp2-ep2", "dp2-tp2-ep4-etp1"),
        *("dp2-pp2-vpp2-ep2", "dp2-cp2-ep2", "pp2-tp2"),
    ),
    "qwen2-moe": ("dp2-ep2", "tp2-ep2-etp1", "pp2", "cp2-ep2"),
    "mixtral-three-layers": ("pp2",),
    "deepseek-v3-router": ("dp2-ep2",),
    "deepseek-v3": ("tp2", "tp2-ep2-etp1", "cp2-ep2", "dp2-pp2-ep2", "cp2-tp2"),
    "deepseek-v2-lite": ("tp2", "pp2", "cp2"),
    "mistral": ("tp2", "cp2", "pp2"),
}


@pytest.mark.parametrize(
    ("model", "case"), covering(((model, case) for model, cases in LAYOUTS.items() for case in cases), family_and_axes)
)
def test_an_moe_model_trains_like_one_rank(model: str, case: str, one_rank, ranks):
    """Without an auxiliary loss, so the micro-batch size has no effect."""
    overrides = arch(MODELS[model])
    cut = () if "dp4" in case or "vpp" in case else ("megatron_lm.train.common.micro_batch_size=2",)
    assert_like_one_rank(train(ranks, case, (*overrides, *cut)), one_rank(*overrides), 1e-4)


KINDS = ("sequential", "grouped_mm")
SAME_EXPERTS = ("dp1", "dp1-packed", "dp2-ep2", "tp2-ep2-etp1", "cp2-ep2-packed")


@pytest.mark.parametrize("case", quick(SAME_EXPERTS, ("dp1-packed", "tp2-ep2-etp1")))
def test_grouped_experts_equal_sequential_ones(case: str, ranks):
    """Each on the same layout, against Megatron-Core's experts and its dispatcher."""
    overrides = (*arch(MODELS["qwen2-moe"]), "megatron_lm.train.common.micro_batch_size=2")
    sequential, grouped = (train(ranks, case, (*overrides, f"{ARCH}experts_impl={kind}"), steps=1)[0] for kind in KINDS)
    assert grouped["initial"] == sequential["initial"]
    numpy.testing.assert_allclose(grouped["losses"], sequential["losses"], rtol=1e-6)
    assert_same_gradients(grouped["gradients"], sequential["gradients"], 1e-6)


@pytest.mark.parametrize(
    ("loss", "case"),
    covering(
        (
            *((loss, case) for case in ("dp2-ep2", "cp2-ep2", "dp2-tp2-ep2-etp1") for loss in LOSSES),
            *(("aux-seq-z", case) for case in ("tp2", "pp2", "dp4-ep4", "pp2-tp2")),
        ),
        family_and_axes,
    ),
)
def test_router_losses_count_each_real_token_once(loss: str, case: str, one_rank, ranks):
    """With equal micro-batches of samples of unequal lengths, which each layout pads differently."""
    overrides = (*arch(MODELS["mixtral"], LOSSES[loss]), "megatron_lm.train.common.micro_batch_size=1")
    expected = one_rank(*overrides)
    assert_like_one_rank(train(ranks, case, overrides), expected, 1e-4)
    plain = one_rank(*arch(MODELS["mixtral"]))
    router = "decoder.layers.1.mlp.router.weight"
    share = numpy.linalg.norm(expected["gradients"][router] - plain["gradients"][router])
    assert share > 0.05 * numpy.linalg.norm(plain["gradients"][router])  # the router loss has an effect


@pytest.mark.parametrize("case", ["dp1", "dp2-ep2", "cp2-ep2", "dp2-tp2-ep2-etp1"])
def test_losses_from_sums_over_tokens_count_each_real_token_once(case: str, one_rank, ranks):
    """As the kernels of GPUs compute them, against the losses from scores of one rank."""
    kinds = "[aux_loss,seq_aux_loss]" if "dp2" in case else "[aux_loss,seq_aux_loss,global_aux_loss]"
    coefficients = "[0.1,0.05]" if "dp2" in case else "[0.1,0.05,0.2]"
    losses = {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": coefficients, "moe_z_loss_coeff": 0.02}
    overrides = (*arch(MODELS["deepseek-v3-router"], losses), "megatron_lm.train.common.micro_batch_size=2")
    of_ranks = train(ranks, case, overrides, _model_runs.train_with_documented_kernels)
    assert_like_one_rank(of_ranks, one_rank(*overrides), 1e-4)


def test_the_global_loss_from_sums_over_tokens_with_replicas(ranks):
    """Against that from scores on the same layout, since it depends on the order of micro-batches."""
    loss = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.2}
    overrides = (*arch(MODELS["mixtral"], loss), "megatron_lm.train.common.micro_batch_size=1")
    expected, actual = (
        train(ranks, "dp2-ep2", overrides, function)[0]
        for function in (_model_runs.train, _model_runs.train_with_documented_kernels)
    )
    for name in ("losses", "grad_norms", "router_losses"):
        numpy.testing.assert_allclose(actual[name], expected[name], rtol=1e-5)


RECOMPUTE = "megatron_lm.train.recompute."
RECOMPUTED = {
    "full": tuple(
        f"{RECOMPUTE}{text}"
        for text in ("recompute_granularity=full", "recompute_method=uniform", "recompute_num_layers=2")
    ),
    "modules": (
        f"{RECOMPUTE}recompute_granularity=selective",
        f"{RECOMPUTE}recompute_modules=[core_attn,moe,shared_experts]",
    ),
}


@pytest.mark.parametrize(
    ("case", "recompute"),
    covering(((case, name) for case in ("dp1", "tp2-ep2-etp1") for name in RECOMPUTED), lambda case: {case[1]}),
)
def test_recomputation_changes_nothing(case: str, recompute: str, one_rank, ranks):
    """Router losses are counted once, and the expert bias counts each token once."""
    model = {**MODELS["deepseek-v3"], **LOSSES["aux-seq-z"]}
    overrides = (*arch(model), "megatron_lm.train.common.micro_batch_size=1")
    assert_like_one_rank(train(ranks, case, (*overrides, *RECOMPUTED[recompute])), one_rank(*overrides), 1e-4)


def test_bf16_trains_the_same_on_every_layout(one_rank, ranks):
    overrides = (*arch(MODELS["mixtral"], LOSSES["aux"]), "megatron_lm.train.dtype.bf16=true")
    overrides = (*overrides, "megatron_lm.train.common.micro_batch_size=1")
    expected, actual = one_rank(*overrides), train(ranks, "dp2-ep2-dopt", overrides)[0]
    assert actual["initial"] == expected["initial"]
    for name in ("losses", "router_losses"):
        numpy.testing.assert_allclose(actual[name], expected[name], rtol=1e-2)

"""MoE models have the same initial weights on every layout, bit for bit, and train like one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import _model_runs
import numpy
import pytest
from _covering import covering, family_and_axes, quick

ARCH = "megatron_lm.model.arch."
PARALLEL = "megatron_lm.model.parallel."
STEPS = 2
NAMES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
}

MIXTRAL = {"num_experts": 4, "moe_ffn_hidden_size": 48, "moe_router_dtype": "fp32"}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": MIXTRAL,
    "mixtral-three-layers": {**MIXTRAL, "num_layers": 3},
    # the first layer is dense; gated shared experts; softmax over all experts
    "qwen2-moe": {
        **MIXTRAL,
        "num_experts": 6,
        "moe_router_topk": 3,
        "moe_layer_freq": "[0,1,1,1]",
        "moe_router_pre_softmax": "true",
        "moe_shared_expert_intermediate_size": 64,
        "moe_shared_expert_gate": "true",
    },
    "deepseek-v3-router": {
        **MIXTRAL,
        "num_experts": 8,
        "moe_router_topk": 3,
        "moe_layer_freq": "([0]*1+[1]*3)",
        "moe_shared_expert_intermediate_size": 48,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": "true",
        "moe_router_topk_scaling_factor": 2.5,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_group_score_experts": 2,
    },
}
DEEPSEEK = {
    "multi_latent_attention": "true",
    "qk_layernorm": "true",
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_head_dim": 12,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 10,
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 128,
    "mscale_all_dim": 0.5,
}
MODELS |= {
    "deepseek-v3": {**MODELS["deepseek-v3-router"], **DEEPSEEK},
    "deepseek-v2-lite": {
        **MODELS["qwen2-moe"],
        **DEEPSEEK,
        "q_lora_rank": "null",
        "rope_type": "rope",
        "moe_shared_expert_gate": "false",
    },
    "mistral": {"window_size": "[5,0]", "num_query_groups": 2},
}
LOSSES: dict[str, dict[str, Any]] = {
    "aux": {"moe_aux_loss_coeff": 0.1},
    "seq": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
    "z": {"moe_z_loss_coeff": 0.1},
    "aux-seq-z": {
        "moe_router_load_balancing_type": "[aux_loss,seq_aux_loss]",
        "moe_aux_loss_coeff": "[0.1,0.05]",
        "moe_z_loss_coeff": 0.02,
    },
}


def arch(*parts: dict[str, Any]) -> tuple[str, ...]:
    """Overrides of the architecture."""
    return tuple(f"{ARCH}{key}={value}" for part in parts for key, value in part.items())


def layout(name: str) -> tuple[int, tuple[str, ...]]:
    """Number of processes and overrides of names such as dp2-ep2; expert parallelism uses the processes of the other
    axes."""
    sizes = {part.rstrip("0123456789"): int(part[-1]) for part in name.split("-") if part[-1].isdigit()}
    overrides = [f"{PARALLEL}{NAMES[key]}={size}" for key, size in sizes.items() if key in NAMES]
    overrides += ["megatron_lm.train.optimizer.use_distributed_optimizer=true"] if "dopt" in name else []
    count = sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1) * sizes.get("dp", 1)
    return count, tuple(overrides)


STEPS_OF_RUN = (
    f"megatron_lm.train.common.train_iters={STEPS}",
    "megatron_wrap.logger.add_params_norm_to_metrics=true",
    "megatron_wrap.logger.add_expert_load_to_metrics=true",
)


@pytest.fixture(scope="module")
def one_rank(ranks, tmp_path_factory):
    """one_rank(*overrides) -> results of one rank; each is trained once."""
    actual: dict[tuple[str, ...], dict[str, Any]] = {}

    def train(*overrides: str) -> dict[str, Any]:
        if overrides not in actual:
            folder = str(tmp_path_factory.mktemp("one"))
            (actual[overrides],) = ranks(1).run(_model_runs.train, (*STEPS_OF_RUN, *overrides), folder, False, STEPS)
        return actual[overrides]

    return train


def assert_like_one_rank(
    ranks: Any,
    expected: dict[str, Any],
    case: str,
    folder: Any,
    overrides: tuple[str, ...],
    train: Callable[..., dict[str, Any]] = _model_runs.train,
):
    processes, of_layout = layout(case)
    arguments = ((*STEPS_OF_RUN, *overrides, *of_layout), str(folder), False, STEPS)
    of_ranks = ranks(processes).run(train, *arguments)
    actual = of_ranks[0]
    for other in of_ranks[1:]:
        for name in ("losses", "grad_norms", "params_norms", "router_losses", "expert_load", "initial"):
            assert other[name] == actual[name], name
    assert actual["initial"] == expected["initial"]  # digests of all bits
    assert actual["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        difference = numpy.linalg.norm(actual["gradients"][name] - gradient)
        assert difference <= 1e-4 * numpy.linalg.norm(gradient), name
    assert actual["expert_load"] == pytest.approx(expected["expert_load"], rel=1e-5)
    numpy.testing.assert_allclose(actual["losses"], expected["losses"], rtol=1e-4)
    numpy.testing.assert_allclose(actual["grad_norms"], expected["grad_norms"], rtol=1e-4)
    numpy.testing.assert_allclose(actual["params_norms"], expected["params_norms"], rtol=1e-6)
    numpy.testing.assert_allclose(actual["router_losses"], expected["router_losses"], rtol=1e-4)


LAYOUTS = {
    "mixtral": (
        *("dp2", "dp2-ep2", "dp2-ep2-dopt", "dp4-ep2", "dp4-ep2-dopt", "dp4-ep4", "tp2", "tp2-etp1"),
        *("tp2-ep2-etp1", "dp2-tp2-ep2", "dp2-tp2-ep2-etp1", "dp2-tp2-ep4-etp1", "pp2", "dp2-pp2-ep2"),
        *("dp2-pp2-vpp2-ep2", "cp2-ep2", "dp2-cp2-ep2", "pp2-tp2"),
    ),
    "qwen2-moe": ("dp2-ep2", "tp2-ep2-etp1", "tp2", "pp2", "dp2-pp2-ep2", "cp2-ep2", "pp2-tp2-etp1"),
    "mixtral-three-layers": ("pp2",),
    "deepseek-v3-router": ("dp2-ep2", "dp4-ep4"),
    "deepseek-v3": ("tp2", "tp2-ep2-etp1", "pp2", "cp2-ep2", "dp2-pp2-ep2", "pp2-tp2", "cp2-tp2"),
    "deepseek-v2-lite": ("tp2", "pp2", "cp2", "dp2-ep2"),
    "mistral": ("tp2", "cp2", "pp2"),
}


@pytest.mark.parametrize(
    ("model", "case"), covering(((model, case) for model, cases in LAYOUTS.items() for case in cases), family_and_axes)
)
def test_an_moe_model_trains_like_one_rank(model: str, case: str, one_rank, ranks, tmp_path):
    """Without an auxiliary loss, so the micro-batch size has no effect."""
    overrides = arch(MODELS[model])
    cut = () if "dp4" in case or "vpp" in case else ("megatron_lm.train.common.micro_batch_size=2",)
    assert_like_one_rank(ranks, one_rank(*overrides), case, tmp_path, (*overrides, *cut))


SAME_EXPERTS = ("dp1", "dp1-packed", "dp2-ep2", "tp2-ep2-etp1", "dp2-tp2-ep2", "pp2", "cp2", "cp2-ep2-packed")


@pytest.mark.parametrize("case", quick(SAME_EXPERTS, ("dp1-packed", "tp2-ep2-etp1")))
def test_grouped_experts_equal_sequential_ones(case: str, ranks, tmp_path):
    """Each on the same layout, against Megatron-Core's experts and its dispatcher."""
    processes, of_layout = layout(case.removesuffix("-packed"))
    common = ("megatron_lm.train.common.micro_batch_size=2",)
    packed = ("megatron_wrap.flow.packing=true",) if case.endswith("packed") else ()
    overrides = (*STEPS_OF_RUN, *arch(MODELS["qwen2-moe"]), *common, *packed, *of_layout)
    sequential, grouped = (
        ranks(processes).run(_model_runs.train, (*overrides, f"{ARCH}experts_impl={kind}"), str(tmp_path), False, 1)[0]
        for kind in ("sequential", "grouped_mm")
    )
    assert grouped["initial"] == sequential["initial"]
    numpy.testing.assert_allclose(grouped["losses"], sequential["losses"], rtol=1e-6)
    assert grouped["gradients"].keys() == sequential["gradients"].keys()
    for name, gradient in sequential["gradients"].items():
        difference = numpy.linalg.norm(grouped["gradients"][name] - gradient)
        assert difference <= 1e-6 * numpy.linalg.norm(gradient), name


@pytest.mark.parametrize(
    ("loss", "case"),
    covering(
        (
            (loss, case)
            for case in ("dp2-ep2", "tp2", "pp2", "cp2-ep2", "dp4-ep4", "dp2-tp2-ep2-etp1", "pp2-tp2")
            for loss in LOSSES
        ),
        family_and_axes,
    ),
)
def test_router_losses_count_each_real_token_once(loss: str, case: str, one_rank, ranks, tmp_path):
    """With equal micro-batches of samples of unequal lengths, which each layout pads differently."""
    overrides = (*arch(MODELS["mixtral"], LOSSES[loss]), "megatron_lm.train.common.micro_batch_size=1")
    expected = one_rank(*overrides)
    assert_like_one_rank(ranks, expected, case, tmp_path, overrides)
    plain = one_rank(*arch(MODELS["mixtral"]))
    router = "decoder.layers.1.mlp.router.weight"
    share = numpy.linalg.norm(expected["gradients"][router] - plain["gradients"][router])
    assert share > 0.05 * numpy.linalg.norm(plain["gradients"][router])  # the router loss has an effect


@pytest.mark.parametrize("case", ["dp1", "dp2-ep2", "cp2-ep2", "dp2-tp2-ep2-etp1"])
def test_losses_from_sums_over_tokens_count_each_real_token_once(case: str, one_rank, ranks, tmp_path):
    """As the kernels of GPUs compute them, against the losses from scores of one rank."""
    kinds = "[aux_loss,seq_aux_loss]" if "dp2" in case else "[aux_loss,seq_aux_loss,global_aux_loss]"
    coefficients = "[0.1,0.05]" if "dp2" in case else "[0.1,0.05,0.2]"
    losses = {"moe_router_load_balancing_type": kinds, "moe_aux_loss_coeff": coefficients, "moe_z_loss_coeff": 0.02}
    model = {**MODELS["deepseek-v3-router"], **losses}
    overrides = (*arch(model), "megatron_lm.train.common.micro_batch_size=2")
    ours = _model_runs.train_with_documented_kernels
    assert_like_one_rank(ranks, one_rank(*overrides), case, tmp_path, overrides, ours)


def test_the_global_loss_from_sums_over_tokens_with_replicas(ranks, tmp_path):
    """Against that from scores on the same layout, since it depends on the order of micro-batches."""
    loss = {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.2}
    processes, of_layout = layout("dp2-ep2")
    overrides = (*STEPS_OF_RUN, *arch(MODELS["mixtral"], loss), "megatron_lm.train.common.micro_batch_size=1")
    expected, actual = (
        ranks(processes).run(train, (*overrides, *of_layout), str(tmp_path), False, STEPS)[0]
        for train in (_model_runs.train, _model_runs.train_with_documented_kernels)
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
def test_recomputation_changes_nothing(case: str, recompute: str, one_rank, ranks, tmp_path):
    """Router losses are counted once, and the expert bias counts each token once."""
    model = {**MODELS["deepseek-v3"], **LOSSES["aux-seq-z"]}
    overrides = (*arch(model), "megatron_lm.train.common.micro_batch_size=1")
    assert_like_one_rank(ranks, one_rank(*overrides), case, tmp_path, (*overrides, *RECOMPUTED[recompute]))


def test_bf16_trains_the_same_on_every_layout(one_rank, ranks, tmp_path):
    overrides = (*arch(MODELS["mixtral"], LOSSES["aux"]), "megatron_lm.train.dtype.bf16=true")
    overrides = (*overrides, "megatron_lm.train.common.micro_batch_size=1")
    expected = one_rank(*overrides)
    processes, of_layout = layout("dp2-ep2-dopt")
    arguments = ((*STEPS_OF_RUN, *overrides, *of_layout), str(tmp_path), False, STEPS)
    actual = ranks(processes).run(_model_runs.train, *arguments)[0]
    assert actual["initial"] == expected["initial"]
    for name in ("losses", "router_losses"):
        numpy.testing.assert_allclose(actual[name], expected[name], rtol=1e-2)

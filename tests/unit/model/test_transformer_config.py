"""Which keys of a configuration reach Megatron-Core's `TransformerConfig`. No process group."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_wrap.config import load_run_config
from megatron_wrap.model.transformer_config import same_named, transformer_config
from megatron_wrap.platform import choose_platform
from megatron_wrap.platform.megatron_core.kernels import LayerKernels

RUN = Path(__file__).parents[3] / "configs/tiny-llama-mock.yaml"
ARCH = "megatron_lm.model.arch"


def build(*overrides: str) -> Any:
    choose_platform("cpu").install()
    return transformer_config(load_run_config(RUN, overrides), choose_platform("cpu"))


@pytest.mark.parametrize(
    ("training", "overrides", "asked"),
    [(True, [], True), (False, [], False), (False, [f"{ARCH}.gradient_accumulation_fusion=true"], True)],
)
def test_only_training_asks_for_sums_of_weight_gradients(
    monkeypatch: pytest.MonkeyPatch, training: bool, overrides: list[str], asked: bool
) -> None:
    """The answer needs a product on the GPU, which starts cuBLAS."""
    calls: list[bool] = []

    def layer_kernels(device: torch.device, with_gradients: bool) -> LayerKernels:
        calls.append(with_gradients)
        return LayerKernels(weight_gradients=object() if with_gradients else None)

    monkeypatch.setattr("megatron_wrap.model.transformer_config.layer_kernels", layer_kernels)
    platform = choose_platform("cpu")
    monkeypatch.setattr(platform, "use_kernels", lambda kernels: None)
    monkeypatch.setattr(platform, "refuse_unsafe", lambda *settings: None)  # the CPU refuses the sums
    platform.install()
    built = transformer_config(load_run_config(RUN, overrides), platform, training)
    assert calls == [asked]
    assert built.gradient_accumulation_fusion == asked


def test_fields_of_the_same_name_are_passed() -> None:
    section = dataclasses.make_dataclass("Section", ["shared", "renamed", "listed"])
    target = dataclasses.make_dataclass("Target", ["shared", "listed", "other"])
    assert same_named(section(1, 2, (3, 4)), target) == {"shared": 1, "listed": [3, 4]}


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("qk_layernorm", "true", "qk_layernorm", True),
        ("norm_epsilon", "1e-4", "layernorm_epsilon", 1e-4),
        ("window_size", "[7, 0]", "window_size", (7, 0)),
        ("qk_l2_norm", "true", "qk_l2_norm", True),  # Megatron-Core's own key
    ],
)
def test_a_key_reaches_megatron_core(key: str, value: str, field: str, expected: object) -> None:
    assert getattr(build(f"{ARCH}.{key}={value}"), field) == expected


def test_keys_of_experts_and_of_latent_attention_reach_only_models_that_have_them() -> None:
    dense = build(f"{ARCH}.moe_router_topk=3", f"{ARCH}.kv_lora_rank=7")
    untouched = type(dense)(num_layers=1, hidden_size=8, num_attention_heads=1)
    assert dense.moe_router_topk == untouched.moe_router_topk
    assert dense.num_moe_experts is None
    assert not hasattr(dense, "kv_lora_rank")
    experts = build(f"{ARCH}.__select__=tiny-deepseek-v3")
    assert (experts.num_moe_experts, experts.moe_router_topk, experts.kv_lora_rank) == (8, 3, 64)
    assert experts.moe_layer_freq == [0, 1, 1, 1]


def test_the_keys_of_gpt_oss_reach_megatron_core() -> None:
    config = build(f"{ARCH}.__select__=tiny-gpt-oss", "megatron_lm.model.parallel.tensor_model_parallel_size=2")
    assert (config.softmax_type, config.window_size, config.window_attn_skip_freq) == ("learnable", (31, 0), 2)
    assert config.activation_func(torch.tensor(2.0)) == pytest.approx(2 / (1 + math.exp(-1.702 * 2)))
    assert config.gated_linear_unit
    assert (config.activation_func_clamp_value, config.glu_linear_offset) == (7.0, 1.0)
    assert (config.yarn_rotary_scaling_factor, config.yarn_correction_range_round_to_int) == (32.0, False)
    assert config.add_bias_linear
    assert config.expert_tensor_parallel_size == 2  # Megatron-Core's own experts have no biases then

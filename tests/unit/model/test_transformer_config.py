"""Which keys of a configuration reach Megatron-Core's `TransformerConfig`. No process group."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.config import load_run_config
from megatron_wrap.model.transformer_config import same_named, transformer_config
from megatron_wrap.platform import choose_platform

RUN = Path(__file__).parents[3] / "configs/tiny-llama-mock.yaml"
ARCH = "megatron_lm.model.arch"


def build(*overrides: str) -> Any:
    choose_platform("cpu").install()
    return transformer_config(load_run_config(RUN, overrides), choose_platform("cpu"))


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

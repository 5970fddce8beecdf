"""Model FLOPs against Megatron-LM's formulas; against torch's counter: test_flops_of_frozen_weights.py."""

import dataclasses

import pytest

from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.plan.flops import tflops_per_device, training_flops
from megatron_wrap.plan.model_parts import ModelShape

VOCABULARY = 96
LLAMA = ArchConfig(
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=88,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=16,
    swiglu=True,
    upstream={},
)
GPT2 = dataclasses.replace(LLAMA, num_layers=2, ffn_hidden_size=128, num_query_groups=4, kv_channels=8, swiglu=False)
GATED = dataclasses.replace(LLAMA, attention_output_gate=True)


def of(arch, output_size=None):
    return ModelShape(arch, VOCABULARY, output_size)


def test_causal_attention_is_half_the_square():
    tokens, squares = 24, 8**2 + 16**2
    attention = training_flops(of(LLAMA), causal=False).of(0, squares)
    whole = training_flops(of(LLAMA), causal=False).of(tokens, squares)
    assert training_flops(of(LLAMA)).of(tokens, squares) == whole - attention / 2
    # 3 passes x 3 layers x 2 products x 2 operations x 64 channels x sum(S^2)
    assert attention == 3 * 3 * 2 * 2 * 64 * squares


def test_flops_equal_megatron_lms_formula():
    # attn_layer_flops, mlp_layer_flops and the logits of megatron/training/training.py (0.19.2), with its names
    for arch in (LLAMA, GPT2):
        tokens, squares, hidden = 40, 8**2 + 32**2, arch.hidden_size
        p = arch.kv_channels * arch.num_attention_heads / hidden
        g = arch.num_query_groups
        attention = 4 * tokens * hidden * p * (hidden + hidden * (g / arch.num_attention_heads))
        attention += 2 * squares * hidden * p
        expansion = arch.ffn_hidden_size / hidden
        mlp = 4 * expansion * (1.5 if arch.swiglu else 1.0) * tokens * hidden**2
        expected = 3 * (arch.num_layers * (attention + mlp) + 2 * tokens * hidden * VOCABULARY)
        assert training_flops(of(arch)).of(tokens, squares) == pytest.approx(expected, rel=1e-12)


def test_flops_of_linear_attention_equal_megatron_lms_formula():
    # linear_self_attn_term of megatron/training/training.py (0.19.2), for heads of one width
    linear = dataclasses.replace(
        GATED,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=(1, 0, 1),
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        linear_key_head_dim=10,
        linear_value_head_dim=10,
    )
    qk_dim, v_dim, hidden = 2 * 10, 6 * 10, GATED.hidden_size
    term = hidden * (2 * qk_dim + 2 * v_dim + 2 * 6) + 4 * (2 * qk_dim + v_dim) + 6 * 10**2 * 4 + hidden * v_dim
    tokens, squares = 40, 8**2 + 32**2

    def of_layers(number):
        """FLOPs of attention and MLPs in layers without linear attention."""
        return training_flops(of(dataclasses.replace(GATED, num_layers=number), output_size=0)).of(tokens, squares)

    mlp = 3 * 2 * tokens * hidden * 3 * GATED.ffn_hidden_size
    output = 3 * 2 * tokens * hidden * VOCABULARY
    expected = of_layers(1) + 2 * (3 * 2 * tokens * term + mlp) + output
    assert training_flops(of(linear)).of(tokens, squares) == expected


def test_tflops_per_device():
    assert tflops_per_device(8e12, elapsed_seconds=2.0, num_devices=4) == 1.0
    assert tflops_per_device(8e12, elapsed_seconds=0.0, num_devices=4) == 0.0

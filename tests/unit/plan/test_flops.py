"""Model FLOPs against torch's FLOP counter on transformers models, and against Megatron-LM's formula."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.plan.flops import forward_flops, tflops_per_device, training_flops
from megatron_wrap.plan.model_parts import ModelShape

pytestmark = pytest.mark.transformers

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
QWEN2_MOE = dataclasses.replace(
    LLAMA,
    num_query_groups=4,
    kv_channels=8,
    num_experts=6,
    moe_layer_freq=(0, 1, 1),
    moe_router_topk=3,
    moe_ffn_hidden_size=24,
    moe_shared_expert_intermediate_size=40,
    moe_shared_expert_gate=True,
)
DEEPSEEK = dataclasses.replace(
    QWEN2_MOE,
    moe_shared_expert_intermediate_size=48,
    moe_shared_expert_gate=False,
    multi_latent_attention=True,
    q_lora_rank=20,
    kv_lora_rank=12,
    qk_head_dim=10,
    qk_pos_emb_head_dim=4,
    v_head_dim=6,
)
GLM = dataclasses.replace(
    QWEN2_MOE,
    num_query_groups=2,
    kv_channels=16,
    moe_shared_expert_intermediate_size=24,
    moe_shared_expert_gate=False,
)
DEEPSEEK_LITE = dataclasses.replace(DEEPSEEK, q_lora_rank=None)
GATED = dataclasses.replace(LLAMA, attention_output_gate=True)


def of(arch, output_size=None):
    return ModelShape(arch, VOCABULARY, output_size)


def llama_sizes(arch):
    """Arguments of transformers' configurations of Llama-like models."""
    return {
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.ffn_hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_attention_heads,
        "num_key_value_heads": arch.num_query_groups,
        "vocab_size": VOCABULARY,
        "attn_implementation": "eager",
    }


def make_deepseek(arch=DEEPSEEK):
    config = DeepseekV2Config(
        **llama_sizes(arch),
        first_k_dense_replace=1,
        n_routed_experts=arch.num_experts,
        n_shared_experts=2,
        num_experts_per_tok=arch.moe_router_topk,
        moe_intermediate_size=arch.moe_ffn_hidden_size,
        q_lora_rank=arch.q_lora_rank,
        kv_lora_rank=arch.kv_lora_rank,
        qk_nope_head_dim=arch.qk_head_dim,
        qk_rope_head_dim=arch.qk_pos_emb_head_dim,
        v_head_dim=arch.v_head_dim,
        experts_implementation="eager",
    )
    return DeepseekV2ForCausalLM(config)


def make_deepseek_lite():
    return make_deepseek(DEEPSEEK_LITE)


def make_glm():
    config = Glm4MoeConfig(
        **llama_sizes(GLM),
        head_dim=GLM.kv_channels,
        first_k_dense_replace=1,
        n_routed_experts=GLM.num_experts,
        num_experts_per_tok=GLM.moe_router_topk,
        moe_intermediate_size=GLM.moe_ffn_hidden_size,
        experts_implementation="eager",
    )
    return Glm4MoeForCausalLM(config)


def make_qwen2_moe():
    config = Qwen2MoeConfig(
        **llama_sizes(QWEN2_MOE),
        mlp_only_layers=[0],
        num_experts=QWEN2_MOE.num_experts,
        num_experts_per_tok=QWEN2_MOE.moe_router_topk,
        moe_intermediate_size=QWEN2_MOE.moe_ffn_hidden_size,
        shared_expert_intermediate_size=QWEN2_MOE.moe_shared_expert_intermediate_size,
        experts_implementation="eager",
    )
    return Qwen2MoeForCausalLM(config)


def make_gated():
    config = Qwen3_5TextConfig(
        **llama_sizes(GATED), head_dim=GATED.kv_channels, layer_types=["full_attention"] * GATED.num_layers
    )
    return Qwen3_5ForCausalLM(config)


def make_llama():
    return LlamaForCausalLM(LlamaConfig(**llama_sizes(LLAMA), head_dim=LLAMA.kv_channels))


OLMO = dataclasses.replace(LLAMA, kv_channels=8)


def make_gemma():
    return Gemma3ForCausalLM(Gemma3TextConfig(**llama_sizes(LLAMA), head_dim=LLAMA.kv_channels, pad_token_id=None))


def make_olmo():
    return Olmo2ForCausalLM(Olmo2Config(**llama_sizes(OLMO)))


def make_gpt2():
    config = GPT2Config(
        n_embd=GPT2.hidden_size,
        n_inner=GPT2.ffn_hidden_size,
        n_layer=GPT2.num_layers,
        n_head=GPT2.num_attention_heads,
        vocab_size=VOCABULARY,
        attn_implementation="eager",
    )
    return GPT2LMHeadModel(config)


def count(model, batch_size, length, backward):
    """FLOPs that torch counts, without those of the rotary table."""
    tokens = torch.zeros(batch_size, length, dtype=torch.long)
    counter = FlopCounterMode(display=False)
    with counter:
        logits = model(input_ids=tokens).logits
        if backward:
            logits.sum().backward()
    rotary = sum(
        sum(counts.values()) for name, counts in counter.get_flop_counts().items() if name.endswith("rotary_emb")
    )
    return counter.get_total_flops() - rotary


MODELS = [
    (make_llama, LLAMA),
    (make_gpt2, GPT2),
    (make_qwen2_moe, QWEN2_MOE),
    (make_deepseek, DEEPSEEK),
    (make_deepseek_lite, DEEPSEEK_LITE),
    (make_glm, GLM),
    (make_gated, GATED),
    (make_olmo, OLMO),
    (make_gemma, LLAMA),
]


@pytest.mark.parametrize(("make", "arch"), MODELS)
@pytest.mark.parametrize(("batch_size", "length"), [(1, 16), (3, 7)])
def test_flops_equal_torchs_count_for_transformers_models(make, arch, batch_size, length):
    tokens, squares = batch_size * length, batch_size * length**2
    model = make()
    # Eager attention also computes the scores above the causal diagonal.
    assert count(model, batch_size, length, backward=False) == forward_flops(of(arch), causal=False).of(tokens, squares)
    assert count(model, batch_size, length, backward=True) == training_flops(of(arch), causal=False).of(tokens, squares)


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


def test_packed_documents_cost_less_than_one_long_sequence():
    assert training_flops(of(LLAMA)).of(32, 2 * 16**2) < training_flops(of(LLAMA)).of(32, 32**2)


def test_tflops_per_device():
    assert tflops_per_device(8e12, elapsed_seconds=2.0, num_devices=4) == 1.0
    assert tflops_per_device(8e12, elapsed_seconds=0.0, num_devices=4) == 0.0


def test_model_shape_is_immutable():
    shape = of(LLAMA)
    assert dataclasses.replace(shape) == shape
    with pytest.raises(dataclasses.FrozenInstanceError):
        shape.arch = GPT2

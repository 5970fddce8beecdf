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

from megatron_wrap.metrics.throughput import (
    ExpertShape,
    LatentAttentionShape,
    LinearAttentionShape,
    ModelShape,
    forward_flops,
    tflops_per_device,
    training_flops,
)

pytestmark = pytest.mark.transformers

LLAMA = ModelShape(
    num_layers=3,
    hidden_size=32,
    ffn_hidden_size=88,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=16,
    vocab_size=96,
    gated_linear_unit=True,
)
GPT2 = dataclasses.replace(
    LLAMA, num_layers=2, ffn_hidden_size=128, num_query_groups=4, kv_channels=8, gated_linear_unit=False
)
QWEN2_MOE = dataclasses.replace(
    LLAMA,
    num_query_groups=4,
    kv_channels=8,
    experts=ExpertShape(
        num_layers=2, num_experts=6, topk=3, ffn_hidden_size=24, shared_ffn_hidden_size=40, shared_gate=True
    ),
)


DEEPSEEK = dataclasses.replace(
    QWEN2_MOE,
    experts=dataclasses.replace(QWEN2_MOE.experts, shared_ffn_hidden_size=48, shared_gate=False),
    latent_attention=LatentAttentionShape(
        q_lora_rank=20, kv_lora_rank=12, qk_head_dim=14, qk_pos_emb_head_dim=4, v_head_dim=6
    ),
)
GLM = dataclasses.replace(
    QWEN2_MOE,
    num_query_groups=2,
    kv_channels=16,
    experts=dataclasses.replace(QWEN2_MOE.experts, shared_ffn_hidden_size=24, shared_gate=False),
)
DEEPSEEK_LITE = dataclasses.replace(
    DEEPSEEK, latent_attention=dataclasses.replace(DEEPSEEK.latent_attention, q_lora_rank=None)
)


GATED = dataclasses.replace(LLAMA, output_gate=True)


def llama_sizes(shape):
    """Arguments of transformers' configurations of Llama-like models."""
    return {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.ffn_hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_query_groups,
        "vocab_size": shape.vocab_size,
        "attn_implementation": "eager",
    }


def make_deepseek(shape=DEEPSEEK):
    experts, latent = shape.experts, shape.latent_attention
    config = DeepseekV2Config(
        **llama_sizes(shape),
        first_k_dense_replace=1,
        n_routed_experts=experts.num_experts,
        n_shared_experts=2,
        num_experts_per_tok=experts.topk,
        moe_intermediate_size=experts.ffn_hidden_size,
        q_lora_rank=latent.q_lora_rank,
        kv_lora_rank=latent.kv_lora_rank,
        qk_nope_head_dim=latent.qk_head_dim - latent.qk_pos_emb_head_dim,
        qk_rope_head_dim=latent.qk_pos_emb_head_dim,
        v_head_dim=latent.v_head_dim,
        experts_implementation="eager",
    )
    return DeepseekV2ForCausalLM(config)


def make_deepseek_lite():
    return make_deepseek(DEEPSEEK_LITE)


def make_glm():
    experts = GLM.experts
    config = Glm4MoeConfig(
        **llama_sizes(GLM),
        head_dim=GLM.kv_channels,
        first_k_dense_replace=1,
        n_routed_experts=experts.num_experts,
        num_experts_per_tok=experts.topk,
        moe_intermediate_size=experts.ffn_hidden_size,
        experts_implementation="eager",
    )
    return Glm4MoeForCausalLM(config)


def make_qwen2_moe():
    experts = QWEN2_MOE.experts
    config = Qwen2MoeConfig(
        **llama_sizes(QWEN2_MOE),
        mlp_only_layers=[0],
        num_experts=experts.num_experts,
        num_experts_per_tok=experts.topk,
        moe_intermediate_size=experts.ffn_hidden_size,
        shared_expert_intermediate_size=experts.shared_ffn_hidden_size,
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
        vocab_size=GPT2.vocab_size,
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


@pytest.mark.parametrize(("make", "shape"), MODELS)
@pytest.mark.parametrize(("batch_size", "length"), [(1, 16), (3, 7)])
def test_flops_equal_torchs_count_for_transformers_models(make, shape, batch_size, length):
    tokens, squares = batch_size * length, batch_size * length**2
    model = make()
    # Eager attention also computes the scores above the causal diagonal.
    assert count(model, batch_size, length, backward=False) == forward_flops(shape, tokens, squares, causal=False)
    assert count(model, batch_size, length, backward=True) == training_flops(shape, tokens, squares, causal=False)


def test_causal_attention_is_half_the_square():
    tokens, squares = 24, 8**2 + 16**2
    attention = training_flops(LLAMA, 0, squares, causal=False)
    assert (
        training_flops(LLAMA, tokens, squares) == training_flops(LLAMA, tokens, squares, causal=False) - attention / 2
    )
    # 3 passes x 3 layers x 2 products x 2 operations x 64 channels x sum(S^2)
    assert attention == 3 * 3 * 2 * 2 * 64 * squares


def test_flops_equal_megatron_lms_formula():
    # attn_layer_flops, mlp_layer_flops and the logits of megatron/training/training.py (0.19.2), with its names
    for shape in (LLAMA, GPT2):
        tokens, squares, hidden = 40, 8**2 + 32**2, shape.hidden_size
        p = shape.kv_channels * shape.num_attention_heads / hidden
        g = shape.num_query_groups
        attention = 4 * tokens * hidden * p * (hidden + hidden * (g / shape.num_attention_heads))
        attention += 2 * squares * hidden * p
        expansion = shape.ffn_hidden_size / hidden
        mlp = 4 * expansion * (1.5 if shape.gated_linear_unit else 1.0) * tokens * hidden**2
        expected = 3 * (shape.num_layers * (attention + mlp) + 2 * tokens * hidden * shape.vocab_size)
        assert training_flops(shape, tokens, squares) == pytest.approx(expected, rel=1e-12)


def test_flops_of_linear_attention_equal_megatron_lms_formula():
    # linear_self_attn_term of megatron/training/training.py (0.19.2), for heads of one width
    linear = LinearAttentionShape(
        num_layers=2, num_key_heads=2, num_value_heads=6, key_head_dim=10, value_head_dim=10, conv_kernel_dim=4
    )
    qk_dim, v_dim, hidden = 2 * 10, 6 * 10, GATED.hidden_size
    term = hidden * (2 * qk_dim + 2 * v_dim + 2 * 6) + 4 * (2 * qk_dim + v_dim) + 6 * 10**2 * 4 + hidden * v_dim
    tokens, squares = 40, 8**2 + 32**2

    def of_layers(number):
        """FLOPs of attention and MLPs in layers without linear attention."""
        return training_flops(dataclasses.replace(GATED, num_layers=number, output_size=0), tokens, squares)

    mlp = 3 * 2 * tokens * hidden * 3 * GATED.ffn_hidden_size
    output = 3 * 2 * tokens * hidden * GATED.vocab_size
    expected = of_layers(1) + 2 * (3 * 2 * tokens * term + mlp) + output
    assert training_flops(dataclasses.replace(GATED, linear_attention=linear), tokens, squares) == expected


def test_packed_documents_cost_less_than_one_long_sequence():
    assert training_flops(LLAMA, 32, 2 * 16**2) < training_flops(LLAMA, 32, 32**2)


def test_tflops_per_device():
    assert tflops_per_device(8e12, elapsed_seconds=2.0, num_devices=4) == 1.0
    assert tflops_per_device(8e12, elapsed_seconds=0.0, num_devices=4) == 0.0


def test_model_shape_is_immutable():
    assert dataclasses.replace(LLAMA) == LLAMA
    with pytest.raises(dataclasses.FrozenInstanceError):
        LLAMA.num_layers = 4

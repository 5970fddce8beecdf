"""The provider `gpt_model` against transformers: logits, loss of `gpt_sft` and all gradients, in fp32 with random
parameters, for each architecture."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers_models as hf
from torch import Tensor
from transformers import (
    DeepseekV2ForCausalLM,
    DeepseekV3ForCausalLM,
    GlmForCausalLM,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    MistralForCausalLM,
    MixtralForCausalLM,
    NemotronForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen2MoeForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
    StableLmForCausalLM,
)

from megatron_wrap.config import RunConfig
from megatron_wrap.core import MegatronWrap

pytestmark = [pytest.mark.transformers, pytest.mark.process_group]

LINEAR_CROSS_ENTROPY = "megatron_wrap.model_provider.linear_cross_entropy"
VOCAB = 301
TIED: dict[str, Any] = {"untie_embeddings_and_output_weights": "false"}
GPT2: dict[str, Any] = {
    "position_embedding_type": "learned_absolute",
    "max_position_embeddings": 80,
    "normalization": "LayerNorm",
    "swiglu": "false",
    "openai_gelu": "true",
    "add_bias_linear": "true",
    "num_query_groups": 6,
    **TIED,
}


EXPERTS: dict[str, Any] = {"num_experts": 6}


def rope(kind: str = "default", base: float = 10000.0, **settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": base, **settings}}


@dataclass(frozen=True)
class Family:
    """One architecture as our configuration keys and as a transformers model."""

    name: str
    model_class: type[PreTrainedModel]
    arch: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=rope)
    mapping: Callable[..., dict[str, Tensor]] = hf.to_llama_like


DEEPSEEK_V2: dict[str, Any] = {
    "multi_latent_attention": "true",
    "num_query_groups": 6,
    "qk_layernorm": "true",
    "norm_epsilon": 1e-6,  # transformers' value for the latent vectors is fixed
    "kv_lora_rank": 20,
    "qk_head_dim": 10,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 14,
    "num_experts": 8,
    "moe_layer_freq": "([0]*1+[1]*2)",
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 48,
    "moe_router_pre_softmax": "true",
}
THEIR_DEEPSEEK: dict[str, Any] = {
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
YARN: dict[str, Any] = {
    **{"original_max_position_embeddings": 256, "beta_fast": 8.0, "beta_slow": 2.0},
    **{"mscale": 0.707, "mscale_all_dim": 0.5},
}
OUR_YARN: dict[str, Any] = {"rope_type": "yarn", "rotary_scaling_factor": 4.0, **YARN}
THEIR_YARN: dict[str, Any] = {"factor": 4.0, **YARN}
LLAMA3 = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FAMILIES = [
    Family("llama", LlamaForCausalLM),
    Family("llama-tied-without-groups", LlamaForCausalLM, {**TIED, "num_query_groups": 6}),
    Family("llama-wide-heads", LlamaForCausalLM, {"kv_channels": 12, "num_query_groups": 2, "norm_epsilon": 1e-2}),
    Family(
        "llama-biases",
        LlamaForCausalLM,
        {"add_bias_linear": "true"},
        {**rope(), "attention_bias": True, "mlp_bias": True},
    ),
    Family("llama-theta", LlamaForCausalLM, {"rotary_base": 50.0}, rope(base=50.0)),
    Family(
        "llama3-rope-scaling",
        LlamaForCausalLM,
        {"rotary_base": 500000.0, "use_rope_scaling": "true", "rope_scaling_factor": 32.0, "kv_channels": 64},
        rope("llama3", 500000.0, **LLAMA3),
    ),
    Family(
        "llama-linear-rope-scaling",
        LlamaForCausalLM,
        {"rotary_seq_len_interpolation_factor": 4.0},
        rope("linear", factor=4.0),
    ),
    Family("qwen3", Qwen3ForCausalLM, {"qk_layernorm": "true", "kv_channels": 16}),
    Family("qwen2", Qwen2ForCausalLM, {"add_qkv_bias": "true", **TIED}),
    Family(
        "stablelm",
        StableLmForCausalLM,
        {"normalization": "LayerNorm", "rotary_percent": 0.25, "add_qkv_bias": "true"},
        {**rope(partial_rotary_factor=0.25), "use_qkv_bias": True},
    ),
    Family(
        "glm",
        GlmForCausalLM,
        {"rotary_percent": 0.5, "rotary_interleaved": "true", "add_qkv_bias": "true", "kv_channels": 12},
        {**rope(partial_rotary_factor=0.5), "attention_bias": True},
        hf.to_glm,
    ),
    Family(
        "nemotron",
        NemotronForCausalLM,
        {
            "normalization": "LayerNorm",
            "apply_layernorm_1p": "true",
            "swiglu": "false",
            "squared_relu": "true",
            "rotary_percent": 0.5,
            "kv_channels": 12,
        },
        rope(partial_rotary_factor=0.5),
    ),
    Family("mistral", MistralForCausalLM, {"window_size": "[15,0]"}, {**rope(), "sliding_window": 16}),
    Family("mixtral", MixtralForCausalLM, EXPERTS, {**rope(), "num_local_experts": 6, "num_experts_per_tok": 2}),
    Family(
        "qwen2-moe",
        Qwen2MoeForCausalLM,
        {
            **EXPERTS,
            "moe_ffn_hidden_size": 40,
            "moe_router_topk": 3,
            "moe_layer_freq": "[0,1,1]",
            "moe_router_pre_softmax": "true",
            "moe_shared_expert_intermediate_size": 56,
            "moe_shared_expert_gate": "true",
            "add_qkv_bias": "true",
        },
        {
            **rope(),
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [0],
        },
    ),
    Family(
        "qwen3-moe",
        Qwen3MoeForCausalLM,
        {**EXPERTS, "moe_ffn_hidden_size": 40, "moe_router_topk": 4, "qk_layernorm": "true", "kv_channels": 12},
        {**rope(), "num_experts": 6, "num_experts_per_tok": 4, "moe_intermediate_size": 40, "norm_topk_prob": True},
    ),
    Family(
        "deepseek-v2-lite",  # no latent vector of queries
        DeepseekV2ForCausalLM,
        {**DEEPSEEK_V2, "moe_router_topk": 3},
        {**rope(), **THEIR_DEEPSEEK, "q_lora_rank": None, "num_experts_per_tok": 3, "topk_method": "greedy"},
        hf.to_deepseek,
    ),
    Family(
        "deepseek-v2",
        DeepseekV2ForCausalLM,
        {
            **DEEPSEEK_V2,
            **OUR_YARN,
            "q_lora_rank": 28,
            "moe_router_topk": 4,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 3,
            "moe_router_group_score_experts": 1,
            "moe_router_topk_scaling_factor": 2.0,
        },
        {
            **rope("yarn", **THEIR_YARN),
            **THEIR_DEEPSEEK,
            "q_lora_rank": 28,
            "num_experts_per_tok": 4,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 3,
            "routed_scaling_factor": 2.0,
        },
        hf.to_deepseek,
    ),
    Family(
        "deepseek-v3",
        DeepseekV3ForCausalLM,
        {
            **DEEPSEEK_V2,
            **OUR_YARN,
            "q_lora_rank": 28,
            "moe_router_pre_softmax": "false",
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": "true",
            "moe_router_topk": 3,
            "moe_router_num_groups": 4,
            "moe_router_group_topk": 2,
            "moe_router_group_score_experts": 2,
            "moe_router_topk_scaling_factor": 2.5,
        },
        {
            **rope("yarn", **THEIR_YARN),
            **THEIR_DEEPSEEK,
            "q_lora_rank": 28,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
        hf.to_deepseek,
    ),
    Family("gpt2", GPT2LMHeadModel, GPT2, {"activation_function": "gelu_new"}, hf.to_gpt2),
    Family(
        "gpt2-exact-gelu-untied",
        GPT2LMHeadModel,
        {**GPT2, "openai_gelu": "false", "untie_embeddings_and_output_weights": "true"},
        {"activation_function": "gelu"},
        hf.to_gpt2,
    ),
]


def randomize_weights(model: torch.nn.Module, zero_centered: bool) -> None:
    """Randomize all parameters, including vocabulary padding, such that logits are of order 1."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "layernorm" in name and name.endswith("weight"):
                parameter.copy_((0.0 if zero_centered else 1.0) + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(0.15 * noise)


def randomize_expert_biases(ours: Any, theirs: Any) -> None:
    """Randomize the routers' correction biases (buffers), with equal values in both models."""
    generator = torch.Generator().manual_seed(14)
    for layer, their_layer in zip(ours.decoder.layers, theirs.model.layers, strict=True):
        bias = getattr(getattr(layer.mlp, "router", None), "expert_bias", None)
        if bias is not None:
            bias.copy_(0.3 * torch.randn(bias.shape, generator=generator))
            their_layer.mlp.gate.e_score_correction_bias.copy_(bias)


def sft_samples() -> list[dict[str, list[int]]]:
    """Tokenized samples of unequal length, with label -100 for tokens without loss."""
    generator = torch.Generator().manual_seed(12)
    samples = []
    for length in (65, 23, 40, 58):
        ids = torch.randint(0, VOCAB, (length,), generator=generator)
        has_loss = torch.rand(length, generator=generator) < 0.6
        samples.append({"input_ids": ids.tolist(), "labels": torch.where(has_loss, ids, -100).tolist()})
    return samples


def their_loss(model: Any, samples: list[dict[str, list[int]]]) -> Tensor:
    """transformers' loss of one padded batch; the model shifts the labels."""
    longest = max(len(sample["input_ids"]) for sample in samples)

    def padded(key: str, value: int) -> Tensor:
        return torch.tensor([sample[key] + [value] * (longest - len(sample[key])) for sample in samples])

    mask = torch.tensor([[1] * len(s["input_ids"]) + [0] * (longest - len(s["input_ids"])) for s in samples])
    return model(input_ids=padded("input_ids", 0), attention_mask=mask, labels=padded("labels", -100)).loss


def our_gradients(wrap: MegatronWrap, samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    from megatron_wrap.engine.step import gradients_of_batch
    from megatron_wrap.testing.gradients import gather_gradients

    state = wrap.state
    gradients_of_batch(state, samples)
    return gather_gradients(state)


def run_config(tmp_path: Path, arch: dict[str, Any]) -> tuple[Path, list[str]]:
    overrides = [f"megatron_lm.model.arch.{key}={value}" for key, value in arch.items()]
    return Path(__file__).parent / "model.yaml", [*overrides, f"megatron_wrap.logger.output_dir={tmp_path}"]


@pytest.mark.parametrize(
    ("family", "linear_cross_entropy"),
    [
        *(pytest.param(family, "false", id=family.name) for family in FAMILIES),
        *(pytest.param(family, "true", id=f"{family.name}-linear-cross-entropy") for family in FAMILIES[:2]),
    ],
)
def test_logits_loss_and_gradients_equal_transformers(
    family: Family, linear_cross_entropy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from megatron_wrap.model.chunks import bare_model
    from megatron_wrap.ops import token_chunks
    from megatron_wrap.testing.gradients import gather_weights

    monkeypatch.setattr(token_chunks, "chunk_bytes", lambda device: 1)
    monkeypatch.setattr(token_chunks, "MIN_CHUNK_TOKENS", 13)
    path, overrides = run_config(tmp_path, family.arch)
    with MegatronWrap(path, [*overrides, f"{LINEAR_CROSS_ENTROPY}={linear_cross_entropy}"]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        config: RunConfig = wrap.config
        state = wrap.state
        ours = bare_model(state.chunks[0])
        assert ours.defers_logits is (linear_cross_entropy == "true")
        randomize_weights(ours, config.arch.apply_layernorm_1p)
        theirs = hf.build(family.model_class, config.arch, family.mapping, **family.settings)
        hf.load_all(theirs, family.mapping(gather_weights(state), config))

        if config.arch.moe_router_enable_expert_bias:
            randomize_expert_biases(ours, theirs)
        ids = torch.randint(0, VOCAB, (2, 64), generator=torch.Generator().manual_seed(13))
        with torch.no_grad():
            actual = ours.eval()(ids, torch.arange(64).expand(2, -1), None)
            expected = theirs(ids).logits
        assert actual.shape == (2, 64, 384)  # 301 padded to a multiple of 128
        assert actual.softmax(-1)[..., VOCAB:].sum() == 0.0
        assert expected.std() > 0.5
        assert (actual[..., :VOCAB] - expected).abs().max() <= 1e-4

        ours.train()
        samples = sft_samples()
        loss = their_loss(theirs, samples)
        assert wrap.evaluate({"set": samples})["eval/set/loss"] == pytest.approx(loss.item(), abs=1e-5)

        loss.backward()
        gradients = family.mapping(our_gradients(wrap, samples), config)
        for name, parameter in theirs.named_parameters():
            difference = (gradients[name] - parameter.grad).norm()
            assert difference <= 1e-5 * parameter.grad.norm(), name

"""FLOPs where weights are frozen, against torch's FLOP counter: of transformers and peft, and of our own steps."""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.utils import flop_counter
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4MoeConfig,
    GPT2Config,
    LlamaConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
)

from megatron_wrap.bridge.adapters.trained_parameters import hugging_face_names, trained_shape
from megatron_wrap.config import load_run_config
from megatron_wrap.core import MegatronWrap
from megatron_wrap.plan.flops import forward_flops, training_flops
from megatron_wrap.plan.model_parts import model_shape

pytestmark = pytest.mark.transformers

RUN = """\
megatron_lm:
  train:
    common: {micro_batch_size: 2, global_batch_size: 4, seq_length: 16, train_iters: 6}
    learning-rate: {lr: 1e-3}
    dtype: {__select__: fp32}
megatron_wrap:
  init: {platform: cpu}
  flow: {__select__: gpt_sft}
"""
SIZES: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": False},
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
OF_V3 = {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
WIDE = {**SIZES, "head_dim": 16}
LATENT_SIZES = {**SIZES, "num_key_value_heads": 4, "head_dim": 4}
MODELS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(n_embd=32, n_inner=88, n_layer=2, n_head=4, vocab_size=128),
    "qwen2_moe": Qwen2MoeConfig(
        **{**SIZES, "num_key_value_heads": 4}, **EXPERTS, num_experts=6, shared_expert_intermediate_size=40
    ),
    "deepseek_v2": DeepseekV2Config(**LATENT_SIZES, **EXPERTS, **LATENT, **OF_V3),
    "deepseek_v2_lite": DeepseekV2Config(**LATENT_SIZES, **EXPERTS, **{**LATENT, "q_lora_rank": None}, **OF_V3),
    "glm4_moe": Glm4MoeConfig(**WIDE, **EXPERTS, **OF_V3),
    "qwen3_5_text": Qwen3_5TextConfig(**WIDE, layer_types=["full_attention"] * 3),
    "olmo2": Olmo2Config(**SIZES),
    "gemma3_text": Gemma3TextConfig(**WIDE),
    "wide": LlamaConfig(**WIDE),
    "llama": LlamaConfig(**SIZES),
    "tied": LlamaConfig(**{**SIZES, "tie_word_embeddings": True}),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4, mlp_only_layers=[1]),
    "deepseek_v3": DeepseekV3Config(**LATENT_SIZES, **EXPERTS, **LATENT, **OF_V3),
}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
BATCH, LENGTH = 2, 16
TOKENS, SQUARES = BATCH * LENGTH, BATCH * LENGTH**2


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


def overrides_of(name: str, folder: Path, adapter: dict[str, Any] | None, freeze: tuple[str, ...] = ()) -> list[str]:
    """The run of a model in `folder`, with an adapter."""
    MODELS[name].save_pretrained(folder)
    overrides = [f"megatron_wrap.model_provider.hf_path={folder}", f"megatron_lm.train.common.freeze={[*freeze]}"]
    if adapter is None:
        return overrides
    keys = (f"megatron_wrap.adapter.{key}={json.dumps(value)}" for key, value in adapter.items())
    return [*overrides, "megatron_wrap.adapter.__select__=lora", *keys]


def count(model: torch.nn.Module, batch: int = BATCH, length: int = LENGTH, backward: bool = True) -> int:
    """FLOPs that torch counts, without those of the rotary table."""
    counter = FlopCounterMode(display=False)
    with counter:
        logits = model(input_ids=torch.zeros(batch, length, dtype=torch.long)).logits
        if backward:
            logits.sum().backward()
    rotary = (counts for name, counts in counter.get_flop_counts().items() if name.endswith("rotary_emb"))
    return counter.get_total_flops() - sum(sum(counts.values()) for counts in rotary)


def eager(name: str) -> Any:
    """transformers' model; eager attention also computes the scores above the causal diagonal."""
    config = MODELS[name]
    if name != "llama":
        config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("batch", "length"), [(1, 16), (3, 7)])
def test_flops_equal_torchs_count_for_transformers_models(name: str, batch: int, length: int, run: Path) -> None:
    config, model = load_run_config(run, overrides_of(name, run.parent / "model", None)), eager(name)
    for backward, flops in ((False, forward_flops), (True, training_flops)):
        expected = flops(model_shape(config, 128), causal=False).of(batch * length, batch * length**2)
        assert count(model, batch, length, backward) == expected


@pytest.mark.parametrize(
    ("name", "adapter", "unneeded"),
    [
        ("llama", {"target_modules": "all-linear"}, 0),
        ("llama", {"target_modules": ["q_proj"], "r": 3}, 2),  # gradients of keys and values
        ("llama", {"target_modules": ["o_proj", "gate_proj"], "rank_pattern": {"o_proj": 5}}, 0),
        ("llama", {"target_modules": ["down_proj"], "layers_to_transform": [1]}, 0),
        ("llama", {"target_modules": ["down_proj"], "modules_to_save": ["embed_tokens"]}, 0),
        ("llama", {"target_modules": ["up_proj"], "modules_to_save": ["lm_head", "0.post_attention_layernorm"]}, 0),
        ("tied", {"target_modules": ["v_proj", "up_proj"]}, 3),  # gradients of scores, queries and keys
        ("qwen3_moe", {"target_modules": ATTENTION}, 0),
        ("deepseek_v3", {"target_modules": ["q_a_proj", "kv_a_proj_with_mqa", "o_proj"]}, 0),
    ],
)
def test_flops_of_an_adapter_equal_torchs_count_for_peft(
    name: str, adapter: dict[str, Any], unneeded: int, run: Path
) -> None:
    """`unneeded`: matmuls of the first layer's attention, which counts as one operation with all of its gradients."""
    config = load_run_config(run, overrides_of(name, run.parent / "model", adapter))
    model = peft.get_peft_model(eager(name), peft.LoraConfig(**adapter, task_type="CAUSAL_LM"))
    expected = training_flops(trained_shape(config, 128), causal=False).of(TOKENS, SQUARES)
    assert count(model) == pytest.approx(expected - unneeded * 2 * 32 * SQUARES, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "freeze"),
    [
        ("llama", ("model.embed_tokens.*", "*.layers.0.*", "*.layers.1.*", "lm_head.*")),
        ("llama", ("model.embed_tokens.*", "*.layers.*", "model.norm.*")),
        ("llama", ("*.mlp.*",)),
        ("llama", ("model.embed_tokens.*", "*.self_attn.*", "*norm*")),
        ("llama", ("*_proj.*", "model.embed_tokens.*", "lm_head.*", "model.layers.0.input_layernorm.*")),
        ("tied", ("*.layers.*",)),
        ("tied", ("model.embed_tokens.*",)),
        ("qwen3_moe", ("model.embed_tokens.*", "*.self_attn.*", "*norm*", "*.mlp.gate.*")),
        ("deepseek_v3", ("*.q_*", "*.mlp.*")),
    ],
)
def test_flops_of_frozen_weights_equal_torchs_count_for_transformers(
    name: str, freeze: tuple[str, ...], run: Path
) -> None:
    config = load_run_config(run, overrides_of(name, run.parent / "model", None, freeze))
    model = eager(name)
    for parameter_name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(parameter_name, pattern) for pattern in freeze))
    expected = training_flops(trained_shape(config, 128), causal=False).of(TOKENS, SQUARES)
    assert count(model) == pytest.approx(expected, rel=1e-12)


def test_some_frozen_experts_count_by_their_share(run: Path) -> None:
    freeze = ("*.experts.0.*", "*.experts.2.*", "*.experts.3.*")
    config = load_run_config(run, overrides_of("qwen3_moe", run.parent / "model", None, freeze))
    whole, part = training_flops(model_shape(config, 128)), training_flops(trained_shape(config, 128))
    chosen_experts = 2 * (2 * 3 * 32 * 24)  # of each token: two layers, two experts of three matrices
    assert whole.per_token - part.per_token == pytest.approx(2 * chosen_experts * 3 / 4)


def test_names_of_megatron_core_in_a_model_of_no_family(run: Path) -> None:
    freeze = ("decoder.layers.*.mlp", "embedding", "output_layer")
    arch = "{__select__: tiny-llama, __override__: {vocab_size: 128, add_qkv_bias: true, qk_layernorm: true}}"
    run.write_text(RUN.replace("  train:", f"  model: {{arch: {arch}}}\n  train:", 1))
    ours = load_run_config(run, [f"megatron_lm.train.common.freeze={[*freeze]}"])
    assert hugging_face_names(ours) is None
    frozen = ours.arch.hidden_size * (128 + ours.arch.num_layers * 3 * 704)
    difference = training_flops(model_shape(ours, 128)).per_token - training_flops(trained_shape(ours, 128)).per_token
    assert difference == pytest.approx(2 * frozen)  # the first layer's norm is trained, so all inputs have gradients


def addmm(*shapes: Any, **kwargs: Any) -> int:
    return flop_counter.addmm_flop(*shapes, **kwargs)


addmm._get_raw = True  # type: ignore[attr-defined]
IN_PLACE = {torch.ops.aten.addmm_: addmm}
"""torch counts addmm, and not addmm_, with which adapters add to the memory of their base's output."""
SAMPLES = [
    {"input_ids": [(3 * index + offset) % 37 for offset in range(17)], "loss_mask": [1] * 17} for index in range(4)
]
STACKED = 3 * 3 * (8 * (64 * 3 - 32 - 16 - 16) + 8 * (2 * 88 * 2 - 2 * 88))
"""Multiply-adds with zeros, of three layers' fused q, k, v and of gate and up, in three passes: one matrix has the B of
all modules."""


@pytest.mark.process_group
@pytest.mark.parametrize(
    ("adapter", "freeze", "more"),
    [
        (None, (), 0),
        ({"target_modules": "all-linear"}, (), STACKED),
        ({"target_modules": ["o_proj", "down_proj"], "modules_to_save": ["norm"]}, (), 0),
        ({"target_modules": ["down_proj"], "trainable_token_indices": {"embed_tokens": [3, 4], "lm_head": [7]}}, (), 0),
        ({"target_modules": ["o_proj"], "base_weights": "fp8"}, (), 0),
        (None, ("model.embed_tokens", "*.layers.0.*", "*.layers.1.*", "lm_head"), 0),
        (None, ("*.mlp.*",), 0),
    ],
)
def test_tflops_of_a_step_are_the_flops_of_its_matmuls(
    adapter: dict[str, Any] | None, freeze: tuple[str, ...], more: int, run: Path
) -> None:
    folder = run.parent / "model"
    overrides = overrides_of("llama", folder, adapter, freeze)
    AutoModelForCausalLM.from_config(MODELS["llama"]).save_pretrained(folder)
    with MegatronWrap(str(run), overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        counter = FlopCounterMode(display=False, custom_mapping=IN_PLACE)
        with counter:
            metrics = wrap.train(SAMPLES)
        flops = training_flops(wrap.state.shape)
    tokens, squares = 4 * 16, 4 * 16**2
    # torch has no formula for its attention kernel of CPUs
    assert counter.get_total_flops() == pytest.approx((flops.per_token + 2 * more) * tokens, rel=1e-12)
    assert metrics["tflops"] * metrics["elapsed_time"] * 1e12 == pytest.approx(flops.of(tokens, squares), rel=1e-9)


@pytest.mark.process_group
@pytest.mark.parametrize("source", ["base", "teacher"])
def test_a_reference_costs_the_forward_pass_of_its_own_model(source: str, run: Path) -> None:
    folder, larger = run.parent / "model", run.parent / "larger"
    adapter = {"target_modules": "all-linear"}
    AutoModelForCausalLM.from_config(MODELS["llama"]).save_pretrained(folder)
    if source == "base":
        run.write_text(RUN.replace("gpt_sft", "gpt_dpo") + "  models: {reference: base}\n")
        samples: list[Any] = [
            {"prompt_ids": [1, 2, 3], "chosen_ids": [5 + index] * 14, "rejected_ids": [4] * 14} for index in range(4)
        ]
    else:
        AutoModelForCausalLM.from_config(LlamaConfig(**{**SIZES, "num_hidden_layers": 5})).save_pretrained(larger)
        run.write_text(RUN.replace("gpt_sft", "gpt_distill") + f"  models: {{teacher: {{hf_path: {larger}}}}}\n")
        samples = SAMPLES
    with MegatronWrap(str(run), overrides_of("llama", folder, adapter)) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        metrics = wrap.train(samples)
        reference = wrap.state.reference
        assert reference is not None
        expected = training_flops(wrap.state.shape) + forward_flops(model_shape(reference.config, 128))
    assert reference.config.arch.num_layers == (3 if source == "base" else 5)
    sequences = 8 if source == "base" else 4
    flops = metrics["tflops"] * metrics["elapsed_time"] * 1e12
    assert flops == pytest.approx(expected.of(16 * sequences, 16**2 * sequences), rel=1e-9)

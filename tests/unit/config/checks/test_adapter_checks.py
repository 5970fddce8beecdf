"""Contradictions between `megatron_wrap.adapter` and the rest of a run, and patterns that match no module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_wrap.bridge.adapters.run_adapter import adapter_of, run_adapter
from megatron_wrap.bridge.export.export_format import export_format
from megatron_wrap.config import load_run_config
from megatron_wrap.config.checks.run import check_values
from megatron_wrap.errors import ConfigError

CONFIG = Path(__file__).parents[4] / "configs" / "tiny-llama-sft.yaml"
EXPERTS = Path(__file__).parents[4] / "configs" / "tiny-mixtral-sft.yaml"
LORA, KEYS = "megatron_wrap.adapter.__select__=lora", "megatron_wrap.adapter"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((f"{KEYS}.r=4",), "has no effect without an adapter"),
        (
            (
                LORA,
                f"{KEYS}.path=adapter",
                "megatron_lm.train.common.load=run",
                "megatron_lm.train.common.finetune=true",
            ),
            "adapter.path 'adapter' and train.common.load 'run' both name weights to start from",
        ),
        (("megatron_wrap.models.reference=base",), "base is the policy without its adapter"),
        ((LORA, "megatron_wrap.models.reference=copy"), "write base"),
        (
            (
                LORA,
                "megatron_lm.train.dtype.__select__=bf16",
                "megatron_lm.train.dtype.fp8=hybrid",
                "megatron_lm.train.dtype.fp8_param_gather=true",
                "megatron_lm.model.arch.ffn_hidden_size=768",
            ),
            "write fp8_param_gather: false",
        ),
        ((LORA, f"{KEYS}.layers_to_transform=[0]"), "needs a list of target_modules"),
        ((LORA, f"{KEYS}.layers_to_transform=[9]", f"{KEYS}.target_modules=[q_proj]"), "there is no layer 9 of 4"),
        ((LORA, f"{KEYS}.layers_pattern=layers"), "layers_pattern: not supported.* delete this key"),
        (
            (LORA, f"{KEYS}.init_lora_weights=olora"),
            "init_lora_weights: must be .*gaussian, pissa, not the string 'olora'",
        ),
        ((LORA, f"{KEYS}.rank_pattern={{q_proj: 1.5}}"), "q_proj must be a positive integer, not 1.5"),
        ((LORA, f"{KEYS}.target_modules='q_(proj'"), r"q_\(proj is not a regular expression"),
        ((LORA, f"{KEYS}.alpha_pattern={{'*x': 2}}"), r"\*x is not a regular expression"),
        ((LORA, f"{KEYS}.r=0"), "must be at least 1"),
        ((LORA, f"{KEYS}.use_dora=true", f"{KEYS}.lora_dropout=0.1"), "DoRA scales the base's output"),
        ((LORA, f"{KEYS}.init_lora_weights=pissa", f"{KEYS}.base_weights=fp8"), "needs the weights' own values"),
        ((LORA, f"{KEYS}.init_lora_weights=pissa", f"{KEYS}.use_dora=true"), "conversion .* loses DoRA's norms"),
        ((LORA, f"{KEYS}.use_dora=true", f"{KEYS}.base_weights=fp8"), "needs the weights' own values"),
        (
            (LORA, f"{KEYS}.base_weights=nf4", "megatron_lm.train.common.save=x"),
            "run needs; set hf_path",
        ),
        ((LORA, f"{KEYS}.base_weights=fp8", f"{KEYS}.keep_base=true"), "checkpoints cannot contain weights"),
    ],
)
def test_a_contradiction_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        check_values(load_run_config(CONFIG, overrides))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("target_modules=[q_prj]", "q_prj matches no linear layer of the model; did you mean q_proj"),
        ("target_modules=q_proj", "target_modules: q_proj matches no linear layer"),  # a whole name, as in peft
        ("target_modules=[lm_head]", "no adapters: output layer"),
        ("exclude_modules=[k_prj]", "exclude_modules: k_prj"),
        ("rank_pattern={gate: 3}", "rank_pattern: gate matches"),
        ("exclude_modules=.*", "no linear layer remains"),
        ("modules_to_save=[embed_token]", "embed_token matches no module of the model; did you mean embed_tokens"),
        ("modules_to_save=[q_proj]", "q_proj matches model.layers.0.self_attn.q_proj; only embeddings"),
        ("modules_to_save=[mlp]", "mlp matches model.layers.0.mlp; only embeddings"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(override, message):
    config = load_run_config(CONFIG, (LORA, f"{KEYS}.{override}"))
    model = export_format(config, 4096)
    with pytest.raises(ConfigError, match=message):
        adapter_of(model, config.adapter)


def test_a_rank_above_the_size_of_a_decomposed_weight_is_refused():
    large = (f"{KEYS}.init_lora_weights=pissa", f"{KEYS}.rank_pattern={{v_proj: 4096}}")
    with pytest.raises(ConfigError, match=r"pissa has at most \d+ vectors of model.layers.0.self_attn.v_proj"):
        _adapted(load_run_config(CONFIG, (LORA, *large)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("init_lora_weights=pissa",), "not those of fused experts, as in peft"),
        (("lora_dropout=0.1",), "cannot drop an adapter's inputs, as in peft; write 0.0"),
        (
            ("target_parameters=[experts.gate_proj]",),
            "gate_proj matches no weight of the model; did you mean mlp.experts.gate_up_proj",
        ),
        (("rank_pattern={gate_up_projs: 3}",), "rank_pattern: gate_up_projs matches"),
    ],
)
def test_adapters_of_experts_that_cannot_be_are_refused(overrides, message):
    keys = ("target_parameters=[mlp.experts.gate_up_proj]", *overrides)
    with pytest.raises(ConfigError, match=message):
        _adapted(load_run_config(EXPERTS, (LORA, *(f"{KEYS}.{key}" for key in keys))))


@pytest.mark.parametrize(
    ("path", "override", "message"),
    [
        (EXPERTS, "megatron_lm.model.arch.experts_impl=sequential", "set experts_impl to grouped_mm"),
        (CONFIG, f"{KEYS}.r=8", "gate_up_proj matches no weight of the model; possible are mlp.down_proj.weight"),
    ],
)
def test_adapters_of_experts_need_grouped_ones(path, override, message):
    config = load_run_config(path, (LORA, f"{KEYS}.target_parameters=[mlp.experts.gate_up_proj]", override))
    with pytest.raises(ConfigError, match=message):
        _adapted(config)


def _adapted(config):
    check_values(config)
    adapter = run_adapter(config, 4096)
    assert adapter is not None
    return adapter.layers


@pytest.mark.parametrize("name", ["embed_tokens", "lm_head"])
def test_a_copy_of_one_of_two_tied_modules_is_refused(name):
    tied = "megatron_lm.model.arch.untie_embeddings_and_output_weights=false"
    config = load_run_config(CONFIG, (LORA, tied, f"{KEYS}.modules_to_save=[{name}]"))
    model = export_format(config, 4096)
    with pytest.raises(ConfigError, match=f"{name} is the embedding and the output layer, whose weights are tied"):
        adapter_of(model, config.adapter)


@pytest.mark.parametrize(("bias", "targets"), [("all", ["q_proj", "down_proj"]), ("lora_only", "all-linear")])
def test_peft_s_rules_choose_the_biases(bias, targets):
    """The names in peft's file; lora_only with a part of the fused projections is refused."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    options = {"target_modules": targets, "bias": bias}
    biases = ("megatron_lm.model.arch.add_qkv_bias=true", *(f"{KEYS}.{k}={json.dumps(v)}" for k, v in options.items()))
    config = load_run_config(CONFIG, (LORA, *biases))
    base = export_format(config, 64)
    ours = {name for mapping in adapter_of(base, config.adapter).saved.values() for name in mapping.shapes()}

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**small, **heads))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=8, **options))
    assert ours == {name for name in peft.get_peft_model_state_dict(adapted) if ".lora_" not in name}
    part = load_run_config(CONFIG, (LORA, *biases, f"{KEYS}.target_modules=[q_proj]", f"{KEYS}.bias=lora_only"))
    with pytest.raises(ConfigError, match="one tensor here; adapt k_proj, v_proj as well"):
        adapter_of(base, part.adapter)


def test_peft_s_rules_choose_the_modules():
    """The names of peft's own model with the same options."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    options = {
        "target_modules": ["q_proj", "mlp.up_proj", "down_proj"],
        "exclude_modules": ["layers.2.mlp.up_proj"],
        "layers_to_transform": [1, 2],
        "rank_pattern": {"q_proj": 3, r"layers\.2\.mlp\.down_proj": 5},
        "alpha_pattern": {"down_proj": 32},
        "modules_to_save": ["lm_head", "norm", "3.post_attention_layernorm"],
    }
    overrides = [f"{KEYS}.{key}={json.dumps(value)}" for key, value in options.items()]
    config = load_run_config(CONFIG, (LORA, *overrides))
    adapter = adapter_of(export_format(config, 64), config.adapter)
    ours = {module.name: (module.rank, module.scale) for layer in adapter.layers for module in layer.modules}

    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 4, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, **heads))
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=8, **options))
    theirs = {
        name.removeprefix("base_model.model."): (module.r["default"], module.scaling["default"])
        for name, module in adapted.named_modules()
        if isinstance(module, peft.tuners.lora.Linear)
    }
    assert ours == theirs
    trained_whole = adapter.saved.values()
    assert {name for mapping in trained_whole for name in mapping.shapes()} == {
        name.replace(".modules_to_save.default", "")
        for name, parameter in adapted.named_parameters()
        if parameter.requires_grad and ".lora_" not in name
    }


pytestmark = pytest.mark.transformers

"""Every shipped architecture, translated to transformers' configuration and back: it has the published number of
parameters."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.bridge.export.export_format import export_format, obstacle, with_derived_sizes
from megatron_wrap.config import RunConfig, load_run_config
from megatron_wrap.config.config_json import check_types
from megatron_wrap.config.reading.tree import shipped_root
from megatron_wrap.errors import UnsupportedModel

pytestmark = pytest.mark.transformers

RUN = """\
megatron_lm:
  model: {arch: {__select__: NAME}}
  train:
    common: {micro_batch_size: 2, global_batch_size: 8, seq_length: 32, train_iters: 10}
    learning-rate: {lr: 2e-4}
megatron_wrap:
  flow: {__select__: minimal_mock}
"""
PUBLISHED: dict[str, tuple[str, int]] = {
    "gpt2-124m": ("gpt2", 124_439_808),
    "gpt2-355m": ("gpt2", 354_823_168),
    "gpt2-774m": ("gpt2", 774_030_080),
    "gpt2-1.5b": ("gpt2", 1_557_611_200),
    "llama2-7b": ("llama", 6_738_415_616),
    "llama2-13b": ("llama", 13_015_864_320),
    "llama2-70b": ("llama", 68_976_648_192),
    "llama3-8b": ("llama", 8_030_261_248),
    "llama3-70b": ("llama", 70_553_706_496),
    "llama3.1-8b": ("llama", 8_030_261_248),
    "llama3.1-70b": ("llama", 70_553_706_496),
    "llama3.1-405b": ("llama", 405_853_388_800),
    "llama3.2-1b": ("llama", 1_235_814_400),
    "llama3.2-3b": ("llama", 3_212_749_824),
    "mistral-7b-v0.1": ("mistral", 7_241_732_096),
    "mistral-7b-v0.3": ("mistral", 7_248_023_552),
    "qwen2.5-0.5b": ("qwen2", 494_032_768),
    "qwen2.5-1.5b": ("qwen2", 1_543_714_304),
    "qwen2.5-3b": ("qwen2", 3_085_938_688),
    "qwen2.5-7b": ("qwen2", 7_615_616_512),
    "qwen2.5-14b": ("qwen2", 14_770_033_664),
    "qwen2.5-32b": ("qwen2", 32_763_876_352),
    "qwen2.5-72b": ("qwen2", 72_706_203_648),
    "qwen3-0.6b": ("qwen3", 596_049_920),
    "qwen3-1.7b": ("qwen3", 1_720_574_976),
    "qwen3-4b": ("qwen3", 4_022_468_096),
    "qwen3-8b": ("qwen3", 8_190_735_360),
    "qwen3-14b": ("qwen3", 14_768_307_200),
    "qwen3-32b": ("qwen3", 32_762_123_264),
    "qwen3-30b-a3b": ("qwen3_moe", 30_532_122_624),
    "qwen3-235b-a22b": ("qwen3_moe", 235_093_634_560),
    "qwen3-next-80b-a3b": ("qwen3_next", 79_674_391_296),
    "qwen3.5-0.8b": ("qwen3_5_text", 752_393_024),
    "qwen3.5-2b": ("qwen3_5_text", 1_881_825_088),
    "qwen3.5-4b": ("qwen3_5_text", 4_205_751_296),
    "qwen3.5-9b": ("qwen3_5_text", 8_953_803_264),
    "qwen3.5-27b": ("qwen3_5_text", 26_895_998_464),
    "qwen3.5-35b-a3b": ("qwen3_5_moe_text", 34_660_610_688),
    "qwen3.5-122b-a10b": ("qwen3_5_moe_text", 122_111_526_912),
    "qwen3.5-397b-a17b": ("qwen3_5_moe_text", 396_346_350_336),
    "smollm3-3b": ("smollm3", 3_075_098_624),
    "seed-oss-36b": ("seed_oss", 36_151_104_512),
    "glm-4.5-air": ("glm4_moe", 106_852_245_504),
    "glm-4.5": ("glm4_moe", 352_797_814_784),
    "glm-4.6": ("glm4_moe", 352_797_814_784),
    "glm-4.7-flash": ("glm4_moe_lite", 29_943_390_976),
    "moonlight-16b-a3b": ("deepseek_v3", 15_960_108_544),
    "kimi-k2": ("kimi_k2", 1_026_408_209_408),
    "gpt-oss-20b": ("gpt_oss", 20_914_757_184),
    "gpt-oss-120b": ("gpt_oss", 116_829_156_672),
    "phi-4-mini": ("phi3", 3_836_021_760),
    "ministral-8b-2410": ("ministral", 8_019_808_256),
    "ministral-3-3b": ("ministral3", 3_429_006_336),
    "ministral-3-8b": ("ministral3", 8_489_553_920),
    "ministral-3-14b": ("ministral3", 13_506_073_600),
    "mistral-small-4": ("mistral4", 118_972_826_624),
    "olmo-2-1b": ("olmo2", 1_484_916_736),
    "olmo-2-7b": ("olmo2", 7_298_617_344),
    "olmo-2-13b": ("olmo2", 13_716_198_400),
    "olmo-2-32b": ("olmo2", 32_234_279_936),
    "olmo-3-7b": ("olmo3", 7_298_011_136),
    "olmo-3-32b": ("olmo3", 32_233_522_176),
    "gemma-2b": ("gemma", 2_506_172_416),
    "gemma-7b": ("gemma", 8_537_680_896),
    "gemma-2-2b": ("gemma2", 2_614_341_888),
    "gemma-2-9b": ("gemma2", 9_241_705_984),
    "gemma-2-27b": ("gemma2", 27_227_128_320),
    "gemma-3-270m": ("gemma3_text", 268_098_176),
    "gemma-3-1b": ("gemma3_text", 999_885_952),
    "gemma-3-4b": ("gemma3_text", 3_880_263_168),
    "gemma-3-12b": ("gemma3_text", 11_766_034_176),
    "gemma-3-27b": ("gemma3_text", 27_009_346_304),
    "minimax-m2": ("minimax_m2", 228_689_748_992),
    "mixtral-8x7b": ("mixtral", 46_702_792_704),
    "deepseek-v2-lite": ("deepseek_v2", 15_706_484_224),
    "deepseek-v3": ("deepseek_v3", 671_026_404_352),
}
"""Architecture -> model_type, and the parameters that the hub's page of the model counts in its safetensors, without
those of layers for multi-token prediction; of Qwen3.5 those of the language model, which llama.cpp counts (0.752, 1.88,
4.21, 8.95, 26.90, 34.66, 122.11 and 396.35 billion)."""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """run(architecture, *overrides) -> its configuration."""
    monkeypatch.chdir(tmp_path)

    def read(name: str, *overrides: str) -> RunConfig:
        (tmp_path / "run.yaml").write_text(RUN.replace("NAME", name))
        return load_run_config("run.yaml", overrides)

    return read


def test_every_shipped_architecture_has_a_published_size():
    files = {path.stem for path in (shipped_root() / "megatron_lm" / "model" / "arch").glob("*.yaml")}
    others = {name for name in files if name.endswith("-base")} | set(TINY) | {"hugging-face"}
    others |= {
        name for name in files if name.startswith("gpt3-")
    }  # tests/unit/config/test_pretraining_runs.py has them
    assert files - others == set(PUBLISHED)


TINY = {
    **{"tiny-gpt2": "gpt2", "tiny-llama": "llama", "tiny-mixtral": "mixtral", "tiny-deepseek-v3": "deepseek_v3"},
    **{"tiny-smollm3": "smollm3", "tiny-seed-oss": "seed_oss", "tiny-glm4-moe": "glm4_moe", "tiny-gpt-oss": "gpt_oss"},
    **{"tiny-glm-4.7-flash": "glm4_moe_lite", "tiny-phi-4-mini": "phi3", "tiny-ministral": "ministral"},
    **{"tiny-ministral-3": "ministral3", "tiny-mistral-small-4": "mistral4", "tiny-olmo3": "olmo3"},
    **{"tiny-minimax-m2": "minimax_m2", "tiny-gemma2": "gemma2", "tiny-gemma3": "gemma3_text"},
    **{"tiny-qwen3-next": "qwen3_next", "tiny-qwen3.5": "qwen3_5_text"},
}
"""Architecture -> model_type."""


@pytest.mark.parametrize("name", TINY)
def test_a_tiny_architecture_is_of_its_family(name, run):
    import torch
    import transformers

    exported = export_format(run(name, "megatron_lm.model.arch.vocab_size=640"), model_type=TINY[name])
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(**exported.config_json("float32"))
        model = getattr(transformers, exported.family.architecture)(config)
    assert 1e6 < model.num_parameters() < 2e7


SMALLEST = {family: name for name, (family, _) in sorted(PUBLISHED.items(), key=lambda item: -item[1][1])}
"""Of each family; the others differ from it in sizes."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SMALLEST.values() else pytest.mark.matrix) for name in PUBLISHED]
)
def test_an_architecture_has_the_published_size_and_survives_the_round_trip(name, run):
    import torch
    import transformers

    model_type, parameters = PUBLISHED[name]
    config = run(name)
    exported = export_format(config, model_type=model_type)
    arch, family = exported.arch, exported.family
    values = exported.config_json("bfloat16")
    assert values["architectures"] == [family.architecture]
    theirs = transformers.AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = getattr(transformers, family.architecture)(theirs)
    assert model.num_parameters() == parameters

    # the same tensors, with the names and shapes of the table; experts are compared by their total size, because
    # transformers fuses them when it reads a file
    tied = not config.arch.untie_embeddings_and_output_weights
    state = {key: tensor for key, tensor in model.state_dict().items() if not (tied and key == "lm_head.weight")}
    shapes = family.shapes(arch)
    assert _outside_experts(shapes) == _outside_experts({key: tuple(tensor.shape) for key, tensor in state.items()})
    assert sum(map(math.prod, shapes.values())) == sum(tensor.numel() for tensor in state.values())

    # the configuration that transformers writes translates back to the same architecture
    back = family.arch_values(theirs.to_dict())
    ours = {**vars(arch), **config.arch.upstream}
    assert {key: ours.get(key) for key in back} == {key: _as_decoded(value) for key, value in back.items()}


GPT_OSS_20B: dict[str, Any] = {
    **{"model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088},
    **{"num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "initial_context_length": 4096},
    **{"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12, "swiglu_limit": 7.0},
    **{"attention_bias": True, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02},
    **{"max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000, "tie_word_embeddings": False},
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
        "original_max_position_embeddings": 4096,
    },
}
_LINEAR: dict[str, Any] = {
    **{"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 16, "full_attention_interval": 4, "head_dim": 256, "max_position_embeddings": 262144},
    **{"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02},
    **{"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "partial_rotary_factor": 0.25},
}
QWEN3_NEXT_80B: dict[str, Any] = {
    **{**_LINEAR, "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120, "num_hidden_layers": 48},
    **{"num_attention_heads": 16, "num_key_value_heads": 2, "linear_num_value_heads": 32, "vocab_size": 151936},
    **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512, "norm_topk_prob": True},
    **{"shared_expert_intermediate_size": 512, "decoder_sparse_step": 1, "mlp_only_layers": [], "rope_scaling": None},
    **{"rope_theta": 10000000, "router_aux_loss_coef": 0.001, "output_router_logits": False},
}
QWEN3_5_27B: dict[str, Any] = {
    **{**_LINEAR, "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408},
    **{"num_hidden_layers": 64, "num_attention_heads": 24, "num_key_value_heads": 4, "linear_num_value_heads": 48},
    **{"vocab_size": 248320, "attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1},
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 16,
    "rope_parameters": {
        **{"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default"},
        **{"rope_theta": 10000000, "partial_rotary_factor": 0.25},
    },
}
GEMMA_3_4B: dict[str, Any] = {
    **{"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
    **{"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024},
}
"""`text_config`; all other sizes are transformers' defaults."""
PUBLISHED_CONFIGS = {
    **{"gpt-oss-20b": GPT_OSS_20B, "qwen3-next-80b-a3b": QWEN3_NEXT_80B, "qwen3.5-27b": QWEN3_5_27B},
    "gemma-3-4b": GEMMA_3_4B,
}
"""Of the published config.json, what describes the architecture."""


@pytest.mark.parametrize("name", PUBLISHED_CONFIGS)
def test_the_shipped_architecture_is_that_of_the_published_config_json(name, run):
    exported, published = export_format(run(name)), PUBLISHED_CONFIGS[name]
    assert exported.family.model_type == published["model_type"]
    check_types(published)
    ours = {**vars(exported.arch), **exported.arch.upstream}
    read = exported.family.arch_values(published)
    assert {key: ours.get(key) for key in read} == {key: _as_decoded(value) for key, value in read.items()}


def test_a_grown_vocabulary_is_written_where_config_json_left_it_to_the_default(run, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": GEMMA_3_4B}))
    config = run("hugging-face", f"megatron_wrap.model_provider.hf_path={folder}")
    assert "vocab_size" not in export_format(config).config_json("bfloat16")
    assert export_format(config, 262_272).config_json("bfloat16")["vocab_size"] == 262_272


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-gpt2", "qwen2.5-0.5b", "qwen3-0.6b", "mistral-7b-v0.1"])
def test_the_family_is_found_from_the_architecture(name, run):
    model_type = export_format(run(name), 4096 if name.startswith("tiny") else None).family.model_type
    assert model_type == {"tiny-llama": "llama", "tiny-gpt2": "gpt2"}.get(name, PUBLISHED.get(name, ("",))[0])


def test_the_error_names_the_key_that_a_family_cannot_express(run):
    with pytest.raises(UnsupportedModel, match=r"llama: qk_layernorm .*False .*True"):
        export_format(run("qwen3-0.6b"), model_type="llama")
    with_layer_norm = run("tiny-llama", "megatron_lm.model.arch.normalization=LayerNorm")
    expected = r"llama \(normalization .*RMSNorm .*LayerNorm"
    with pytest.raises(UnsupportedModel, match=expected):
        export_format(with_layer_norm, 4096)
    scaled = run("tiny-llama", "megatron_lm.model.arch.softmax_scale=0.5")
    llama = export_format(run("tiny-llama"), 4096).family
    difference = obstacle(llama, with_derived_sizes(scaled.arch, scaled.train.seq_length, 4096))
    assert difference is not None
    assert "softmax_scale" in difference
    assert "0.5" in difference
    export_format(run("tiny-llama", "megatron_lm.model.arch.cross_entropy_loss_fusion=true"), 4096)


def _outside_experts(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {k.replace("block_sparse_moe", "mlp"): shape for k, shape in shapes.items() if ".experts." not in k}


def _as_decoded(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value

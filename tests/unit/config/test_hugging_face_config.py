"""`model_provider.hf_path`: config.json gives the architecture, and the YAML may not contradict it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.config import RunConfig, load_run_config
from megatron_wrap.config.hugging_face import CONFIG_FILES, FAMILIES, HF_PATH, NotDownloaded, spelled_out
from megatron_wrap.errors import ConfigError

RUN = """\
megatron_lm:
  train:
    common: {micro_batch_size: 2, global_batch_size: 8, seq_length: 128, train_iters: 10}
    learning-rate: {lr: 2e-4}
megatron_wrap:
  model_provider:
    __override__: {hf_path: model}
  flow: {__select__: gpt_sft}
"""
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 301,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000.0,
}
WITH_ARCH = "megatron_lm:\n  model:\n    arch: {__select__: %s, __override__: {%s}}\n"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., RunConfig]:
    """run(*overrides, arch=(selected, keys), **changes of config.json) -> the run's configuration."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()

    def read(*overrides: str, arch: tuple[str, str] | None = None, **changes: Any) -> RunConfig:
        values = {key: value for key, value in {**CONFIG, **changes}.items() if value != "absent"}
        (tmp_path / "model" / "config.json").write_text(json.dumps(values))
        text = RUN if arch is None else RUN.replace("megatron_lm:\n", WITH_ARCH % arch)
        (tmp_path / "run.yaml").write_text(text)
        return load_run_config("run.yaml", overrides)

    return read


def refusal(read: Callable[..., RunConfig], *arguments: Any, **named: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        read(*arguments, **named)
    return str(raised.value)


def test_the_architecture_is_that_of_config_json(run):
    config = run()
    arch = config.arch
    assert (arch.num_layers, arch.hidden_size, arch.ffn_hidden_size, arch.vocab_size) == (3, 64, 96, 301)
    assert (arch.num_attention_heads, arch.num_query_groups, arch.kv_channels) == (8, 2, 8)
    assert (arch.norm_epsilon, arch.rotary_base, arch.max_position_embeddings) == (1e-6, 5000.0, 512)
    assert arch.untie_embeddings_and_output_weights
    assert (arch.hidden_dropout, arch.attention_dropout) == (0.0, 0.0)
    assert str(config.origins["megatron_lm.model.arch.num_layers"]) == "model/config.json (hf_path)"
    assert config.resolved["megatron_lm"]["model"]["arch"]["num_layers"] == 3
    assert config.data.tokenizer is None


def test_a_tokenizer_beside_it_is_the_default(run, tmp_path):
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    assert run().data.tokenizer == "model"
    assert run("megatron_wrap.data.tokenizer=other").data.tokenizer == "other"


def test_transformers_5_says_rope_in_another_key(run):
    rope = {"rope_type": "llama3", "rope_theta": 7.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 8192
    arch = run(rope_theta="absent", rope_parameters=rope).arch
    assert (arch.rotary_base, arch.use_rope_scaling, arch.rope_scaling_factor) == (7.0, True, 32.0)
    before = run(rope_scaling={key: value for key, value in rope.items() if key != "rope_theta"}).arch
    assert (before.rotary_base, before.use_rope_scaling, before.rope_scaling_factor) == (5000.0, True, 32.0)


@pytest.mark.parametrize(
    ("overrides", "arch", "location"),
    [
        (["megatron_lm.model.arch.num_layers=4"], None, "command line megatron_lm.model.arch.num_layers: "),
        ([], ("tiny-llama", "rotary_base: 5000.0"), None),
        ([], ("hugging-face", "num_layers: 4"), "run.yaml:3 megatron_lm.model.arch.num_layers: "),
    ],
)
def test_a_contradiction_is_refused_with_both_values(run, overrides, arch, location):
    message = refusal(run, *overrides, arch=arch)
    assert "the integer 4 contradicts the integer 3 of model/config.json" in message
    assert location is None or message.startswith(location)


def test_what_agrees_and_what_is_only_training_may_be_said(run):
    keys = "num_layers: 3, attention_dropout: 0.1, transformer_impl: torch, max_position_embeddings: 1024"
    arch = run(arch=("hugging-face", keys)).arch
    assert (arch.num_layers, arch.attention_dropout, arch.max_position_embeddings) == (3, 0.1, 1024)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, "unknown model_type 'lama'; did you mean llama?"),
        ({"model_type": "os:system"}, "unknown model_type 'os:system'. Known: "),
        ({"model_type": "absent"}, "has no model_type"),
        ({"hidden_size": "absent"}, "this llama cannot be built: hidden_size is missing"),
        ({"hidden_act": "gelu"}, "this llama cannot be built: hidden_act is 'gelu', and only 'silu' can be built"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}}, "factor of YaRN is 1.5"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 8.0, "low_freq_factor": 2.0}},
            "rope low_freq_factor is 2.0, and Megatron-Core fixes it at 1.0",
        ),
        ({"attention_bias": True}, "attention_bias is True and mlp_bias is False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config has no quant_method"),
    ],
)
def test_what_cannot_be_built_is_refused(run, changes, message):
    result = refusal(run, **changes)
    assert result.startswith(f"run.yaml:7 {HF_PATH}: model/config.json: ")
    assert message in result


@pytest.mark.parametrize("model_type", ["deepseek_v4", "glm5_next", "qwen4_exp", "mistral_large4"])
def test_a_family_that_cannot_be_built_exactly_is_refused_with_the_reason(run, model_type):
    message = refusal(run, model_type=model_type)
    assert f"model/config.json: model_type {model_type} cannot be built exactly: " in message


def test_the_architecture_can_be_spelled_out(run, tmp_path):
    config = run()
    (tmp_path / "model" / "config.json").unlink()
    assert load_run_config("run.yaml", spelled_out(config)).arch == config.arch


def test_files_that_are_not_there(run, tmp_path):
    run()
    assert "no Hugging Face folder './mode'" in refusal(run, f"{HF_PATH}=./mode")
    (tmp_path / "empty").mkdir()
    assert "empty/config.json: no such file" in refusal(run, f"{HF_PATH}=empty")
    (tmp_path / "empty" / "config.json").write_text("{")
    assert "empty/config.json: not JSON" in refusal(run, f"{HF_PATH}=empty")


def test_without_a_folder_an_architecture_has_to_be_selected(run):
    assert "megatron_lm.model.arch: nothing is selected; write arch:" in refusal(run, f"{HF_PATH}=null")


def cached(folder: Path, model: Path) -> None:
    """Put a model's configuration into a hub cache, as huggingface_hub lays it out."""
    repository = folder / "models--org--name"
    snapshot = repository / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(model, snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(snapshot.name)


def test_a_hub_id_is_read_from_the_local_cache_and_no_connection_is_opened(run, tmp_path, monkeypatch):
    import socket

    import huggingface_hub.constants

    def refuse_connection(*arguments: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(socket.socket, "connect", refuse_connection)
    with pytest.raises(NotDownloaded, match=r"'org/name'.* `hf download org/name`"):
        run(f"{HF_PATH}=org/name")
    run()  # makes the folder
    cached(tmp_path / "cache", tmp_path / "model")
    assert run(f"{HF_PATH}=org/name").arch.num_layers == 3


def test_a_hub_id_is_downloaded_in_a_step_of_its_own_without_its_weights(run, tmp_path, monkeypatch):
    import huggingface_hub.constants

    from megatron_wrap.bridge.loading.hub import local_folder, logger, read_run
    from megatron_wrap.bridge.loading.weight_folder import WEIGHT_FILES

    asked: list[list[str]] = []
    lines: list[str] = []
    original = huggingface_hub.snapshot_download

    def snapshot(repo_id: str, allow_patterns: list[str] | None = None, **options: Any) -> str:
        if options.get("local_files_only"):
            return original(repo_id, **options)
        asked.append(list(allow_patterns or ()))
        if len(asked) == 1:
            cached(tmp_path / "cache", tmp_path / "model")
        return str(tmp_path / "cache")

    run()  # makes the folder
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(logger, "info_rank_0", lines.append)
    assert read_run("run.yaml", [f"{HF_PATH}=org/name"]).arch.num_layers == 3
    assert len(asked) == len(lines) == 1
    assert "org/name" in lines[0]
    assert not any("safetensors" in pattern or "bin" in pattern for pattern in asked[0])
    # the cache now has the configuration; what else a caller needs is still fetched
    assert local_folder("org/name", CONFIG_FILES + WEIGHT_FILES) == tmp_path / "cache"
    assert asked[1:] == [[*CONFIG_FILES, *WEIGHT_FILES]]
    assert local_folder("model", WEIGHT_FILES) == Path("model")
    assert len(asked) == 2


def test_reading_it_and_megatron_core_s_fields_needs_no_torch(run, tmp_path):
    run()
    program = (
        "import sys; from megatron_wrap.config import load_run_config; load_run_config('run.yaml', "
        "['megatron_lm.model.arch.qk_l2_norm=true']); "
        "print({'torch', 'megatron', 'numpy', 'transformers'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert result.stdout.strip() == "set()"


def test_a_family_from_outside(run):
    import dataclasses

    from megatron_wrap.bridge import register_bridge
    from megatron_wrap.bridge.families.llama import FAMILY

    mine = register_bridge(dataclasses.replace(FAMILY, model_type="my_llama"))
    try:
        assert run(model_type="my_llama").arch == run().arch
        with pytest.raises(ConfigError, match="'my_llama' is already registered"):
            register_bridge(dataclasses.replace(mine))
    finally:
        FAMILIES._targets.pop("my_llama")

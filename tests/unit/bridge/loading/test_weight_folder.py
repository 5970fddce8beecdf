"""Incomplete or damaged Hugging Face folders: each is one clear error, before tensors are read or processes start."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from megatron_wrap.bridge.adapters.peft_folder import read_adapter_config
from megatron_wrap.bridge.export.export_format import export_format
from megatron_wrap.bridge.loading.hf_path import check_hugging_face, folder_arch, starting_weights
from megatron_wrap.bridge.loading.weight_folder import INDEX, SINGLE, file_tensors, folder_digest
from megatron_wrap.config import load_run_config
from megatron_wrap.config.hugging_face import HF_PATH
from megatron_wrap.errors import CheckpointError, ConfigError, UnsupportedModel

pytestmark = pytest.mark.transformers

RUN = """\
megatron_lm:
  train:
    common: {micro_batch_size: 2, global_batch_size: 8, seq_length: 32, train_iters: 10}
    learning-rate: {lr: 2e-4}
megatron_wrap:
  flow: {__select__: minimal_mock}
"""
IDS = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))


def llama(**settings: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "vocab_size": 37, "num_key_value_heads": 2, **IDS, **settings}))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sharded Llama of two layers; the working directory contains run.yaml."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    llama().save_pretrained(tmp_path / "model", max_shard_size="6KB")
    return tmp_path / "model"


def checked_weights(folder: Path, *overrides: str) -> Any:
    config = load_run_config("run.yaml", [f"{HF_PATH}={folder}", *overrides])
    check_hugging_face(config)
    weights = starting_weights(config)
    assert weights is not None
    return weights


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as raised:
        checked_weights(folder)
    assert str(raised.value).startswith(f"{HF_PATH}: ") or str(folder) in str(raised.value)
    return str(raised.value)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Rewrite the folder as one file with other tensors."""
    tensors = {name: tensor for shard in shards(folder) for name, tensor in load_file(shard).items()}
    edit(tensors)
    for shard in shards(folder):
        shard.unlink()
    (folder / INDEX).unlink(missing_ok=True)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def test_sharded_and_single_files_have_the_same_tensors(folder):
    assert len(shards(folder)) > 2
    sharded = checked_weights(folder)
    expected = {
        name: sharded.read(name, tuple((0, n) for n in at.shape)).clone() for name, at in sharded.tensors.items()
    }
    change(folder, lambda tensors: None)
    single = checked_weights(folder)
    assert single.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(single.read(name, tuple((0, n) for n in tensor.shape)), tensor)
        first, *rest = tensor.shape
        part = single.read(name, ((first // 2, first), *((1, n) for n in rest)))
        assert torch.equal(part, tensor[(slice(first // 2, None), *(slice(1, None) for _ in rest))])


def test_a_shard_that_is_missing(folder):
    shards(folder)[1].unlink()
    message = refusal(folder)
    assert "model-00002-of-" in message
    assert "missing" in message
    assert "download" in message


@pytest.mark.parametrize("cut", [100, 1])
def test_a_truncated_shard(folder, cut):
    file = shards(folder)[0]
    file.write_bytes(file.read_bytes()[:-cut])
    assert f"{file.name}: is truncated or not a safetensors file: {file.stat().st_size} bytes" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"abc", b"\xff" * 64, b"\x10" + b"\0" * 7 + b"not json, really" + b"\0" * 64])
def test_a_corrupt_shard(folder, content):
    file = shards(folder)[0]
    file.write_bytes(content)
    assert f"{file.name}: is truncated or not a safetensors file" in refusal(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_weight_that_is_not_finite_is_refused_by_name(folder, value, dtype):
    name = "model.layers.1.mlp.down_proj.weight"

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype)
        tensors[name][3, 5] = value

    change(folder, damage)
    weights = checked_weights(folder)
    assert weights.read(name, ((0, 3), (0, 24))).isfinite().all()
    with pytest.raises(CheckpointError, match=rf"{SINGLE}: {name} contains NaN or infinity"):
        weights.read(name, ((0, 16), (0, 24)))


@pytest.mark.parametrize("pickled", [False, True])
def test_a_pipe_instead_of_weights(folder, pickled):
    for shard in shards(folder):
        shard.unlink()
    (folder / INDEX).unlink()
    os.mkfifo(folder / ("pytorch_model.bin" if pickled else SINGLE))
    with pytest.raises(CheckpointError, match="is a pipe"):
        checked_weights(folder, *(["megatron_wrap.model_provider.hf_allow_pickle=true"] if pickled else []))


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1, "b": "x"}}', "[" * 10**5]
)
def test_an_invalid_index(folder, content):
    (folder / INDEX).write_text(content)
    assert re.search(rf"{INDEX}: (is not an index|not JSON \(nested too deeply)", refusal(folder))


@pytest.mark.parametrize("name", ["", ".", "a\0b", "\ud800", "x" * 5000, "itself"])
def test_an_index_that_names_no_file(folder, name):
    (folder / "itself").symlink_to("itself")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    assert any(part in refusal(folder) for part in (INDEX, "names", "missing"))


def test_a_model_of_more_layers_than_tensors(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10_000}))
    assert "21 tensors, and the model has 10000 layers" in refusal(folder)


def test_the_digest_of_a_damaged_header_reads_no_more_than_a_header(folder):
    digest = folder_digest(folder)
    first = shards(folder)[0]
    first.write_bytes(b"\xff" * 8 + first.read_bytes()[8:])
    assert folder_digest(folder) != digest


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "itself", "device"])
def test_no_file_of_an_adapter(tmp_path, name, kind):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(name if kind == "itself" else "/dev/zero")
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read_adapter_config(tmp_path) if name.endswith(".json") else file_tensors(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("r", value) for value in (0, 1.5, "8", True, [8])],
        *[
            ("lora_alpha", "8"),
            ("target_modules", [1]),
            ("target_modules", {"q_proj": 1}),
            ("modules_to_save", "score"),
        ],
        *[("layers_to_transform", "1"), ("rank_pattern", {"q_proj": "8"}), ("alpha_pattern", [1]), ("bias", [])],
        ("use_rslora", "yes"),
    ],
)
def test_a_value_of_another_type_in_adapter_config(tmp_path, key, value):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, key: value}))
    with pytest.raises(CheckpointError, match=rf"adapter_config\.json: {key} must be "):
        read_adapter_config(tmp_path)


def test_an_index_that_names_another_folder(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../model-00001.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    message = refusal(folder)
    assert INDEX in message
    assert "'../model-00001.safetensors'" in message


def test_shards_without_an_index(folder):
    (folder / INDEX).unlink()
    assert f"safetensors files and no {INDEX}" in refusal(folder)


@pytest.mark.parametrize("content", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [1, null]}'])
def test_a_damaged_generation_config_is_refused_before_training(folder, content):
    checked_weights(folder)
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json: "):
        checked_weights(folder)


def test_a_weight_that_is_missing(folder):
    change(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "model.layers.1.mlp.up_proj.weight is missing" in refusal(folder)


def test_a_weight_that_is_not_expected(folder):
    change(folder, lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.bias": torch.zeros(24)}))
    message = refusal(folder)
    assert "model.layers.1.mlp.up_proj.bias is not a weight of a llama model" in message
    assert "did you mean model.layers.1.mlp.up_proj.weight" in message


def test_a_weight_of_another_shape(folder):
    change(folder, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(38, 16)}))
    message = refusal(folder)
    assert all(part in message for part in ("lm_head.weight", "38 x 16", "config.json", "37 x 16"))


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3"), (torch.bool, "BOOL")]
)
def test_a_weight_of_another_dtype(folder, dtype, name):
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(16, dtype=dtype)}))
    message = refusal(folder)
    assert all(part in message for part in ("model.norm.weight", name, "bf16, fp16 or fp32"))


def test_a_folder_without_weights(folder):
    for shard in shards(folder):
        shard.unlink()
    (folder / INDEX).unlink()
    assert f"no weights; download {SINGLE}" in refusal(folder)


def test_pickled_weights_are_read_only_with_hf_allow_pickle(folder):
    expected: dict[str, torch.Tensor] = {}
    change(folder, expected.update)
    torch.save(expected, folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()
    assert "megatron_wrap.model_provider.hf_allow_pickle: true" in refusal(folder)
    source = checked_weights(folder, "megatron_wrap.model_provider.hf_allow_pickle=true")
    for name, tensor in expected.items():
        assert torch.equal(source.read(name, tuple((0, n) for n in tensor.shape)), tensor)


def test_a_pickle_that_runs_code_is_refused(folder):
    class Harm:
        def __reduce__(self) -> Any:
            return (print, ("harm",))

    change(folder, lambda tensors: None)
    torch.save({"model.norm.weight": Harm()}, folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: cannot be read"):
        checked_weights(folder, "megatron_wrap.model_provider.hf_allow_pickle=true")


def test_pickled_weights_are_tensors_in_a_file_of_the_user(folder, tmp_path, monkeypatch):
    change(folder, lambda tensors: None)
    (folder / SINGLE).unlink()
    allowed = "megatron_wrap.model_provider.hf_allow_pickle=true"
    for content in ([torch.ones(2)], {"model.norm.weight": "text"}):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: is not a dictionary of tensors"):
            checked_weights(folder, allowed)
    owner = (folder / "pytorch_model.bin").stat().st_uid
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: owner + 1)
        with pytest.raises(CheckpointError, match=rf"pytorch_model\.bin: belongs to another user \(uid {owner}\)"):
            checked_weights(folder, allowed)
    shutil.move(folder / "pytorch_model.bin", tmp_path / "elsewhere")
    (folder / "pytorch_model.bin").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"which is a link to .*elsewhere"):
        checked_weights(folder, allowed)


def test_a_tied_model_may_store_its_output_layer_too(folder):
    shutil.rmtree(folder)
    llama(tie_word_embeddings=True).save_pretrained(folder)
    assert "lm_head.weight" not in checked_weights(folder).tensors
    change(folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    checked_weights(folder)


def test_names_without_the_prefix_and_with_old_buffers(folder):
    """As in openai-community/gpt2."""
    shutil.rmtree(folder)
    GPT2LMHeadModel(GPT2Config(vocab_size=37, n_embd=16, n_layer=2, n_head=4, n_positions=32, **IDS)).save_pretrained(
        folder
    )

    def strip(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32)

    change(folder, strip)
    assert "transformer.wte.weight" in checked_weights(folder).tensors


def weights_left_out(config):
    return starting_weights(config).left_out(folder_arch(config))


def test_layers_for_multi_token_prediction_are_not_loaded_with_a_warning(folder):
    """As in deepseek-ai/DeepSeek-V3, after the last layer."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    shutil.rmtree(folder)
    sizes = {
        **{"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, **IDS},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8},
        **{"qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "moe_intermediate_size": 8},
        **{"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    }
    DeepseekV3ForCausalLM(DeepseekV3Config(**sizes)).save_pretrained(folder)
    config = load_run_config("run.yaml", [f"{HF_PATH}={folder}"])
    assert weights_left_out(config) == []
    change(folder, lambda tensors: tensors.update({"model.layers.2.enorm.weight": torch.ones(16)}))
    check_hugging_face(config)
    (warning,) = weights_left_out(config)
    assert "multi-token prediction" in warning
    assert export_format(config).config_json("float32")["num_nextn_predict_layers"] == 0
    change(folder, lambda tensors: tensors.update({"model.layers.3.enorm.weight": torch.ones(16)}))
    assert "model.layers.3.enorm.weight" in refusal(folder)


def test_the_layer_for_multi_token_prediction_of_qwen_is_one_that_a_run_may_load(folder):
    """As in Qwen/Qwen3.5-27B, in addition to the decoder."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    shutil.rmtree(folder)
    sizes = {
        **{"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, **IDS},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "full_attention_interval": 2},
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 2, "mtp_num_hidden_layers": 1},
    }
    Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes)).save_pretrained(folder)
    change(folder, lambda tensors: tensors.update({"mtp.norm.weight": torch.ones(16)}))
    config = load_run_config("run.yaml", [f"{HF_PATH}={folder}"])
    check_hugging_face(config)
    (warning,) = weights_left_out(config)
    assert "mtp_num_layers: 1 loads them" in warning
    assert export_format(config).config_json("float32")["mtp_num_hidden_layers"] == 0
    with pytest.raises(CheckpointError, match=r"mtp\.pre_fc_norm_embedding\.weight is missing"):
        checked_weights(folder, "megatron_lm.model.arch.mtp_num_layers=1")
    with pytest.raises(UnsupportedModel, match=r"mtp_num_layers: 2 layers .* of qwen3_5_text .*set it to 1"):
        checked_weights(folder, "megatron_lm.model.arch.mtp_num_layers=2")

"""Folders with a quantization_config: every weight is bitwise the one that transformers dequantizes, whole and in
slices; what is damaged or another method is one clear error."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM

from megatron_wrap.bridge.export.export_format import export_format
from megatron_wrap.bridge.export.model_card import training_record
from megatron_wrap.bridge.loading.folder_tensors import file_tensors
from megatron_wrap.bridge.loading.hf_path import starting_weights
from megatron_wrap.bridge.loading.quantized_tensors import dequantized, file_slices, with_quantized
from megatron_wrap.config import load_run_config
from megatron_wrap.config.config_json import Quantization
from megatron_wrap.config.hugging_face import HF_PATH
from megatron_wrap.errors import CheckpointError, MegatronWrapError

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
BLOCK = (8, 16)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)}
SIZES: dict[str, Any] = {"vocab_size": 37, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, **IDS}
LLAMA: dict[str, Any] = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2}
DEEPSEEK: dict[str, Any] = {
    **SIZES,
    **{"intermediate_size": 48, "kv_lora_rank": 32, "q_lora_rank": 16, "v_head_dim": 8, "num_key_value_heads": 4},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1},
    **{"moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_experts_per_tok": 2, "n_group": 2},
    **{"topk_group": 1, "num_nextn_predict_layers": 0, "max_position_embeddings": 64},
}


def quantize(folder: Path, section: dict[str, Any], shape_of_scales: Any, suffix: str, dtype=torch.float32) -> None:
    """Make every matrix of the layers FP8 with random scales."""
    tensors = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(5)
    for name, tensor in list(tensors.items()):
        if tensor.dim() == 2 and ".layers." in name and "mlp.gate.weight" not in name:
            tensors[name] = (tensor * 900).to(torch.float8_e4m3fn)
            tensors[name + suffix] = (torch.rand(shape_of_scales(tensor.shape), generator=generator) / 500).to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_config(folder, section)


def change_config(folder: Path, section: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))


def grid(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(-(-size // width) for size, width in zip(shape, BLOCK, strict=True))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def weights(folder: Path) -> Any:
    return starting_weights(load_run_config("run.yaml", [f"{HF_PATH}={folder}"]))


def slices(entry: Any, region: Any, files: dict[str, torch.Tensor], method: Quantization) -> list[torch.Tensor]:
    """What the files have of a region of a quantized tensor."""
    return [files[part.name][index] for part, index in file_slices(entry, region, method)]


def every(weights: Any, name: str, shape: tuple[int, ...], step: int) -> torch.Tensor:
    """The tensor, read in slices of `step` in each dimension."""
    whole = torch.full(shape, torch.nan)
    for starts in itertools.product(*(range(0, size, step) for size in shape)):
        region = tuple((start, min(start + step, size)) for start, size in zip(starts, shape, strict=True))
        whole[tuple(slice(*part) for part in region)] = weights.read(name, region)
    return whole


@pytest.mark.parametrize("scales", ["block", "scalar", "bfloat16-scalar"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_weights_are_those_of_transformers(scales, dtype, model):
    DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK)).save_pretrained(model)
    section = FP8 if scales == "block" else {**FP8, "weight_block_size": None, "activation_scheme": "static"}
    scale_dtype = torch.bfloat16 if scales.startswith("bf") else torch.float32
    quantize(model, section, grid if scales == "block" else lambda _: (), "_scale_inv", scale_dtype)
    ours = weights(model)
    theirs = DeepseekV3ForCausalLM.from_pretrained(model, dtype=dtype)
    expected = theirs.state_dict()
    for number in range(4):  # transformers fuses the experts
        experts = "model.layers.1.mlp.experts."
        gate, up = expected[experts + "gate_up_proj"][number].chunk(2)
        each = {"gate": gate, "up": up, "down": expected[experts + "down_proj"][number]}
        expected |= {f"{experts}{number}.{name}_proj.weight": tensor for name, tensor in each.items()}
    for name, entry in ours.tensors.items():
        for step in (7, 64):
            assert torch.equal(every(ours, name, entry.shape, step).to(dtype), expected[name].to(dtype)), name


@pytest.mark.parametrize("strategy", ["tensor", "channel", "block"])
def test_fp8_of_compressed_tensors_is_values_times_scale(strategy, model):
    kind = {"num_bits": 8, "type": "float", "strategy": strategy, "block_structure": list(BLOCK), "symmetric": True}
    section = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"weights": kind, "targets": ["Linear"]}},
    }
    shapes = {"tensor": lambda _: (1,), "channel": lambda shape: (shape[0], 1), "block": grid}
    quantize(model, section, shapes[strategy], "_scale", torch.bfloat16)
    ours, stored = weights(model), load_file(model / "model.safetensors")
    for name, entry in ours.tensors.items():
        expected = stored[name].double()
        if name + "_scale" in stored:
            scale = stored[name + "_scale"].double()
            if strategy == "block":
                scale = scale.repeat_interleave(8, 0)[: entry.shape[0]].repeat_interleave(16, 1)[:, : entry.shape[1]]
            expected = expected * scale
        assert torch.equal(every(ours, name, entry.shape, 9), expected.float()), name


def test_blocks_at_the_edge_are_smaller_by_the_format(model):
    """transformers refuses sizes that its scale grid does not divide, such as DeepSeek V3's 576 rows of kv_a_proj, and
    makes all blocks equal where the grid divides the size."""
    LlamaForCausalLM(LlamaConfig(**{**LLAMA, "intermediate_size": 43})).save_pretrained(model)
    quantize(model, FP8, grid, "_scale_inv")
    ours, stored = weights(model), load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    scale = stored[name + "_scale_inv"].repeat_interleave(8, 0).repeat_interleave(16, 1)[:, :43]
    assert torch.equal(every(ours, name, (32, 43), 5), (stored[name].double() * scale.double()).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_mxfp4_tensors_are_those_of_transformers_and_of_the_format(dtype, tmp_path):
    from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(256, (3, 10, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(252, (3, 10, 2), dtype=torch.uint8, generator=generator)
    scales[0, 0] = torch.tensor([0, 251])
    name = "model.layers.0.mlp.experts.down_proj"
    save_file({name + "_blocks": blocks, name + "_scales": scales}, tmp_path / "model.safetensors")
    method = Quantization("mxfp4", "block")
    stored = file_tensors(tmp_path / "model.safetensors")
    entry: Any = with_quantized(stored, method)[name]
    files = {name + "_blocks": blocks, name + "_scales": scales}

    class Reader:
        read = staticmethod(
            lambda _, region: dequantized(entry, region, slices(entry, region, files, method), method, dtype)
        )

    theirs = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert entry.shape == tuple(theirs.shape) == (3, 64, 10)
    assert Reader.read(name, ((0, 1), (0, 9), (0, 1))).dtype == dtype
    ours = every(Reader, name, entry.shape, 11)
    assert torch.equal(ours.to(dtype), theirs)
    values = torch.tensor(FP4_VALUES, dtype=torch.float64)[torch.stack((blocks & 15, blocks >> 4), -1).long()]
    exact = values.flatten(-2) * torch.exp2(scales.double() - 127)[..., None]
    assert torch.equal(ours.double(), exact.flatten(-2).transpose(1, 2))


def test_every_byte_of_mxfp4_with_every_scale_is_the_same_in_bf16_and_rounded_from_fp32(tmp_path):
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).repeat(256, 1, 1, 1)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1, 1).repeat(1, 16, 1)
    files = {"w_blocks": blocks, "w_scales": scales}
    save_file(files, tmp_path / "model.safetensors", metadata={"format": "pt"})
    method = Quantization("mxfp4", "block")
    entry: Any = with_quantized(file_tensors(tmp_path / "model.safetensors"), method)["w"]
    whole = tuple((0, size) for size in entry.shape)
    exact, short = (
        dequantized(entry, whole, slices(entry, whole, files, method), method, dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert short.dtype == torch.bfloat16
    assert torch.equal(exact[:255].bfloat16(), short[:255])
    assert exact[255].isnan().all()
    assert short[255].isnan().all()


def test_a_scale_that_is_no_number_is_refused(model):
    quantize(model, {**FP8, "scale_fmt": "ue8m0"}, grid, "_scale_inv")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name + "_scale_inv"] = torch.full(grid(tensors[name].shape), 129, dtype=torch.uint8)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    region = ((0, 3), (2, 9))
    assert torch.equal(weights(model).read(name, region), 4 * tensors[name].float()[:3, 2:9])
    tensors[name + "_scale_inv"][0, 0] = 255
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"up_proj\.weight contains NaN or infinity"):
        weights(model).read(name, region)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors, name: tensors.pop(name + "_scale_inv"),
            "quantized, and its scales .*_scale_inv are missing",
        ),
        (
            lambda tensors, name: tensors.update({name + "_scale_inv": torch.ones(6, 3)}),
            r"q_proj.weight_scale_inv has shape \[6, 3\], but the scales of .* \[32, 32\] have \[4, 2\]",
        ),
        (
            lambda tensors, name: tensors.update({name + "_scale_inv": torch.ones(4, 2, dtype=torch.int32)}),
            "has dtype I32, which no scales have",
        ),
        (lambda tensors, name: tensors.pop(name), "q_proj.weight is missing"),
    ],
)
def test_damaged_scales(change, message, model):
    quantize(model, FP8, grid, "_scale_inv")
    tensors = load_file(model / "model.safetensors")
    change(tensors, "model.layers.1.self_attn.q_proj.weight")
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        weights(model)


INT4 = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}}
NVFP4 = {"format": "nvfp4-pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}}}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quantized with GPTQ, which is not read; use weights in bf16"),
        ({"quant_method": "awq"}, "quantized with AWQ"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quantized with bitsandbytes"),
        ({"quant_method": "compressed-tensors", **INT4}, r"quantized with compressed-tensors INT4 \(pack-quantized\)"),
        ({"quant_method": "compressed-tensors", **NVFP4}, "quantized with compressed-tensors NVFP4"),
        ({"quant_method": "compressed-tensors"}, "has no config_groups"),
        ({"quant_method": "new"}, "the unknown quant_method 'new'"),
        ({"bits": 4}, "quantization_config has no quant_method"),
        ({**FP8, "weight_block_size": [0, 4]}, "a block of FP8 weights must be two positive integers"),
        ({**FP8, "expert_dtype": "fp4"}, "has experts in fp4"),
    ],
)
def test_other_methods_are_refused_by_name(section, message, model):
    change_config(model, section)
    with pytest.raises(MegatronWrapError, match=message):
        weights(model)


def test_an_export_is_not_quantized_and_its_record_names_the_method(model):
    quantize(model, FP8, grid, "_scale_inv")
    config = load_run_config("run.yaml", [f"{HF_PATH}={model}"])
    values = export_format(config).config_json("bfloat16")
    assert values["dtype"] == "bfloat16"
    assert "quantization_config" not in values
    assert training_record(config)["base_quantization"] == "FP8 (fp8, a scale for each block of 8 x 16)"

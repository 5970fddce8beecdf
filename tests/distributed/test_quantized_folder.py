"""Folders in the published formats: gpt-oss with experts in MXFP4, MiniMax-M2 in FP8. The weights that are loaded and
exported on a layout are bit for bit those that transformers dequantizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import _bridge_runs as runs
import pytest
import torch
from safetensors.torch import load_file, save_file

EXPERTS, HIDDEN, WIDTH = 4, 64, 32
BF16 = "megatron_lm.train.dtype.__select__=bf16"


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """The folder, and transformers' tensors in bf16."""
    from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config

    sizes = {**runs.SIZES, "hidden_size": HIDDEN, "intermediate_size": WIDTH, "head_dim": 16}
    folder = tmp_path_factory.mktemp("gpt-oss")
    GptOssForCausalLM(GptOssConfig(**sizes, num_local_experts=EXPERTS)).to(torch.bfloat16).save_pretrained(folder)
    quantize(folder)
    method = Mxfp4Config(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=method, dtype=torch.bfloat16)
    return folder, model.state_dict()


def quantize(folder: Path) -> None:
    """Replace the experts' matrices by random blocks of 32 values with their exponents."""
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(2)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, rows, columns = tensors.pop(name).shape
        shape = (experts, columns, rows // 32)
        tensors[name + "_blocks"] = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[name + "_scales"] = torch.randint(116, 124, shape, dtype=torch.uint8, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": section}))


@pytest.mark.parametrize("layout", ["tp2", pytest.param("ep2-tp2", marks=pytest.mark.matrix)])
def test_weights_are_those_that_transformers_dequantizes(layout, quantized, ranks, tmp_path):
    folder, expected = quantized
    processes, overrides = runs.LAYOUTS[layout]
    target = str(tmp_path / "exported")
    run: Any = ranks(processes).run(runs.logits_and_export, str(folder), (BF16, *overrides), target, "100KB")
    assert run
    exported = runs.stored(Path(target))
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, expected[name]), name
    assert "quantization_config" not in json.loads((tmp_path / "exported" / "config.json").read_text())


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory):
    """The folder, and in bf16 transformers' tensors with the names of the file."""
    from transformers import MiniMaxM2ForCausalLM

    folder = runs.make_folder("minimax-m2", tmp_path_factory.mktemp("minimax-m2"))
    plain = MiniMaxM2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tensors, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(2)
    blocks = 4, 4
    for name, tensor in list(tensors.items()):
        if ".layers." in name and tensor.dim() == 2 and not name.endswith("gate.weight"):
            tensors[name] = (tensor * 900).to(torch.float8_e4m3fn)
            scales = [-(-size // width) for size, width in zip(tensor.shape, blocks, strict=True)]
            tensors[name + "_scale_inv"] = torch.rand(scales, generator=generator) / 500
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    section = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(blocks)}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": section}))
    plain.load_state_dict(MiniMaxM2ForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict())
    plain.save_pretrained(folder.parent / "plain")
    return folder, load_file(folder.parent / "plain" / "model.safetensors")


@pytest.mark.parametrize("layout", ["tp2", pytest.param("ep2", marks=pytest.mark.matrix)])
def test_fp8_weights_of_minimax_are_those_of_transformers(layout, in_fp8, ranks, tmp_path):
    folder, expected = in_fp8
    processes, overrides = runs.LAYOUTS[layout]
    target = str(tmp_path / "exported")
    ranks(processes).run(runs.logits_and_export, str(folder), (BF16, *overrides), target, "100KB")
    exported = runs.stored(Path(target))
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        assert torch.equal(tensor.bfloat16(), expected[name].bfloat16()), name

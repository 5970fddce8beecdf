"""The folder of `adapter.path`, compared with the run before a process starts: its base, its modules, its factors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file

from megatron_wrap.bridge.adapters.peft_folder import adapter_folder
from megatron_wrap.bridge.adapters.run_adapter import run_adapter
from megatron_wrap.config import load_run_config
from megatron_wrap.errors import CheckpointError

CONFIG = Path(__file__).parents[4] / "examples" / "lora" / "lora.yaml"
MODEL = {
    **{"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "hidden_act": "silu"},
    **{"rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False},
}


def make_base(folder: Path, **changes: Any) -> Path:
    """A Hugging Face folder; its one tensor is never read."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**MODEL, **changes}))
    save_file({"lm_head.weight": numpy.zeros((1, 1), numpy.float32)}, folder / "model.safetensors")
    return folder


def open_folder(base: Path, adapter: Path, *overrides: str) -> None:
    keys = (f"adapter.path={adapter}", *overrides)
    config = load_run_config(
        CONFIG, (f"megatron_wrap.model_provider.hf_path={base}", *(f"megatron_wrap.{key}" for key in keys))
    )
    adapter_folder(config, run_adapter(config))


def make_adapter(folder: Path, base: Path, left_out: str = "nothing") -> Path:
    """A folder of peft, with zeros."""
    config = load_run_config(CONFIG, (f"megatron_wrap.model_provider.hf_path={base}",))
    adapter = run_adapter(config)
    assert adapter is not None
    factors = [mapping for layer in adapter.layers for mapping in layer.factors().values()]
    shapes = {name: shape for mapping in factors for name, shape in mapping.shapes().items()}
    folder.mkdir()
    tensors = {name: numpy.zeros(shape, numpy.float32) for name, shape in shapes.items() if left_out not in name}
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(adapter.peft_config(str(base))))
    return folder


def test_an_adapter_of_another_base_is_refused(tmp_path: Path) -> None:
    """Also of the same shapes; not a copy of the base, and not if the base is no longer on this machine."""
    base = make_base(tmp_path / "base")
    adapter = make_adapter(tmp_path / "adapter", base)
    open_folder(base, adapter)
    open_folder(Path(shutil.copytree(base, tmp_path / "copy")), adapter)
    for name, changes in (("longer", {"max_position_embeddings": 512}), ("vocabulary", {"vocab_size": 65})):
        other = make_base(tmp_path / name, **changes)
        with pytest.raises(CheckpointError, match=f"is an adapter of {base}, and .*hf_path {other} is another model"):
            open_folder(other, adapter)
    base.rename(tmp_path / "moved")
    open_folder(tmp_path / "moved", adapter)


def test_a_factor_that_is_missing_and_other_modules_or_ranks_are_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    part = make_adapter(tmp_path / "part", base, left_out="layers.1.mlp.up_proj.lora_B")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.lora_B\.weight is missing.*save the adapter"):
        open_folder(base, part)
    whole = make_adapter(tmp_path / "whole", base)
    with pytest.raises(
        CheckpointError, match=r"lora_A\.weight is not a weight of the run's adapter.*set megatron_wrap"
    ):
        open_folder(base, whole, "adapter.target_modules=[q_proj, v_proj]")
    with pytest.raises(CheckpointError, match=r"r is 16 there and 4 here; write megatron_wrap\.adapter\.r=16"):
        open_folder(base, whole, "adapter.r=4")
    wide = make_base(tmp_path / "wide", hidden_size=32)
    base.rename(tmp_path / "moved")
    with pytest.raises(CheckpointError, match="but the adapter's base model requires"):
        open_folder(wide, whole)

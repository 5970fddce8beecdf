"""modules_to_save and the task of a folder of peft, compared with those of a run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.bridge.adapters.peft_folder import REFUSED, WITHOUT_EFFECT, adapter_folder, adapter_keys
from megatron_wrap.bridge.adapters.run_adapter import run_adapter
from megatron_wrap.config import load_run_config
from megatron_wrap.config.schema.model import AdapterConfig
from megatron_wrap.errors import MegatronWrapError

CONFIG = Path(__file__).parents[4] / "configs" / "tiny-llama-sft.yaml"
KEYS = "megatron_wrap.adapter"
PEFT: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 8}
SCORES = {"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]}
VALUE = ("megatron_wrap.model_provider.provider_key=gpt_value_model",)


def folder_with(folder: Path, **values: Any) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps({**PEFT, **values}))
    return folder


@pytest.mark.parametrize(
    ("values", "overrides", "message"),
    [
        (SCORES, (), "an adapter of a sequence classification model; set .*provider_key to gpt_value_model"),
        ({}, VALUE, "an adapter of a language model; set .*provider_key to gpt_model"),
        (
            {"modules_to_save": ["lm_head"]},
            (),
            r"is \[lm_head\] there and \[\] here; write .*modules_to_save=\[lm_head\]",
        ),
        ({}, (f"{KEYS}.modules_to_save=[norm]",), r"is \[\] there and \[norm\] here"),
        ({"bias": "all"}, (), r"bias is all there and none here; write megatron_wrap\.adapter\.bias=all"),
        ({"trainable_token_indices": [5]}, (), r"is \[5\] there and \[\] here; write .*token_indices=\[5\]"),
        ({"layers_pattern": "layers"}, (), "layers_pattern is .* cannot be loaded: .*delete it"),
        ({"init_lora_weights": "olora"}, (), "olora and cannot be loaded: .*conversion"),
        ({"use_bdlora": {"nblocks": 2}}, (), "use_bdlora is .* cannot be loaded: factors are not block-diagonal"),
        ({"init_lora_weights": "pissa"}, (), "pissa there and true here; write .*init_lora_weights=pissa"),
        ({"init_lora_weights": "pissa_niter_4"}, (), "pissa_niter_4 and cannot be loaded: .*conversion"),
    ],
)
def test_a_folder_of_other_modules_is_refused(values, overrides, message, tmp_path):
    folder = folder_with(tmp_path, **values)
    config = load_run_config(CONFIG, (f"{KEYS}.__select__=lora", f"{KEYS}.path={folder}", *overrides))
    with pytest.raises(MegatronWrapError, match=message):
        adapter_folder(config, run_adapter(config))


@pytest.mark.parametrize("version", [{}, {"peft_version": "0.18.1"}])
def test_factors_of_experts_of_peft_before_0_19_are_refused(version, tmp_path):
    folder = folder_with(tmp_path, target_parameters=["mlp.experts.down_proj"], **version)
    keys = (f"{KEYS}.path={folder}", f"{KEYS}.target_parameters=[mlp.experts.down_proj]")
    config = load_run_config(CONFIG.with_name("tiny-mixtral-sft.yaml"), (f"{KEYS}.__select__=lora", *keys))
    with pytest.raises(MegatronWrapError, match=r"another form since 0\.19; merge it with that release"):
        adapter_folder(config, run_adapter(config))


@pytest.mark.transformers  # which peft imports
def test_every_option_of_peft_is_supported_or_refused_by_name():
    """So that none is ignored where it changes the model."""
    peft = pytest.importorskip("peft")
    described = {"peft_type", "task_type", "base_model_name_or_path", "inference_mode", "revision", "auto_mapping"}
    described |= {"peft_version", "fan_in_fan_out", "init_lora_weights"}  # the file's origin, and the family's form
    supported = {field.name for field in dataclasses.fields(AdapterConfig)}
    options = {field.name for field in dataclasses.fields(peft.LoraConfig)} - described
    assert not set(REFUSED) & supported
    assert options - supported == {*REFUSED, *WITHOUT_EFFECT}


def test_keys_of_a_folder(tmp_path):
    """The heads that peft adds are not among them."""
    assert "modules_to_save" not in adapter_keys(folder_with(tmp_path, **SCORES))
    saved = [*SCORES["modules_to_save"], "embed_tokens"]
    assert adapter_keys(folder_with(tmp_path, **{**SCORES, "modules_to_save": saved}))["modules_to_save"] == [
        "embed_tokens"
    ]

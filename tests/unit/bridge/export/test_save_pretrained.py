"""Files of an exported folder, and what cannot be exported with a vision encoder; tests/distributed/test_bridge.py
exports what can."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_wrap.bridge.export.save_pretrained import KeptVision, generation_config
from megatron_wrap.errors import ConfigError


def test_the_tokenizer_has_the_end_token_where_config_json_has_none():
    tokenizer = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=None)
    null = {"bos_token_id": None, "eos_token_id": None}
    assert generation_config(None, null, tokenizer) == {
        "_from_model_config": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert generation_config(None, {"eos_token_id": 7}, tokenizer)["eos_token_id"] == 7
    assert generation_config(None, null, None) == {"_from_model_config": True}


def hf_format(family: str, with_vision: Any) -> Any:
    original = SimpleNamespace(family=SimpleNamespace(model_type="qwen3_5_text"), with_vision=with_vision)
    return SimpleNamespace(original=original, family=SimpleNamespace(model_type=family))


@pytest.mark.parametrize(
    ("family", "with_vision", "message"),
    [
        ("qwen3_5_text", None, "a folder with a vision encoder"),
        ("llama", {"model_type": "qwen3_5"}, "exports the qwen3_5_text of hf_path"),
    ],
)
def test_a_folder_without_an_encoder_and_another_family_are_refused(family, with_vision, message):
    with pytest.raises(ConfigError, match=message):
        KeptVision.of(hf_format(family, with_vision))

"""Files of an exported folder."""

from types import SimpleNamespace

from megatron_wrap.bridge.export.save_pretrained import generation_config


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

"""New tokens: embedding and output layer grow as transformers' `resize_token_embeddings` lets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import _adapter_runs as runs
import _bridge_runs as bridge
import numpy
import pytest
import torch
from _forked import COMMAND, run_forked

NEW = ["<plan>", "</plan>", "<quote>"]
TP2_PP2 = ("megatron_lm.model.parallel.tensor_model_parallel_size=2",)
TP2_PP2 += ("megatron_lm.model.parallel.pipeline_model_parallel_size=2",)
WHOLE = '["embed_tokens","lm_head"]'


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(family) -> a random transformers model with a tokenizer of as many entries, made once."""
    return bridge.made_once(tmp_path_factory, _write_tokenizer)


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<eos>": 0, **{f"w{number}": number for number in range(1, bridge.VOCAB)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


def _resized(folder: Path) -> Any:
    """transformers' model with as many entries more."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.resize_token_embeddings(bridge.VOCAB + len(NEW), mean_resizing=True)
    return model


@pytest.mark.parametrize(("family", "count"), [("llama", 1), ("llama3.2-tied", 1), ("llama", 4)])
def test_rows_are_those_of_transformers_and_the_export_has_them(family, count, folder_of, ranks, tmp_path):
    folder = folder_of(family)[0]
    layout = TP2_PP2 if count == 4 else ()
    ranks(count).run(runs.grow_and_export, str(folder), NEW, layout, str(tmp_path))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert AutoTokenizer.from_pretrained(tmp_path / "model").convert_tokens_to_ids(NEW) == [301, 302, 303]
    ours, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    theirs = _resized(folder)
    assert ours.config.vocab_size == theirs.config.vocab_size == 304
    for layer in ("get_input_embeddings", "get_output_embeddings"):
        weight, expected = (getattr(model, layer)().weight.detach() for model in (ours, theirs))
        assert torch.equal(weight[:301], expected[:301])
        assert torch.equal(weight[301], weight[303])
        assert torch.allclose(weight[301], expected[:301].mean(0), atol=1e-7)
        # theirs add noise of 3e-5 of the rows' deviation
        assert (weight[301:] - expected[301:]).abs().max() < 2e-4 * expected[:301].std()


def test_an_adapter_trains_the_grown_rows_and_peft_loads_them(folder_of, ranks, tmp_path):
    folder = folder_of("llama")[0]
    adapter = ("megatron_wrap.adapter.__select__=lora", f"megatron_wrap.adapter.modules_to_save={WHOLE}", *TP2_PP2)
    logits, resumed = ranks(4).run(runs.grow_and_train, str(folder), NEW, adapter, str(tmp_path))[0]
    assert numpy.array_equal(logits, resumed)
    from peft import PeftModel

    model = PeftModel.from_pretrained(_resized(folder), tmp_path / "adapter").eval()
    with torch.no_grad():
        expected = model(torch.tensor(bridge.token_ids())).logits.numpy()
    assert logits.shape[-1] == 304
    assert numpy.abs(logits - expected).max() <= 1e-5


def test_a_resumed_run_needs_the_new_tokens_and_an_export_has_them(folder_of, ranks, tmp_path):
    folder = folder_of("llama")[0]
    ranks(1).run(runs.grow_and_train, str(folder), NEW, (), str(tmp_path))
    with pytest.raises(Exception, match="vocabulary"):
        ranks(1).run(runs.grow_and_train, str(folder), [], (), str(tmp_path))
    exported = run_forked(COMMAND, "export-hf", tmp_path / "checkpoints", tmp_path / "exported")
    assert exported.returncode == 0, exported.stderr
    assert json.loads((tmp_path / "exported" / "config.json").read_text())["vocab_size"] == 304

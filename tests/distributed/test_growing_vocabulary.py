"""New tokens: embedding and output layer grow as transformers' `resize_token_embeddings` lets them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import _adapter_runs as runs
import _bridge_runs as bridge
import numpy
import pytest
import torch
from _forked import COMMAND, run_forked
from _trl_runs import word_tokenizer

NEW = ["<plan>", "</plan>", "<quote>"]
TP2_PP2 = ("megatron_lm.model.parallel.tensor_model_parallel_size=2",)
TP2_PP2 += ("megatron_lm.model.parallel.pipeline_model_parallel_size=2",)
WHOLE = '["embed_tokens","lm_head"]'


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(family) -> a random transformers model with a tokenizer of as many entries, made once."""
    return bridge.made_once(tmp_path_factory, _write_tokenizer)


def _write_tokenizer(folder: Path, entries: int = bridge.VOCAB) -> None:
    words = {"<eos>": 0, **{f"w{number}": number for number in range(1, entries)}}
    word_tokenizer(words, eos_token="<eos>").save_pretrained(folder)


def _resized(folder: Path, entries: int = bridge.VOCAB) -> Any:
    """transformers' model with as many entries more than its tokenizer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.resize_token_embeddings(entries)
    model.resize_token_embeddings(entries + len(NEW), mean_resizing=True)
    return model


@pytest.mark.parametrize(
    ("family", "count", "spare"), [("llama", 1, 0), ("llama3.2-tied", 1, 0), ("llama3.2-tied", 4, 2), ("llama", 4, 2)]
)
def test_rows_are_those_of_transformers_and_the_export_has_them(family, count, spare, folder_of, ranks, tmp_path):
    """spare: rows of the folder that belong to no token of its tokenizer, whose new tokens take them first."""
    folder = folder_of(family)[0]
    if spare:
        folder = shutil.copytree(folder, tmp_path / "spare")
        _write_tokenizer(folder, bridge.VOCAB - spare)
    first, rows = bridge.VOCAB - spare, bridge.VOCAB + len(NEW) - spare
    layout = TP2_PP2 if count == 4 else ()
    ranks(count).run(runs.grow_and_export, str(folder), NEW, layout, str(tmp_path))
    from transformers import AutoModelForCausalLM, AutoTokenizer

    new = [first, first + 1, first + 2]
    assert AutoTokenizer.from_pretrained(tmp_path / "model").convert_tokens_to_ids(NEW) == new
    ours, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, output_loading_info=True)
    assert not info["missing_keys"] | info["unexpected_keys"]
    theirs = _resized(folder, first)  # without the rows of no token, over which it would average as well
    assert ours.config.vocab_size == theirs.config.vocab_size == rows
    for layer in ("get_input_embeddings", "get_output_embeddings"):
        weight, expected = (getattr(model, layer)().weight.detach() for model in (ours, theirs))
        assert torch.equal(weight[:first], expected[:first])
        assert torch.equal(weight[new[0]], weight[new[2]])
        assert torch.allclose(weight[first], expected[:first].mean(0), atol=1e-7)
        # theirs add noise of 3e-5 of the rows' deviation
        assert (weight[first:] - expected[first:]).abs().max() < 2e-4 * expected[:first].std()


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

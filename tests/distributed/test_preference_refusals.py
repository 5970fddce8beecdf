"""Wrong preference data and references: each one error that names the sample or the key."""

from __future__ import annotations

import json
import re

import _dpo_runs as runs
import pytest
from _dpo_runs import COPY, REFERENCE, TRAIN
from _started import refusal_of
from _trl_runs import word_tokenizer

GOOD = {"prompt_ids": [5, 6], "chosen_ids": [7, 8], "rejected_ids": [9]}
ANSWER = {"prompt_ids": [5, 6], "completion_ids": [7, 8], "label": True}
DATA = "megatron_wrap.data"
SAMPLES = {
    "no rejected answer": ("gpt_dpo", GOOD, {"prompt": "a", "chosen": "b"}, '"prompt", "chosen" and "rejected"'),
    "an empty chosen answer": ("gpt_cpo", GOOD, {**GOOD, "chosen_ids": []}, '"chosen" of a pair has no tokens'),
    "an empty rejected answer": ("gpt_orpo", GOOD, {**GOOD, "rejected_ids": []}, '"rejected" of a pair has no tokens'),
    "an empty answer": ("gpt_kto", ANSWER, {**ANSWER, "completion_ids": []}, "the answer of a sample has no tokens"),
    "no label": ("gpt_kto", ANSWER, {**ANSWER, "label": None}, '"label" is None'),
}


@pytest.mark.parametrize("case", SAMPLES)
def test_a_wrong_sample_is_named(ranks, tmp_path, case):
    flow, good, wrong, named = SAMPLES[case]
    selected = (*COPY[: flow in ("gpt_dpo", "gpt_kto")], f"megatron_wrap.flow.__select__={flow}")
    message = ranks(1).run(runs.refusal, selected, [good, good, wrong, good])[0]
    assert named in message
    assert "sample 2 of a batch of 4" in message
    file = tmp_path / "samples.jsonl"
    file.write_text("".join(json.dumps(sample) + "\n" for sample in [good] * 5 + [wrong] + [good] * 2))
    data = (f"{DATA}.__select__=jsonl", f"{DATA}.train={file}", f"{DATA}.shuffle=false", f"{TRAIN}.train_iters=2")
    message = ranks(1).run(refusal_of, runs.train_on_own_data, (*selected, *data))[0]
    assert named in message
    assert f"{file}:6" in message


@pytest.mark.parametrize(("flow", "meant"), [("gpt_dpo", "sigmoid"), ("gpt_cpo", "sigmoid"), ("gpt_kto", "kto")])
def test_an_unknown_loss_type_is_named_with_what_is_possible(ranks, flow, meant):
    wrong = (f"megatron_wrap.flow.__select__={flow}", f"megatron_wrap.flow.loss_type={meant}x")
    message = ranks(1).run(runs.refusal, (*COPY, *wrong))[0]
    assert "megatron_wrap.flow" in message
    for word in ("loss_type", f"{meant}x", meant):
        assert re.search(rf"\b{word}\b", message), word


@pytest.mark.transformers
def test_a_reference_with_another_tokenizer_is_refused(ranks, tmp_path):
    """Two vocabularies of the same size, in which two tokens have each other's id."""
    words = {f"w{number}": number for number in range(runs.VOCAB)}
    for name, vocabulary in (("here", words), ("there", {**words, "w7": 8, "w8": 7})):
        ranks(1).run(runs.export, str(tmp_path / name))
        word_tokenizer(vocabulary, pad_token="w0", eos_token="w1").save_pretrained(tmp_path / name)
    for name, ends in (("there", "token 'w7' has the id 8 there and 7 here"), ("here", "no error")):
        overrides = (f"{DATA}.tokenizer={tmp_path}/here", f"{REFERENCE}={{hf_path: {tmp_path}/{name}}}")
        message = ranks(1).run(runs.refusal, (f"{DATA}.__select__=none", *overrides), runs.pairs(4))[0]
        assert ends in message
        assert name == "here" or f"{REFERENCE}: " in message

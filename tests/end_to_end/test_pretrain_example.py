"""The example of pretraining: it trains, continues after an interrupt, and is inspected; wrong input is one line."""

from __future__ import annotations

import json

import pytest

TRAIN, CONFIG = "megatron_lm.train.common", "configs/tiny-gpt-pretrain.yaml"
SHORT = (f"{TRAIN}.train_iters=2", f"{TRAIN}.save_interval=2", f"{TRAIN}.eval_interval=2", f"{TRAIN}.eval_iters=1")
OTHERS = (f"{TRAIN}.sample_prompts=null", "megatron_wrap.init.platform=cpu")


@pytest.mark.documentation
def test_the_example_of_pretraining(command, tmp_path, linked):
    linked(tmp_path, "configs")

    def train(*overrides: str):
        return command("megatron_wrap.cli.main", "train", CONFIG, *SHORT, *OTHERS, *overrides)

    ended = train()
    assert ended.code == 0, ended.err
    logs = (tmp_path / "outputs/tiny-gpt-pretrain/logs").glob("rank_*.log")
    assert sum(log.read_text().count("building the index") for log in logs) == 1  # by the rank that is the first
    longer = (f"{TRAIN}.train_iters=3", "megatron_lm.train.optimizer.override_opt_param_scheduler=true")
    refused = train(*longer)
    assert refused.code == 2
    assert "index_samples: 32" in refused.err
    ended = train(*longer, "megatron_wrap.data.index_samples=32")
    assert ended.code == 0, ended.err
    text = (tmp_path / "outputs/tiny-gpt-pretrain/metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["iteration"] for line in lines if "loss" in line] == [1, 2, 3]
    assert all(line["loss"] < 8.5 for line in lines if "loss" in line)

    ended = command("megatron_wrap.cli.main", "inspect-data", CONFIG, *OTHERS, "--limit", "20", "--split", "validation")
    assert ended.code == 0, ended.err
    assert "text_document.bin window 1" in ended.out
    assert "findings:" not in ended.out
    ended = train("megatron_wrap.data.train=examples/data/generated/text_documnet")
    assert ended.code == 2
    assert "did you mean examples/data/generated/text_document.idx?" in ended.err.splitlines()[-1]

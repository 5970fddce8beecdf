"""The example of the first page with packing takes the steps that it takes without."""

from __future__ import annotations

import json

import pytest

TRAIN = "megatron_lm.train.common"
SHORT = (
    *(f"{TRAIN}.train_iters=2", f"{TRAIN}.save=null", f"{TRAIN}.save_interval=null", f"{TRAIN}.eval_interval=2"),
    *(f"{TRAIN}.eval_iters=1", f"{TRAIN}.sample_prompts=null", f"{TRAIN}.log_interval=1"),
)


@pytest.mark.documentation
def test_the_packed_example_has_the_losses_of_the_padded_one(command, tmp_path, linked):
    linked(tmp_path, "configs")
    result = {}
    for output, packing in (("padded", "false"), ("packed", "true")):
        options = (f"megatron_wrap.flow.packing={packing}", f"megatron_wrap.logger.output_dir={output}")
        ended = command("megatron_wrap.cli.main", "train", "configs/tiny-llama-sft.yaml", *SHORT, *options)
        assert ended.code == 0, ended.err
        lines = [json.loads(line) for line in (tmp_path / output / "metrics.jsonl").read_text().splitlines()]
        names = ("loss", "consumed_tokens", "truncated_samples", "eval/validation/loss")
        result[output] = [line[name] for line in lines for name in names if name in line]
    assert len(result["padded"]) == 8  # three numbers of each step, two evaluations
    assert result["packed"] == pytest.approx(result["padded"], rel=1e-5)

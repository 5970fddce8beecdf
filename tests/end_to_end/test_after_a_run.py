"""What `megatron-wrap train` prints at its end is run: every command succeeds and does what its comment promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

RUN = """\
megatron_lm:
  model:
    arch:
      __select__: tiny-llama
      __override__: {num_layers: 1, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4}
  train:
    common:
      {micro_batch_size: 2, global_batch_size: 4, seq_length: 32, train_iters: 2, save: checkpoints, save_interval: 2,
       eval_iters: 1, sample_prompts: ["What is it?"]}
    learning-rate: {lr: 1e-3, lr_decay_style: cosine}
    dtype: {__select__: fp32}
megatron_wrap:
  init: {platform: cpu}
  logger: {output_dir: out, enable_tensorboard: true}
  data:
    __select__: jsonl
    __override__: {train: DATA/train.jsonl, validation: DATA/validation.jsonl, tokenizer: DATA/tokenizer}
  flow: {__select__: gpt_sft}
"""


@pytest.mark.documentation
def test_what_comes_next_runs(command, tmp_path, sample_data):
    (tmp_path / "run.yaml").write_text(RUN.replace("DATA", str(sample_data)))
    ended = command("megatron_wrap.cli.main", "train", "run.yaml")
    assert ended.code == 0, ended.err
    _, _, block = ended.out.partition("next:\n")
    commands = {comment.split(":")[0]: text for comment, text in re.findall(r"  # (.*)\n  (.*)", block)}
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def run(start: str) -> subprocess.CompletedProcess[str]:
        (text,) = [text for comment, text in commands.items() if comment.startswith(start)]
        done = subprocess.run(text, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done

    def records() -> list[dict[str, float]]:
        return [json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]

    before = records()
    evaluated = run("evaluate the checkpoint")
    assert f"eval validation | loss {before[-1]['eval/validation/loss']:.4f}" in evaluated.stdout + evaluated.stderr
    assert records() == before  # nothing was trained
    assert run("export").stdout.strip().endswith("out/hf")
    run("resume up to step 4")
    assert [record["iteration"] for record in records() if "loss" in record] == [1, 2, 3, 4]
    assert json.loads(run("the metrics of each step").stdout.splitlines()[-1])["iteration"] == 4
    (curves,) = [text for comment, text in commands.items() if comment.startswith("their curves")]
    assert (tmp_path / curves.split()[-1]).is_dir()

"""A small run for the tests of the facade."""

from __future__ import annotations

from pathlib import Path

import pytest

RUN = """\
megatron_lm:
  model:
    arch:
      __select__: tiny-llama
      __override__: {num_layers: 1, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4,
                     num_query_groups: 2, vocab_size: 60}
  train:
    common: {micro_batch_size: 2, global_batch_size: 4, seq_length: 16, train_iters: 6}
    learning-rate: {lr: 1e-2, min_lr: 1e-3}
    dtype: {__select__: fp32}
megatron_wrap:
  init: {platform: cpu}
  flow: {__select__: gpt_sft}
"""


@pytest.fixture(autouse=True)
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory contains only run.yaml."""
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

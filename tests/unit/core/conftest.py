"""Processes of their own for tests that start a run: the test process stays without process group and patches."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
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


@pytest.fixture(scope="session")
def _imported() -> None:
    """What a forked process needs is imported here once, with the CPU's meaning, which stays in Megatron-Core."""
    from megatron_wrap.platform import choose_platform

    platform = choose_platform("cpu")
    platform.install()
    try:
        from megatron.core.models.gpt import GPTModel  # noqa: F401
        from megatron.core.optimizer import get_megatron_optimizer  # noqa: F401

        import megatron_wrap.core.wrap
        import megatron_wrap.engine.build
        import megatron_wrap.engine.forward  # noqa: F401
    finally:
        platform.uninstall()


@pytest.fixture
def in_fork(_imported, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """in_fork(body) runs body() in a forked process whose working directory is empty but for run.yaml."""
    (tmp_path / "run.yaml").write_text(RUN)
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def run(body: Callable[[], None]) -> None:
        context = multiprocessing.get_context("fork")
        theirs, mine = context.Pipe(duplex=False)

        def child() -> None:
            import torch

            torch.set_num_threads(1)
            try:
                body()
            except BaseException:
                mine.send(traceback.format_exc())
            else:
                mine.send("")

        process = context.Process(target=child)
        process.start()
        try:
            assert theirs.poll(120), "no answer in time"
            failure = theirs.recv()
        finally:
            process.join(5)
            if process.is_alive():
                process.kill()
        if failure:
            pytest.fail(failure, pytrace=False)

    return run

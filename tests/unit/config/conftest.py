"""A run's YAML in an otherwise empty working directory."""

from collections.abc import Callable
from pathlib import Path

import pytest

RUN = """\
megatron_lm:
  model:
    arch:
      __select__: tiny-llama
    parallel:
      __select__: base
      __override__:
        tensor_model_parallel_size: 1
  train:
    common:
      micro_batch_size: 2
      global_batch_size: 8
      seq_length: 128
      train_iters: 10
    learning-rate:
      lr: 2e-4
    dtype:
      __select__: fp32
megatron_wrap:
  flow:
    __select__: minimal_mock
"""


@pytest.fixture
def write_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Writes `run.yaml` into the working directory, with text replaced: write_run("old", "new", ...) -> its path."""
    monkeypatch.chdir(tmp_path)

    def write(*replacements: str, text: str = RUN) -> str:
        for old, new in zip(replacements[::2], replacements[1::2], strict=True):
            assert old in text
            text = text.replace(old, new)
        (tmp_path / "run.yaml").write_text(text)
        return "run.yaml"

    return write


@pytest.fixture
def write_nest(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes a file of the overlay: write_nest("megatron_wrap/flow/my_flow.yaml", text) -> its path."""

    def write(relative: str, text: str) -> Path:
        path = tmp_path / "nest" / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write

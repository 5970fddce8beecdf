"""`megatron_wrap.profile` of a run: it changes no number, and profiles the rows of steps that it names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_wrap.core import MegatronWrap

pytestmark = pytest.mark.process_group

CONFIG = Path(__file__).parents[3] / "configs" / "tiny-llama-mock.yaml"
SMALL = ("seq_length=32", "global_batch_size=4", "train_iters=6")


def _losses(folder: Path, *overrides: str) -> list[float]:
    all_overrides = [f"megatron_lm.train.common.{text}" for text in SMALL]
    all_overrides += ["megatron_wrap.init.platform=cpu", f"megatron_wrap.logger.output_dir={folder}", *overrides]
    losses: list[float] = []
    with MegatronWrap(CONFIG, [*all_overrides, "megatron_wrap.data.num_workers=0"]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        wrap.fit(on_step=lambda wrap, metrics: losses.append(metrics["loss"]))
    return losses


def test_profiling_changes_no_number(tmp_path):
    plain = _losses(tmp_path / "plain")
    assert _losses(tmp_path / "run", "megatron_wrap.profile.steps=[2,5,6]") == plain
    folders = sorted((tmp_path / "run" / "profile").iterdir())
    assert [folder.name for folder in folders] == ["iterations-2-2", "iterations-5-6"]
    for folder in folders:
        report = json.loads((folder / "profile.json").read_text())
        assert len(report["iterations"]) == report["ranks"][0]["num_steps"]
        assert (folder / "trace-rank0.json.gz").is_file()
    assert not (tmp_path / "plain" / "profile").exists()


def test_a_run_that_ends_within_the_steps_leaves_no_report(tmp_path):
    def stop(wrap, metrics):
        return wrap.iteration < 2

    overrides = [f"megatron_lm.train.common.{text}" for text in SMALL]
    overrides += ["megatron_wrap.init.platform=cpu", f"megatron_wrap.logger.output_dir={tmp_path}"]
    with MegatronWrap(CONFIG, [*overrides, "megatron_wrap.profile.steps=[2,3]"]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        wrap.fit(on_step=stop)
    assert not (tmp_path / "profile").exists()

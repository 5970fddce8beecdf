"""`megatron_wrap.profile` of a run: it changes no number, and profiles the rows of steps that it names."""

import json
from pathlib import Path

import pytest
from _runs import ready

from megatron_wrap.core import MegatronWrap

pytestmark = pytest.mark.process_group

CONFIG = Path(__file__).parents[3] / "configs" / "tiny-llama-mock.yaml"
SMALL = ("seq_length=32", "global_batch_size=4", "train_iters=6")


def _losses(folder: Path, *overrides: str, steps: int = 6) -> list[float]:
    losses: list[float] = []

    def on_step(wrap: MegatronWrap, metrics: dict[str, float]) -> bool:
        losses.append(metrics["loss"])
        return wrap.iteration < steps

    settings = ("megatron_wrap.init.platform=cpu", "megatron_wrap.data.num_workers=0")
    common = [f"megatron_lm.train.common.{text}" for text in SMALL]
    output = f"megatron_wrap.logger.output_dir={folder}"
    with ready(MegatronWrap(CONFIG, [*common, *settings, output, *overrides])) as wrap:
        wrap.fit(on_step=on_step)
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
    assert len(_losses(tmp_path, "megatron_wrap.profile.steps=[2,3]", steps=2)) == 2
    assert not (tmp_path / "profile").exists()

"""What a run writes for TensorBoard and for `megatron-wrap report`."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import yaml
from _runs import started

from megatron_wrap.cli.main import main
from megatron_wrap.config import load_run_config
from megatron_wrap.config.schema.derived import tensorboard_dir
from megatron_wrap.core.validation.paths import check_run
from megatron_wrap.errors import ConfigError

TRAIN, LOGGER = "megatron_lm.train.common", "megatron_wrap.logger"
SAMPLES = [{"input_ids": [index, 1, 2, 3, 4], "loss_mask": [0, 1, 1, 1, 1]} for index in range(5, 13)]


@pytest.mark.process_group
def test_a_run_is_reported_from_its_own_records(monkeypatch):
    """With its configuration, each value with its origin; with the perplexity of a flow that has one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from megatron_wrap.flow.sft import MegatronWrapGPTModelSFTFlow

    monkeypatch.setattr(MegatronWrapGPTModelSFTFlow, "reports_perplexity", True)
    overrides = [f"{TRAIN}.save=saved", f"{TRAIN}.train_iters=2", f"{LOGGER}.tensorboard_dir=events"]
    with started(*overrides) as wrap:
        while wrap.iteration < wrap.train_iters:
            metrics = wrap.train(SAMPLES[4 * wrap.iteration : 4 * wrap.iteration + 4])
            wrap.log_last_metrics()
        actual = wrap.evaluate({"books": SAMPLES})
        saved = wrap.save()
    assert metrics["global_batch_size"] == 4
    assert actual["eval/books/perplexity"] == pytest.approx(math.exp(actual["eval/books/loss"]), rel=1e-12)

    events = EventAccumulator("events").Reload()
    tags = {"loss", "learning_rate", "global_batch_size", "grad_norm", "tflops", "tokens_per_second"}
    assert set(events.Tags()["scalars"]) > tags | {"eval/books/loss", "eval/books/perplexity"}
    assert events.Scalars("eval/books/perplexity")[0].value == pytest.approx(actual["eval/books/perplexity"], rel=1e-6)

    facts = json.loads(Path("outputs/run/run.json").read_text())
    resolved = yaml.safe_load((saved / "resolved.yaml").read_text())
    by_path = {path: (yaml.safe_load(value), origin) for path, value, origin in facts["configuration"]}
    for path, (value, _) in by_path.items():
        expected = resolved
        for part in path.split("."):
            expected = expected[part]
        assert value == expected, path
    assert by_path[f"{TRAIN}.train_iters"] == (2, "command line")
    assert by_path[f"{TRAIN}.seq_length"] == (16, "run.yaml:8 (override)")
    assert main(["report", "outputs/run"]) == 0
    page = Path("outputs/run/report.html").read_text("utf-8")
    assert str(saved.resolve()) in page
    assert f"{actual['eval/books/perplexity']:.4f}" in page


def test_tensorboard_without_its_package_is_refused_before_the_run(monkeypatch):
    real = importlib.util.find_spec
    assert tensorboard_dir(load_run_config("run.yaml")) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboard" else real(name))
    for override, folder in (("enable_tensorboard=true", "outputs/run/tensorboard"), ("tensorboard_dir=tb", "tb")):
        config = load_run_config("run.yaml", [f"{LOGGER}.{override}"])
        assert tensorboard_dir(config) == folder
        with pytest.raises(ConfigError, match=rf"{LOGGER}\.{override.split('=')[0]}: .*`pip install tensorboard`"):
            check_run(config)
    check_run(load_run_config("run.yaml"))

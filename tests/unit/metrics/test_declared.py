"""Metric declarations: complete, importable without torch, and in sync with the documentation's tables."""

import dataclasses
import shutil
from pathlib import Path
from typing import get_type_hints

import pytest

from megatron_wrap.config.schema.run import SECTION_PATHS, LoggerConfig, RunConfig
from megatron_wrap.metrics.declared import (
    ENGINE_METRICS,
    EVALUATION_LOSS,
    EVALUATION_METRIC,
    EVALUATION_PERPLEXITY,
    FLOW_METRIC,
    METRICS,
    console_order,
    console_text,
    metric_info,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def metric_docs(load_script):
    return load_script("metric_docs")


def test_each_name_is_declared_once():
    names = [info.name for info in METRICS]
    assert len(set(names)) == len(names)
    assert [*ENGINE_METRICS] == [info.name for info in METRICS if info.name == info.name.lower()]


def test_undeclared_names_are_metrics_of_flows_or_evaluations():
    assert metric_info("grad_norm") is ENGINE_METRICS["grad_norm"]
    assert metric_info("eval/set/loss") is EVALUATION_LOSS
    assert metric_info("eval/set/rewards/margins") is metric_info("eval/set/grad_norm") is EVALUATION_METRIC
    assert metric_info("eval/set/perplexity") is EVALUATION_PERPLEXITY
    assert metric_info("rewards/margins") is FLOW_METRIC


def test_console_order_is_the_declared_order():
    examples = {info.name: info.console.example for info in reversed(METRICS) if info.console is not None}
    # names between the loss and the gradient norm keep their order
    middle = ["z_loss", "global_load_balancing_loss", "seq_load_balancing_loss", "load_balancing_loss"]
    middle += ["eval/NAME/METRIC", "eval/NAME/perplexity", "eval/NAME/loss", "METRIC"]
    fixed = [info.name for info in METRICS if info.name in examples and info.name not in middle]
    assert console_order(examples) == [*fixed[:2], *middle, *fixed[2:]]
    assert console_text("z_loss", examples["z_loss"]) == "z_loss 4.327"
    assert console_text("learning_rate", examples["learning_rate"]) == "lr 3.0e-4"


def test_console_omits_uninformative_values():
    omitted = {"loss_scale": 1.0, "tflops": 0.0999, "memory_max": 0.0, "memory_reserved": 3.0, "consumed_tokens": 5}
    assert [console_text(name, value) for name, value in omitted.items()] == [None] * 5


def test_config_keys_of_metrics_exist_and_every_switch_is_named():
    sections = get_type_hints(RunConfig)
    keys = {
        f"{path}.{field.name}"
        for section, path in SECTION_PATHS.items()
        for field in dataclasses.fields(sections[section])
    }
    named = {info.config_key for info in METRICS} - {None}
    assert named <= keys
    switches = {field.name for field in dataclasses.fields(LoggerConfig) if field.name.endswith("_to_metrics")}
    assert {f"megatron_wrap.logger.{switch}" for switch in switches} <= named


def test_tables_in_the_documentation_are_up_to_date(metric_docs):
    assert metric_docs.main(["--check"]) == 0, "run python scripts/metric_docs.py"


def test_each_language_documents_every_metric(metric_docs):
    for language in metric_docs.PAGES.values():
        assert language.meanings.keys() == {info.name for info in METRICS}


def test_outdated_page_is_detected_and_rewritten(metric_docs, tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    for name in metric_docs.PAGES:
        shutil.copy(ROOT / name, tmp_path / name)
    page = tmp_path / "docs/metrics.md"
    page.write_text(page.read_text(encoding="utf-8").replace("| `grad_norm` |", "| `gradient` |"), encoding="utf-8")
    assert metric_docs.main(["--check"], tmp_path) == 1
    assert "docs/metrics.md;" in capsys.readouterr().err
    assert "| `gradient` |" in page.read_text(encoding="utf-8")
    assert metric_docs.main([], tmp_path) == 0
    assert page.read_bytes() == (ROOT / "docs/metrics.md").read_bytes()


@pytest.mark.parametrize("page", ["no marker", "<!-- metrics: end -->\n<!-- metrics: begin -->\n"])
def test_page_without_markers_is_refused(metric_docs, page):
    with pytest.raises(ValueError, match="metrics: begin"):
        metric_docs.with_table(page, metric_docs.ENGLISH)

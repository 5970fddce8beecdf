"""`megatron-wrap inspect-data`, from the command line to the page, on small files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.cli.main import main
from megatron_wrap.config import load_run_config
from megatron_wrap.core.validation.samples import check_lengths
from megatron_wrap.data.inspect.inspection import Counts
from megatron_wrap.errors import DataError
from megatron_wrap.report.page import rendered

ROOT = Path(__file__).parents[3]
Run = Callable[..., str]


@pytest.fixture
def run(sample_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run(*arguments, config=..., code=0): the command's output, with the sample data in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("examples/data").mkdir(parents=True)
    shutil.copytree(sample_data, "examples/data/generated")

    def call(*arguments: str, config: str = "tiny-llama-sft", code: int = 0) -> str:
        capsys.readouterr()
        assert main(["inspect-data", str(ROOT / f"configs/{config}.yaml"), *arguments]) == code
        captured = capsys.readouterr()
        return captured.err if code else captured.out

    return call


def value(output: str, name: str) -> str:
    [result] = re.findall(rf"^{re.escape(name)} {{2,}}(\S.*)$", output, re.M)
    return str(result)


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


@pytest.mark.transformers
def test_the_command_prints_trained_tokens_and_writes_the_page(run):
    Path("mine.jsonl").write_text(
        "".join(
            json.dumps(row) + "\n"
            for row in [
                chat("Say <b>one</b>.", "One."),
                chat("Say two.", "Two."),
                chat("Say two.", "Two."),
                chat("Say nothing.", ""),
                {"messages": [{"role": "user", "content": "No answer"}]},
                {"messages": []},
            ]
        )
    )
    output = run("-n", "2", "megatron_wrap.data.train=mine.jsonl", "--output", "page.html")
    assert output.startswith("mine.jsonl:1  ")
    assert "[[One.<|end|>]]" in output
    assert output.count("[[") == 2
    assert "\x1b" not in output
    assert value(output, "samples read") == "6"
    assert value(output, "samples left out") == "1"
    assert value(output, "duplicates") == "1"
    for row in ("mine.jsonl:3 is mine.jsonl:2", "mine.jsonl:4", "mine.jsonl:5"):
        assert re.search(rf"^ +{re.escape(row)}$", output, re.M)
    assert re.search(r"^ +mine\.jsonl:6: .*empty", output, re.M)
    page = Path("page.html").read_text("utf-8")
    assert "<mark>One.&lt;|end|&gt;</mark>" in page
    assert "Say &lt;b&gt;one&lt;/b&gt;." in page
    assert page.count("<article") == 5
    assert re.search(r"data-labels=\"nothing_trained\"[\s\S]*No answer", page)


@pytest.mark.transformers
def test_colors_on_a_terminal(run, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    output = run("-n", "1", "--limit", "20")
    assert re.search(r"\x1b\[30;42m[^\x1b]*<\|end\|>\x1b\[0m", output)
    assert "[[" not in output
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in run("-n", "1", "--limit", "20")


@pytest.mark.transformers
def test_evaluation_sets_pairs_and_flows_without_text(run):
    of_set = run("-n", "0", "--split", "validation", "--limit", "50", "megatron_wrap.flow.loss_on=last_assistant")
    assert value(of_set, "samples read").startswith("50 of ")
    assert Path("outputs/tiny-llama-sft/inspect-data-validation.html").is_file()
    pairs = run("-n", "1", "--limit", "30", config="tiny-llama-dpo")
    assert pairs.count("[[") == 2
    assert value(pairs, "samples read").startswith("30 of ")
    mock = run("-n", "1", config="tiny-llama-mock")
    assert value(mock, "trained tokens, 100.0%") == value(mock, "tokens")


@pytest.mark.transformers
def test_a_wrong_input_is_one_error(run):
    assert run("--split", "validatoin", code=2).endswith("did you mean validation?\n")
    Path("bad.jsonl").write_text("{broken\n")
    assert "--output bad.jsonl/page.html: " in run("--output", "bad.jsonl/page.html", "--limit", "5", code=2)
    assert run("megatron_wrap.data.train=bad.jsonl", code=2).startswith("error: bad.jsonl:1: not JSON")
    assert "no training data" in run("megatron_wrap.data.train=null", code=2)


@pytest.mark.transformers
def test_the_validation_finds_a_pair_that_is_too_long_and_refused(run):
    """It encodes the samples as the flow does, in the same way as this command."""
    pairs = Path("examples/data/generated/preference-train.jsonl")
    pairs.write_text("".join(pairs.read_text("utf-8").splitlines(keepends=True)[:200]), "utf-8")
    overrides = ["megatron_wrap.flow.truncation=refuse", "megatron_lm.train.common.seq_length=1024"]
    config = ROOT / "configs/tiny-llama-dpo.yaml"
    check_lengths(load_run_config(config, overrides))
    with pytest.raises(DataError, match=r"preference-train\.jsonl:\d+: a sample has \d+ tokens"):
        check_lengths(load_run_config(config, [overrides[0], "megatron_lm.train.common.seq_length=64"]))


def test_the_charts_have_the_numbers_of_the_data():
    """Bars of counts with a line at the limit, and a bar divided in proportion."""
    numbers: dict[str, Any] = dict.fromkeys(("title", "subtitle"), "") | dict.fromkeys(
        ("numbers", "findings", "lengths", "efficiencies", "sources", "samples", "choices"), ()
    )
    template = ROOT / "megatron_wrap/cli/templates/inspect.html"

    def page(bins: list[int], limit: int, trained: int) -> str:
        counts = Counts(trained=trained, other=1)
        return rendered(template, counts=counts, bin_width=10, bins=bins, seq_length=limit, **numbers)

    html = page([2, 0, 4], 15, 3)
    assert re.findall(r'class="bar".*? height="([\d.]+)"', html) == ["50.0", "0.0", "100.0"]
    assert re.findall(r'class="limit" x1="([\d.]+)"', html) == ["1.5"]
    assert "20 to 29 tokens: 4" in html
    assert re.findall(r'class="share\S*" x="(\d+)" y="0" width="(\d+)"', html) == [("0", "3"), ("3", "1"), ("4", "0")]
    assert "trained: 3 (75.0%)" in html
    assert 'class="limit"' not in page([2], 11, 0)
    page([], 1, 0)

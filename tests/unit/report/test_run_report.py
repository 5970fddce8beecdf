"""`megatron-wrap report`: the curves have the numbers of the records, and a broken record is one error."""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest
from _html import checked

from megatron_wrap.cli.main import main
from megatron_wrap.report.page import Chart, Series, figure, thinned, ticks

LOSSES = [5.0, 4.0, 3.5, 3.25, 3.125]


def write_run(folder: Path, name: str, lr: str = "0.001", losses: list[float] = LOSSES) -> Path:
    """A run of a few steps, with an evaluation before the first and after the last one."""
    folder.mkdir()
    steps: list[dict[str, Any]] = [
        {"iteration": step, "loss": loss, "learning_rate": 1e-3 / step, "grad_norm": None, "global_batch_size": 4}
        | {"consumed_tokens": 1000 * step, "tokens_per_second": 10.0 * step, "elapsed_time": 0.5, "tflops": 2.0}
        for step, loss in enumerate(losses, 1)
    ]
    evaluations = [
        {"iteration": iteration, "eval/books/loss": loss, "eval/books/perplexity": 2.0 + loss}
        for iteration, loss in ((0, 6.0), (5, 3.5))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in (*steps, *evaluations)))
    texts = [{"iteration": 5, "prompt": "Call me", "text": "<b>Ishmael</b>."}]
    (folder / "samples.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in texts))
    facts = {
        "name": name,
        "flow": "gpt_pretrain",
        "train_iters": 10,
        "layout": {"tp": 2, "dp": 1},
        "processes": 2,
        "checkpoints": str(folder / "checkpoints"),
        "environment": {"platform": "cpu", "torch": "2.13.0"},
        "configuration": [
            ["megatron_lm.train.learning-rate.lr", lr, "run.yaml:7 (override)"],
            ["megatron_lm.train.common.seed", "1234", "configs/nest/common.yaml:9 (default)"],
        ],
    }
    (folder / "run.json").write_text(json.dumps(facts))
    return folder


def values_of(svg: str) -> list[list[tuple[float, float]]]:
    """(iteration, value) of the points of each curve, from the coordinates of a figure and its ranges."""
    left, right, low, high = map(float, re.search(r'data-range="([^"]+)"', svg)[1].split())  # type: ignore[index]
    return [
        [
            (left + float(x) / 1000 * (right - left), low + (1 - float(y) / 300) * (high - low))
            for x, y in re.findall(r"([\d.]+) ([\d.]+)", path)
        ]
        for path in re.findall(r'data-name="[^"]+" d="([^"]+)"', svg)
    ]


def figures_of(page: str) -> dict[str, str]:
    return {re.findall(r"<figcaption>([^<]*?) ?<", part)[0]: part for part in page.split('<figure class="plot">')[1:]}


def test_the_page_has_the_numbers_of_the_records(tmp_path, capsys):
    run = write_run(tmp_path / "one", "first")
    assert main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"page: {run}/report.html\n"
    page = (run / "report.html").read_text("utf-8")
    checker = checked(page)
    assert not re.search(r"url\(|@import|https?://", page)
    figures = figures_of(page)
    training, books = values_of(figures["loss"])
    assert training == [pytest.approx(point, abs=1e-2) for point in enumerate(LOSSES, 1)]
    assert books == [pytest.approx(point, abs=1e-2) for point in ((0, 6.0), (5, 3.5))]
    assert values_of(figures["learning_rate"])[0][1] == pytest.approx((2, 5e-4), rel=1e-3)
    assert values_of(figures["books/perplexity"])[0][0] == pytest.approx((0, 8.0), abs=1e-2)
    assert "grad_norm" not in figures  # never a finite number
    assert "consumed_tokens" not in figures
    text = checker.text
    for shown in ("5 of 10", f"{statistics.mean(LOSSES):.4f}", "3.5000 at 5", "5.00k", "TP 2", "<b>Ishmael</b>."):
        assert shown in text
    assert "learning-rate.lr0.001run.yaml:7 (override)" in text
    assert "None in " in text  # no checkpoints


def test_runs_share_charts_and_their_configurations_are_compared(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_run(Path("one"), "same", lr="0.001")
    write_run(Path("two"), "same", lr="0.004", losses=[2 * loss for loss in LOSSES])
    assert main(["report", "one", "two", "--output", "both.html"]) == 0
    page = Path("both.html").read_text("utf-8")
    text = checked(page).text
    first, second = values_of(figures_of(page)["loss"])
    assert [2 * value for _, value in first] == pytest.approx([value for _, value in second], abs=2e-2)
    assert "same (one)" in text
    assert "lr0.0010.004" in text
    assert "seed12341234" not in text
    assert main(["report", "one", "one"]) == 2
    assert "given twice" in capsys.readouterr().err


def test_a_line_that_a_killed_process_cut_off_is_left_out_and_named(tmp_path):
    run = write_run(tmp_path / "one", "first")
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"iteration": 6, "lo')
    assert main(["report", str(run)]) == 0
    page = (run / "report.html").read_text("utf-8")
    assert "metrics.jsonl:8: the last line is incomplete" in page
    assert len(values_of(figures_of(page)["loss"])[0]) == 5


@pytest.mark.parametrize(
    ("file", "content", "argument", "message"),
    [
        ("", "", "outputs/onn", r"outputs/onn: no such run; did you mean outputs/one\?"),
        ("", "", "nowhere/one", "nowhere/one: no such run; of its path only the working directory exists"),
        ("", "", "outputs", "outputs: no metrics.jsonl in it; give the folder"),
        ("", "", "run.yaml", "run.yaml: is a configuration, not a run; .* outputs/run"),
        (
            "metrics.jsonl",
            '{"iteration": 1, "loss": 2\n{"iteration": 2, "loss": 2}\n',
            "",
            r"jsonl:1: .*delete the line",
        ),
        ("metrics.jsonl", '{"iteration": 1, "loss": 2}\n{"loss": 3}\n', "", r"jsonl:2: .*integer iteration"),
        ("metrics.jsonl", '{"iteration": 1, "loss": "low"}\n', "", r"jsonl:1: .*loss is of type str"),
        ("metrics.jsonl", '{"iteration": 1, "loss": NaN}\n', "", r"jsonl:1: .*loss is nan"),
        ("metrics.jsonl", "", "", "metrics.jsonl: it has no steps and no evaluations yet"),
        ("run.json", "[1", "", "run.json: cannot be read .* delete it"),
    ],
)
def test_a_broken_record_is_one_error(tmp_path, monkeypatch, capsys, file, content, argument, message):
    monkeypatch.chdir(tmp_path)
    Path("outputs").mkdir()
    write_run(Path("outputs/one"), "first")
    if file:
        Path("outputs/one", file).write_text(content)
    assert main(["report", argument or "outputs/one"]) == 2
    error = capsys.readouterr().err
    assert re.search(message, error)
    assert error.startswith("error: ")
    assert error.count("\n") == 1


def test_many_steps_are_thinned_to_means_and_their_range():
    values = [float((7 * iteration) % 13) for iteration in range(2001)]
    points = thinned([*enumerate(values)], most=500)
    assert len(points) == 401
    for number, point in enumerate(points):
        part = values[5 * number : 5 * number + 5]
        assert (point.mean, point.low, point.high) == (pytest.approx(statistics.mean(part)), min(part), max(part))
    drawn = figure(Chart("loss", [Series("a", [*enumerate(values)])]))
    assert drawn["steps_per_point"] == 3
    assert len(drawn["curves"][0]["band"]) == 2 * len(drawn["curves"][0]["line"]) == 2 * 667


@pytest.mark.parametrize(("low", "high"), [(0, 1), (3.2, 3.9), (-5, 1234), (1e-9, 7e-6), (2, 2)])
def test_ticks_are_round_numbers_inside_the_range(low, high):
    numbers = ticks(low, high)
    assert 1 <= len(numbers) <= 6
    assert all(low <= value * (1 + 1e-9) and value <= high * (1 + 1e-9) + 1e-12 for value in numbers)
    for step in {round(b - a, 15) for a, b in itertools.pairwise(numbers)}:
        assert f"{step:.0e}"[0] in "125"


def test_a_constant_curve_and_a_single_point_are_drawn():
    for points in ([(1, 0.0), (2, 0.0)], [(7, -3.0)]):
        drawn = figure(Chart("loss", [Series("a", points)]))
        _, right, low, high = drawn["range"]
        drawn_points = [tuple(map(float, point.split())) for point in drawn["curves"][0]["line"]]
        values = [(x / 1000 * right, low + (1 - y / 300) * (high - low)) for x, y in drawn_points]
        assert values == [pytest.approx(point, abs=1e-2) for point in points]
        assert drawn["curves"][0]["band"] == []


def test_pictures_of_the_charts(tmp_path):
    from PIL import Image

    run = write_run(tmp_path / "one", "first")
    assert main(["report", str(run), "--png"]) == 0
    names = {path.name for path in run.glob("*.png")}
    assert names >= {"report-loss.png", "report-learning_rate.png", "report-books_perplexity.png"}
    with Image.open(run / "report-loss.png") as picture:
        assert picture.size == (1200, 675)
        assert len(picture.convert("RGB").getcolors(100_000) or []) > 10


def test_pictures_without_matplotlib_are_one_error(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "one", "first")
    for module in ("matplotlib.figure", "matplotlib.backends.backend_agg"):
        monkeypatch.setitem(sys.modules, module, None)
    assert main(["report", str(run), "--png"]) == 2
    assert "`pip install matplotlib`" in capsys.readouterr().err

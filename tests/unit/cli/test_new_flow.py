"""`megatron-wrap new-flow`: what it writes and what it refuses. tests/end_to_end runs what it has written."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from megatron_wrap.cli.main import main
from megatron_wrap.config import load_run_config
from megatron_wrap.core.validation.paths import check_run


def test_it_writes_a_flow_its_run_and_its_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["new-flow", "reward_flow", "--folder", "mine"]) == 0
    files = {path.name: path.read_text() for path in (tmp_path / "mine").iterdir()}
    assert sorted(files) == ["reward_flow.jsonl", "reward_flow.py", "reward_flow.yaml", "test_reward_flow.py"]
    commands = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()[1:]]
    assert commands == [
        "PYTHONPATH=mine python -m pytest mine/test_reward_flow.py",
        "PYTHONPATH=mine megatron-wrap check-parity mine/reward_flow.yaml",
        "PYTHONPATH=mine megatron-wrap train mine/reward_flow.yaml",
    ]
    classes = [node.name for node in ast.parse(files["reward_flow.py"]).body if isinstance(node, ast.ClassDef)]
    assert classes == ["RewardFlow"]
    config = load_run_config("mine/reward_flow.yaml")
    check_run(config)
    assert [source.path for source in config.data.train] == ["mine/reward_flow.jsonl"]
    flow = config.flow
    assert (flow.flow_key, flow.options) == ("reward_flow:RewardFlow", {"focus": 2.0})
    assert not any(word in text for text in files.values() for word in ("NAME", "CLASS", "DATA"))
    assert all(len(line) <= 120 for name, text in files.items() if name[-1] != "l" for line in text.splitlines())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("My-Flow", "'My-Flow' is not a module name"),
        ("class", "'class' is not a module name"),
        ("json", "'json' is the name of an installed module; choose another, such as my_json"),
    ],
)
def test_a_name_that_cannot_be_imported_is_refused(
    name: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["new-flow", name, "--folder", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())


def test_nothing_is_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "reward.yaml").write_text("mine")
    assert main(["new-flow", "reward", "--folder", str(tmp_path)]) == 2
    assert "reward.yaml: exists already" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["reward.yaml"]

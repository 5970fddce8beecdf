"""What examples/codeparrot counts as Python, and the picture of its loss; `scripts/drill/codeparrot.py` runs it."""

import ast
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from megatron_wrap.config import load_run_config
from megatron_wrap.config.checks.run import check_values

FOLDER = Path(__file__).parents[3] / "examples/codeparrot"


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"codeparrot_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("completion", "is_python"),
    [
        ("\n    x = 1\n    return x\nclass Cut", True),
        ("\n    x = 1\n", False),  # one statement
        ("\n    x = 1\n    return", False),  # its last line is not whole
        ("\n    if x:\n        return 1\nreturn (\n", True),  # what follows the block is not counted
        ("\n    x = (\n    return x\n", False),
        ("\nreturn 1\nreturn 2\n", False),
        ("\n    x = '\0'\n    y = 1\n", False),
    ],
)
def test_a_completion_is_python_of_more_than_one_statement(completion, is_python):
    completions = loaded("completions")
    assert completions.is_python("def hello_world():", completion) == is_python
    assert not any(completions.is_python(prompt, "") for prompt in completions.PROMPTS)


def test_the_code_is_without_docstrings(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    code = '''"""Module."""
class A:
    """Only a text."""
def f():
    """Text."""
    # comment
    return "kept"
'''
    text = ast.unparse(loaded("run").without_docstrings(ast.parse(code)))
    assert text == "class A:\n    pass\n\ndef f():\n    return 'kept'"


def test_the_curve_is_a_picture(tmp_path):
    rows = [{"iteration": step, "loss": 6 / step} for step in range(1, 9)]
    rows.insert(4, {"iteration": 4, "eval/validation/loss": 2.5})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded("curve").write_curve(tmp_path / "metrics.jsonl", tmp_path / "loss.svg", 5.0)
    tree = ElementTree.parse(tmp_path / "loss.svg")
    entropy, training, validation = tree.findall("{*}polyline")
    assert len(training.attrib["points"].split()) == 8
    assert len(validation.attrib["points"].split()) == 1
    assert len({point.split(",")[1] for point in entropy.attrib["points"].split()}) == 1


@pytest.mark.parametrize(("name", "millions"), [("cpu", 2.06), ("gpu", 111.0)])
def test_the_configurations_have_the_sizes_they_name(name, millions):
    required = ("megatron_wrap.data.train", "megatron_wrap.data.tokenizer", "megatron_lm.train.common.save")
    config = load_run_config(FOLDER / f"{name}.yaml", [f"{key}=any" for key in required])
    check_values(config)
    arch = config.arch
    layer = 12 * arch.hidden_size**2 + 13 * arch.hidden_size
    embeddings = (arch.vocab_size + arch.max_position_embeddings) * arch.hidden_size
    assert (arch.num_layers * layer + embeddings + 2 * arch.hidden_size) / 1e6 == pytest.approx(millions, abs=0.05)

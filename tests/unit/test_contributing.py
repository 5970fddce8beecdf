"""The worked examples of CONTRIBUTING.md, applied to a copy of the package and run there in processes of their own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.documentation, pytest.mark.transformers]  # in processes of their own

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^ *```(diff|python|yaml)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)

RUN = """\
megatron_lm:
  model:
    arch:
      __select__: tiny-llama
      __override__: {num_layers: 1, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4,
                     num_query_groups: 2, vocab_size: 60}
  train:
    common: {micro_batch_size: 2, global_batch_size: 4, seq_length: 16, train_iters: 10}
    learning-rate: {lr: 1e-2}
    dtype: {__select__: fp32}
megatron_wrap:
  init: {platform: cpu}
  flow: {__select__: FLOW}
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package, its configurations, tests and documentation; the examples have no file in common."""
    folder = tmp_path_factory.mktemp("contributing")
    for name in ("megatron_wrap", "configs", "docs", "scripts", "tests"):
        # compiled files spare a second of every process; files that another process is just writing are not copied
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.pyc.*"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


@pytest.fixture
def run(copy: Path) -> Run:
    """run("-m", "package.module", ...) or run("-c", code): Python with the copy, one process without a GPU."""

    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        unset = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        inherited = {name: value for name, value in os.environ.items() if name not in unset}
        ended = subprocess.run(
            [sys.executable, *words],
            cwd=copy,
            env={**inherited, "PYTHONPATH": str(copy), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended

    return run


def command(run: Run, *words: str, code: int = 0) -> str:
    """What `megatron-wrap` prints: on stdout, or on stderr where it ends with an error."""
    ended = run("-m", "megatron_wrap.cli.main", *words, code=code)
    return ended.stderr if code else ended.stdout


def apply_example(title: str, folder: Path) -> None:
    """Apply every block of a section, which must name exactly the files that its blocks change."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition(f"## Example: {title}\n")[2].partition("\n## ")[0]
    named = re.findall(r"`([^`]+)`", section.partition("Files touched:")[2])
    touched = []
    for kind, block in BLOCK.findall(section):
        first, _, rest = textwrap.dedent(block).partition("\n")
        mark, _, path = first.partition(" ")
        assert mark == ("+++" if kind == "diff" else "#"), first
        touched.append(path)
        if kind == "diff":
            apply_diff(folder / path, rest)
        else:
            assert not (folder / path).exists()
            (folder / path).write_text(rest, encoding="utf-8")
    assert sorted(named) == sorted(set(touched))
    assert touched


def apply_diff(path: Path, diff: str) -> None:
    """Apply hunks without line numbers: the lines that stand in the file already must stand in it once."""
    text = "\n" + path.read_text(encoding="utf-8")
    for hunk in re.split(r"^@@\n", diff, flags=re.MULTILINE):
        lines = hunk.splitlines()
        before, after = ("".join(f"\n{line[1:]}" for line in lines if line[:1] != mark) + "\n" for mark in "+-")
        assert text.count(before) == 1, f"{path.name} has {text.count(before)} times:{before}"
        text = text.replace(before, after)
    path.write_text(text[1:], encoding="utf-8")


def test_a_configuration_key(copy: Path, run: Run) -> None:
    apply_example("add a configuration key", copy)
    run("scripts/config_docs.py")
    (copy / "key.yaml").write_text(RUN.replace("FLOW", "minimal_mock"))
    key = "megatron_lm.train.learning-rate.lr_decay_fraction"

    explained = command(run, "explain", "key.yaml", key)
    kind = "a number or null, above 0 and at most 1"
    assert explained.startswith(f"{key} = null\n  type: {kind}\n  lr_decay_iters as a share of train_iters")
    assert "learning-rate.yaml" in explained
    refused = command(run, "explain", "key.yaml", f"{key}=much", code=2)
    assert f"command line {key}: must be a number or null" in refused

    # the contradiction, by the test that the example adds
    tests = ("tests/unit/config/checks/test_run_checks.py", "-k", "lr_decay_fraction")
    assert "1 passed" in run("-m", "pytest", "-p", "no:cacheprovider", *tests).stdout
    read = f"""if True:
        from megatron_wrap.config import load_run_config
        from megatron_wrap.config.schema import derived
        from megatron_wrap.config.checks.run import check_values
        from megatron_wrap.errors import ConfigError
        print([derived.lr_decay_iters(load_run_config("key.yaml", given)) for given in ([], ["{key}=0.5"])])
        try:
            check_values(load_run_config("key.yaml", ["{key}=0"]))
        except ConfigError as refusal:
            print(refusal)
    """
    assert run("-c", read).stdout == f"[10, 5]\ncommand line {key}: must be above 0 and at most 1, not 0.0\n"


def test_a_flow_with_an_option(copy: Path, run: Run) -> None:
    apply_example("add a flow with an option", copy)
    run("scripts/config_docs.py")
    (copy / "flow.yaml").write_text(RUN.replace("FLOW", "gpt_gce"))
    key = "megatron_wrap.flow.exponent"

    explained = command(run, "explain", "flow.yaml", key)
    assert explained.startswith(f"{key} = 0.7\n  type: a number\n  Toward 0: cross-entropy; 1: mean absolute error.")
    assert f"{key}: must be a number" in command(run, "explain", "flow.yaml", f"{key}=much", code=2)

    code = f"""if True:  # one process, which imports torch once
        import json, pytest, torch
        from megatron_wrap.cli.main import main
        from megatron_wrap.core import MegatronWrap
        from megatron_wrap.flow.gce import MegatronWrapGPTModelGCEFlow
        assert pytest.main(["-p", "no:cacheprovider", "tests/unit/flow/test_gce_flow.py"]) == 0
        assert MegatronWrapGPTModelGCEFlow.Config(flow_key="gpt_gce").exponent == 0.7
        assert main(["train", "flow.yaml", "{key}=2"]) == 2
        lengths = (5, 16, 9, 12)
        samples = [{{"input_ids": list(range(n)), "loss_mask": [0] + [1] * (n - 1)}} for n in lengths]
        with MegatronWrap("flow.yaml", overrides=["{key}=0.5"]) as wrap:
            wrap.initialize()
            wrap.setup_model_and_optimizer()
            rows = wrap.forward(samples)
            losses = [wrap.train(samples)["loss"] for _ in range(2)]
        kept = torch.cat([row["log_probs"][row["loss_mask"] == 1] for row in rows])
        assert len(kept) == sum(lengths) - len(lengths)
        print(json.dumps([*losses, float((1 - kept.exp().sqrt()).mean() / 0.5)]))
    """
    ended = run("-c", code)
    assert "1 passed" in ended.stdout
    assert "exponent is 2.0" in ended.stderr
    first, second, expected = json.loads(ended.stdout.splitlines()[-1])
    assert first == pytest.approx(expected, rel=1e-6)
    assert second < first


def test_a_hugging_face_family(copy: Path, run: Run) -> None:
    apply_example("add a Hugging Face family", copy)
    verify = """if True:
        import sys
        from pathlib import Path
        sys.path.insert(0, "tests/distributed")
        from _bridge_runs import make_folder
        from megatron_wrap.cli.main import main
        make_folder("arcee", Path("arcee"))
        sys.exit(main(["verify-hf", "arcee", "--json", "verdict.json"]))
    """
    run("-c", verify)
    verdict = json.loads((copy / "verdict.json").read_text())
    assert (verdict["model_type"], verdict["dtype"], verdict["tolerance"]) == ("arcee", "float32", 1e-4)
    assert verdict["weight_differences"] == []
    compared = {activation["name"]: activation["agrees"] for activation in verdict["activations"]}
    assert set(compared) >= {"embedding", "layer 0", "layer 1", "logits of sequence 0"}
    assert all(compared.values())
    assert verdict["weights"] == 3 + 2 * 8

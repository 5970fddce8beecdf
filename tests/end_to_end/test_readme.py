"""What the README and the pages under docs show is run: commands, their output, the Python program, the custom flow.

In a code block marked `bash` every line is run and has to succeed. In one marked `console` each `$ command` is run and
has to print what stands below it; the line numbers of YAML files may differ. `sh` marks what takes too long here.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name for name in ("README.md", "README-zh.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/data/README.md")
]
PAGES += sorted((ROOT / "docs").glob("*.md"))
PARALLEL = "megatron_lm.model.parallel"


def blocks(page: str, language: str) -> list[str]:
    """Content of the page's code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


def transcripts(page: str) -> list[tuple[str, str]]:
    """(command, what it prints) of the page's console blocks."""
    parts = [part for block in blocks(page, "console") for part in re.split(r"^\$ ", block, flags=re.M) if part]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


def without_line_numbers(text: str) -> str:
    return re.sub(r"\.yaml:\d+", ".yaml:N", text).strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A folder that looks like the checkout; what a command writes does not reach the real one."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def run(command: str | list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, shell=isinstance(command, str), cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True
    ) as process:
        try:
            out, err = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            process.terminate()  # the launcher ends its processes; killed, it would leave them
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        pytest.param(*transcript, id=transcript[0])
        for page in ("README.md", "docs/configuration.md", "docs/flows.md", "docs/checkpoints.md")
        for transcript in transcripts(page)
    ],
)
def test_a_command_prints_what_the_page_shows(command, expected):
    done = run(command, ROOT)  # explanations and refusals: they write nothing
    assert without_line_numbers(done.stdout + done.stderr) == without_line_numbers(expected)
    assert done.returncode == (2 if expected.startswith("error: ") else 0)


@pytest.mark.parametrize("command", [line for block in blocks("README.md", "bash") for line in block.splitlines()])
def test_a_command_of_the_readme_runs(command, checkout):
    done = run(command, checkout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_python_program_of_the_readme_runs(checkout):
    (program,) = blocks("README.md", "python")
    done = run([sys.executable, "-c", program], checkout)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (checkout / "outputs/tiny-llama-mock/metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2]
    named = re.findall(r"^\| (`[a-z_`, ]+`) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M)
    documented = {name for cell in named for name in re.findall(r"`([a-z_]+)`", cell)}
    assert set(lines[0]) - documented == {"mean_length"}  # the flow's own


def test_the_custom_flow_is_the_same_on_two_processes(checkout, tmp_path):
    """examples/custom_flow: two named terms over different weights, with one process and with tensor parallelism."""
    generator = random.Random(1)
    samples = [
        {"input_ids": [generator.randrange(4096) for _ in range(length)], "loss_mask": [0] * 3 + [1] * (length - 3)}
        for length in (40, 9, 25, 64)
    ]
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    common = [
        "megatron_lm.train.common.train_iters=2",
        "megatron_lm.train.common.global_batch_size=4",
        f"megatron_wrap.data.train={data}",
        "megatron_wrap.data.tokenizer=null",
        "megatron_wrap.init.platform=cpu",
    ]
    found = []
    for processes in (1, 2):
        output = tmp_path / str(processes)
        layout = [f"{PARALLEL}.tensor_model_parallel_size={processes}", f"megatron_wrap.logger.output_dir={output}"]
        command = ["megatron-wrap", "train", "examples/custom_flow/tiny-llama-max-z.yaml", *common, *layout]
        done = run(command, checkout, PYTHONPATH="examples/custom_flow")
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
        assert len(lines) == 2
        for line in lines:
            assert line["loss"] == pytest.approx(line["cross_entropy"] + 2e-4 * line["max_z"], rel=1e-6)
        found.append([(line["loss"], line["max_z"]) for line in lines])
    for one, two in zip(*found, strict=True):
        assert two == pytest.approx(one, rel=1e-5)


def test_the_preference_example_goes_from_one_algorithm_to_the_next(tmp_path, sample_data):
    (tmp_path / "examples" / "data").mkdir(parents=True)
    for name, target in (("configs", ROOT / "configs"), ("examples/dpo", ROOT / "examples/dpo")):
        (tmp_path / name).symlink_to(target)
    (tmp_path / "examples/data/generated").symlink_to(sample_data)
    few = [f"megatron_lm.train.common.{key}" for key in ("train_iters=2", "global_batch_size=4", "eval_iters=1")]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "examples/dpo/train.py", *few]
    done = run(command, tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+% of the validation pairs are ranked right$", done.stdout, re.M)
    assert "loaded weights of outputs/tiny-llama-sft/checkpoints" in done.stderr
    assert (tmp_path / "outputs/tiny-llama-dpo/checkpoints/reference/iter_0000000/metadata.json").is_file()


def test_both_languages_show_the_same_code():
    def code(page: str) -> list[str]:
        return re.findall(r"^```\w*\n.*?^```$", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)

    def numbers(page: str) -> list[str]:
        rows = re.findall(r"^\|.*\|$", (ROOT / page).read_text(encoding="utf-8"), re.M)
        return [number for row in rows for number in re.findall(r"\d[\d.,e-]*\d|\d", row)]

    assert code("README.md") == code("README-zh.md")
    assert numbers("README.md") == numbers("README-zh.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target

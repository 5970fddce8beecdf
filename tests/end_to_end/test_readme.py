"""What the README and the pages under docs show is run: commands, their output, the Python programs, the custom flow.

In a code block marked `bash` every line is run and has to succeed. In one marked `console` each `$ command` is run and
has to print what is below it; line numbers of YAML files and counts of the sample data may differ. `sh` marks what
takes too long here.
test_docs.py runs the examples of the API reference.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name for name in ("README.md", "README-zh.md", "CONTRIBUTING.md", "CHANGELOG.md", "examples/data/README.md")
]
PAGES += sorted((ROOT / "docs").rglob("*.md"))
DOCS = [str(page.relative_to(ROOT)) for page in PAGES if page.parent == ROOT or ROOT / "docs" in page.parents]
"""Pages whose commands are run; the languages show the same code."""
SCRIPTS_ALONE = ("docs/testing.md", "CONTRIBUTING.md")
"""Pages whose blocks marked `bash` are the test scripts themselves."""
PROGRAM = "docs/get-started.md"
PARALLEL = "megatron_lm.model.parallel"


def blocks(page: str, language: str) -> list[str]:
    """Content of the page's code blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)


def transcripts(page: str) -> list[tuple[str, str]]:
    """(command, what it prints) of the page's console blocks."""
    parts = [part for block in blocks(page, "console") for part in re.split(r"^\$ ", block, flags=re.M) if part]
    return [(command, output) for command, _, output in (part.partition("\n") for part in parts)]


def without_counts(text: str) -> str:
    """Without line numbers of YAML files, and counts of the sample data, whose text depends on the Python version."""
    text = re.sub(r"\.yaml:\d+", ".yaml:N", text)
    return re.sub(r"[\d,]+ rows\b|\d+ to \d+ tokens", "N", text).strip()


def new_checkout(folder):
    """A folder that looks like the checkout; what a command writes does not reach the real one."""
    for name in ("configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    return folder


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """One for the commands of a page and of the pages after it."""
    return new_checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def untouched_checkout(tmp_path_factory):
    """One in which nothing was trained: the real checkout may have outputs of the example."""
    return new_checkout(tmp_path_factory.mktemp("untouched"))


@pytest.fixture(scope="module")
def built_data() -> None:
    """The sample data where the pages have it; a clean clone lacks it."""
    subprocess.run([sys.executable, ROOT / "examples/data/build.py"], check=True)


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


def shown() -> list[Any]:
    """The transcripts of all pages; after the first of each command they run as documentation."""
    parameters, commands = [], set()
    for command, output in (transcript for page in DOCS for transcript in transcripts(page)):
        word = command.partition("megatron-wrap ")[2].split()[0]
        marks = pytest.mark.documentation if word in commands else ()
        parameters.append(pytest.param(command, output, id=command, marks=marks))
        commands.add(word)
    return parameters


@pytest.mark.parametrize(("command", "expected"), shown())
def test_a_command_prints_what_the_page_shows(command, expected, built_data, untouched_checkout):
    done = run(command, untouched_checkout)  # explanations, checks and refusals: they write nothing
    printed = (done.stdout + done.stderr).replace(f"{ROOT}{os.sep}", "")  # a checkout's paths are relative to it
    assert without_counts(printed) == without_counts(expected)
    assert done.returncode == (2 if expected.startswith(("error: ", "usage: ")) else 0)


@pytest.mark.documentation
@pytest.mark.parametrize("page", [page for page in DOCS if page not in SCRIPTS_ALONE and blocks(page, "bash")])
def test_the_commands_of_a_page_run(page, checkout):
    """One after another: a later one may need what an earlier one wrote."""
    for block in blocks(page, "bash"):
        for command in block.splitlines():
            done = run(command, checkout)
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"


@pytest.mark.documentation
def test_the_first_program_of_the_readme_runs(tmp_path, sample_data, linked):
    """As it is, under torchrun; the id leads to a tiny random model in a local cache of the hub."""
    (program,) = blocks("README.md", "python")
    assert len([line for line in program.splitlines() if line]) == 8
    repository = tmp_path / "hub/models--Qwen--Qwen3-0.6B"
    make_model(repository / "snapshots/0", sample_data / "tokenizer")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0")
    folder = linked(tmp_path / "checkout", "examples/from_hugging_face")
    (folder / "finetune.py").write_text(program)
    done = run(
        [*TORCHRUN, "finetune.py"],
        folder,
        HF_HUB_CACHE=str(tmp_path / "hub"),
        HF_HUB_OFFLINE="1",
        CUDA_VISIBLE_DEVICES="",
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"iteration 20/20 \| loss [\d.]+", done.stderr)
    weights = load_file(folder / "outputs/tuned/model.safetensors")
    before = load_file(repository / "snapshots/0/model.safetensors")
    assert weights.keys() == before.keys()
    assert all(torch.isfinite(weights[name]).all() and not torch.equal(weights[name], before[name]) for name in before)


def make_model(folder: Path, tokenizer: Path) -> None:
    """A tiny Qwen3 of random weights, and the tokenizer of the sample data."""
    code = """if True:
        import sys, transformers
        tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[2])
        config = transformers.Qwen3Config(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, head_dim=8,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512,
        )
        transformers.Qwen3ForCausalLM(config).save_pretrained(sys.argv[1])
        tokenizer.save_pretrained(sys.argv[1])
    """
    subprocess.run([sys.executable, "-c", code, folder, tokenizer], check=True)


def test_the_program_of_the_first_page_runs(checkout):
    (program,) = blocks(PROGRAM, "python")
    done = run([sys.executable, "-c", program], checkout)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (checkout / "outputs/tiny-llama-mock/metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2]
    named = re.findall(r"^\| (`[a-z_`, ]+`) \|", (ROOT / "docs/metrics.md").read_text(encoding="utf-8"), re.M)
    documented = {name for cell in named for name in re.findall(r"`([a-z_]+)`", cell)}
    assert set(lines[0]) - documented == {"mean_length"}  # the flow's own


def test_the_tutorial_shows_the_flows_that_there_are(tmp_path):
    """Without imports, comments, types, and docstrings where they are left out."""
    page = "docs/tutorials/write-a-flow.md"
    assert run("megatron-wrap new-flow focal_loss --folder .", tmp_path).returncode == 0
    for file in (ROOT / "examples/custom_flow/max_z_flow.py", tmp_path / "focal_loss.py"):
        (flow,) = bare_classes(file.read_text(encoding="utf-8"))
        assert [flow] in [bare_classes(block) for block in blocks(page, "python")], file.name


def bare_classes(source: str) -> list[str]:
    """The classes of a source, without docstrings and types of arguments."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
            for argument in node.args.args:
                argument.annotation = None
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            node.body = [each for each in node.body if not is_text(each)]
    return [ast.dump(node) for node in tree.body if isinstance(node, ast.ClassDef)]


def is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


@pytest.mark.documentation
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
        "megatron_lm.model.arch.vocab_size=4096",
        "megatron_wrap.init.platform=cpu",
    ]
    actual = []
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
        actual.append([(line["loss"], line["max_z"]) for line in lines])
    for of_one, two in zip(*actual, strict=True):
        assert two == pytest.approx(of_one, rel=1e-5)


FEW = [f"megatron_lm.train.common.{key}" for key in ("train_iters=2", "global_batch_size=4", "eval_iters=1")]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


@pytest.mark.documentation
def test_the_preference_example_goes_from_one_algorithm_to_the_next(tmp_path, linked):
    linked(tmp_path, "configs", "examples/dpo")
    done = run([*TORCHRUN, "examples/dpo/train.py", *FEW], tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^\d+% of the validation pairs are ranked right$", done.stdout, re.M)
    assert re.search(r"weights\b.*\boutputs/tiny-llama-sft/checkpoints", done.stderr)
    assert (tmp_path / "outputs/tiny-llama-dpo/checkpoints/reference/iter_0000000/metadata.json").is_file()


@pytest.mark.documentation
@pytest.mark.parametrize("flow", ["kto", "cpo", "orpo", "reward"])
def test_the_examples_of_preferences_start_from_the_fine_tuned_folder(tmp_path, linked, flow):
    linked(tmp_path, "configs", "examples/preference")
    few = (*FEW, "megatron_lm.train.common.sample_prompts=null")
    done = run([*TORCHRUN, "examples/preference/train.py", flow, *few], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "loaded weights from outputs/tiny-llama-sft/hf" in done.stderr
    shown = re.findall(r"([\w/]+): (-?[\d.]+) before, (-?[\d.]+) after 2 iterations", done.stderr)
    assert len(shown) == (2 if flow == "reward" else 3)
    assert any(before != after for _, before, after in shown)


def test_both_languages_show_the_same_code():
    def code(page: str) -> list[str]:
        return re.findall(r"^```\w*\n.*?^```$", (ROOT / page).read_text(encoding="utf-8"), re.M | re.S)

    def numbers(page: str) -> list[str]:
        rows = re.findall(r"^\|.*\|$", (ROOT / page).read_text(encoding="utf-8"), re.M)
        return [number for row in rows for number in re.findall(r"\d[\d.,e-]*\d|\d", row)]

    for page_in_english, other in (("README.md", "README-zh.md"), ("docs/metrics.md", "docs/metrics-zh.md")):
        assert code(page_in_english) == code(other)
        assert numbers(page_in_english) == numbers(other)


def test_the_navigation_of_the_site_repeats_no_name():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    names = re.findall(r"^ *- (.+?):", navigation, re.M)
    assert len(names) == len(set(names)) > 20


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target

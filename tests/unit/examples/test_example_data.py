"""The example's data: the builder's own command, its bytes, and transformers reading what it made."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_wrap.data.chat.encode import tokenize_chat
from megatron_wrap.data.chat.tokenizer import end_token_id, load_tokenizer, pad_token_id
from megatron_wrap.data.sources.json_files import JsonLines
from megatron_wrap.platform import choose_platform

pytestmark = pytest.mark.transformers

BUILD = Path(__file__).parents[3] / "examples" / "data" / "build.py"


def run_build(output: Path, *arguments: str, cwd: Path, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, str(BUILD), "--output", str(output), *arguments],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return result.stdout


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.matrix
def test_two_runs_write_the_same_bytes(sample_data, tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('a stray module of the working directory was imported')")
    (tmp_path / "math.py").write_text('def stray():\n    """No part of the standard library."""\n')
    out = run_build(tmp_path / "again", cwd=tmp_path, PYTHONHASHSEED="2", RAYON_NUM_THREADS="1")
    assert "made" in out
    again = files_of(tmp_path / "again")
    assert again == files_of(sample_data)
    assert set(again) == {
        "train.jsonl",
        "validation.jsonl",
        "preference-train.jsonl",
        "preference-validation.jsonl",
        "answers-train.jsonl",
        "answers-validation.jsonl",
        "manifest.json",
        "text_document.bin",
        "text_document.idx",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
        "tokenizer/chat_template.jinja",
    }


@pytest.mark.matrix
def test_a_whole_folder_is_kept_and_a_broken_one_made_again(sample_data, tmp_path):
    import shutil

    folder = tmp_path / "data"
    shutil.copytree(sample_data, folder)
    (folder / "train.jsonl").write_text("changed")
    assert "is there already" in run_build(folder, cwd=tmp_path)
    assert (folder / "train.jsonl").read_text() == "changed"
    (folder / "validation.jsonl").unlink()
    assert "made" in run_build(folder, cwd=tmp_path)
    assert files_of(folder) == files_of(sample_data)
    (folder / "train.jsonl").write_text("changed")
    run_build(folder, "--force", cwd=tmp_path)
    assert files_of(folder) == files_of(sample_data)


def test_the_conversations(sample_data):
    train, validation = JsonLines(sample_data / "train.jsonl"), JsonLines(sample_data / "validation.jsonl")
    assert len(train) + len(validation) >= 3000
    assert 100 <= len(validation) <= 0.1 * len(train)
    samples = [*train, *validation]
    assert all([message["role"] for message in sample["messages"]] == ["user", "assistant"] for sample in samples)
    questions, answers = zip(*([m["content"] for m in sample["messages"]] for sample in samples), strict=True)
    assert len(set(questions)) == len(set(answers)) == len(samples)
    assert 20 <= min(map(len, answers)) <= max(map(len, answers)) <= 800
    wordings = {question.split("`")[0] for question in questions}
    assert len(wordings) >= 8


@pytest.mark.parametrize("side", ["train", "validation"])
def test_a_pair_is_an_answer_and_its_words_in_disorder(sample_data, side):
    samples, pairs = JsonLines(sample_data / f"{side}.jsonl"), JsonLines(sample_data / f"preference-{side}.jsonl")
    assert len(samples) == len(pairs)
    for sample, pair in zip(samples, pairs, strict=True):
        assert pair["prompt"] + pair["chosen"] == sample["messages"]
        good, worse = (pair[kind][0]["content"] for kind in ("chosen", "rejected"))
        assert sorted(worse.split()) == sorted(good.split())
        assert worse.split() != good.split() or len(set(good.split())) == 1


def test_an_answer_is_the_documentation(sample_data):
    import inspect
    import textwrap

    actual = {}
    for sample in [*JsonLines(sample_data / "train.jsonl"), *JsonLines(sample_data / "validation.jsonl")]:
        question, answer = (message["content"] for message in sample["messages"])
        actual[question.split("`")[1].split("(")[0]] = answer
    assert actual["textwrap.dedent"] == inspect.getdoc(textwrap.dedent)
    assert actual["str.upper"] == inspect.getdoc(str.upper)
    assert inspect.getdoc(textwrap.TextWrapper).startswith(actual["textwrap.TextWrapper"])


def test_the_tokenizer(sample_data):
    tokenizer = load_tokenizer(sample_data / "tokenizer")
    assert len(tokenizer) == 4096
    assert (pad_token_id(tokenizer), tokenizer.bos_token_id, end_token_id(tokenizer)) == (0, 1, 2)
    text = "  def f(x):\n\t\treturn 'naïve 🦙'  \n\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    messages = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|begin|><|user|>\nHi<|end|>\n<|assistant|>\n"


def test_the_indexed_documents_are_the_answers(sample_data):
    platform = choose_platform("cpu")
    platform.install()
    try:
        from megatron.core.datasets.indexed_dataset import IndexedDataset
    finally:
        platform.uninstall()
    tokenizer, documents = load_tokenizer(sample_data / "tokenizer"), IndexedDataset(str(sample_data / "text_document"))
    samples = JsonLines(sample_data / "train.jsonl")
    assert len(documents) == len(samples)
    for index in (0, 1, len(samples) - 1):
        assert tokenizer.decode(documents[index]) == samples[index]["messages"][1]["content"] + "<|end|>"


def test_every_mask_is_the_answer_and_its_end(sample_data):
    tokenizer = load_tokenizer(sample_data / "tokenizer")
    for sample in JsonLines(sample_data / "validation.jsonl"):
        tokens = tokenize_chat(tokenizer, sample["messages"])
        learnt = [token for token, mask in zip(tokens.input_ids, tokens.loss_mask, strict=True) if mask]
        assert tokenizer.decode(learnt) == sample["messages"][1]["content"] + "<|end|>"


def test_long_docstrings_are_cut_at_paragraphs_then_lines():
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1]); import conversations as c;"
        "print(json.dumps([c.cap_answer(t) for t in json.loads(sys.argv[2])]))"
    )
    paragraph, line = "word " * 99 + "word", "x" * 79
    texts = ["short  \n end ", f"{paragraph}\n\n{paragraph}", "\n".join([line] * 20), "word " * 400, "x" * 900]
    result = subprocess.run(
        [sys.executable, "-c", code, str(BUILD.parent), json.dumps(texts)], capture_output=True, text=True, check=True
    )
    cut = json.loads(result.stdout)
    assert cut == ["short\n end", paragraph, "\n".join([line] * 10), ("word " * 160).strip(), "x" * 800]


def test_an_unwritable_folder_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    result = subprocess.run(
        [sys.executable, str(BUILD), "--output", str(tmp_path / "file" / "data")], capture_output=True, text=True
    )
    assert result.returncode == 2
    assert "choose another folder with --output" in result.stderr
    assert "Traceback" not in result.stderr

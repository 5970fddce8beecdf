"""The model card of an exported folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import EvalResult, ModelCard

from megatron_wrap.bridge.export.model_card import (
    FILE_NAME,
    TrainingRecord,
    card_text,
    command_line,
    hub_id,
    published,
    write_model_card,
)

RECORD = TrainingRecord(
    name="tuned",
    base_model="/home/someone/.cache/huggingface/hub/models--org--base/snapshots/0123abcd",
    base_quantization=None,
    base_checkpoint=None,
    data=[
        {"use": "training", "path": "org/chats", "kind": "hub"},
        {"use": "training", "path": "/home/someone/private/train.jsonl", "kind": "file"},
        {"use": "held_out", "path": "my_module:samples", "kind": "python"},
    ],
    flow="gpt_sft",
    flow_options={"loss_on": "assistant", "template": "'a | b'", "api_key": "abcdefgh"},
    versions={"torch": "2.13.0"},
    command="megatron-wrap train /home/someone/run.yaml a.hub_token=abcdefgh a.path=/home/someone/x/file",
    output_dir="/home/someone/outputs/tuned",
)
EVALUATION = (40, {"held_out/loss": 1.25, "held_out/accuracy": float("nan")})


def test_the_hub_reads_the_same_metadata_back(tmp_path: Path) -> None:
    write_model_card(tmp_path, RECORD, 50, EVALUATION, "text-generation")
    data = ModelCard.load(tmp_path / FILE_NAME).data
    assert data.to_dict() == ModelCard(card_text(RECORD, 50, EVALUATION, "text-generation")).data.to_dict()
    assert (data.base_model, data.datasets, data.library_name) == ("org/base", ["org/chats"], "transformers")
    assert (data.model_name, data.pipeline_tag, data.tags) == ("tuned", "text-generation", ["megatron-wrap", "gpt_sft"])
    assert data.eval_results == [EvalResult("text-generation", "held_out", "held_out", "loss", 1.25)]


def test_the_text_has_what_a_reader_asks_for() -> None:
    text = ModelCard(card_text(RECORD, 1050, EVALUATION, "text-generation")).text
    for row in (
        "| Base model | [org/base](https://huggingface.co/org/base) |",
        "| Steps | 1,050 |",
        "| Data of training | [org/chats](https://huggingface.co/datasets/org/chats), `train.jsonl` |",
        "| Data of held_out | `my_module:samples` |",
        "| loss_on | `assistant` |",
        "| template | `'a \\| b'` |",
        "## Evaluation after step 40",
        "| held_out/loss | 1.25 |",
        "| torch | 2.13.0 |",
        "megatron-wrap train run.yaml a.hub_token=[hidden] a.path=file",
    ):
        assert row in text


def test_nothing_private_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    content = card_text(RECORD, 1, None, "text-generation")
    for private in ("someone", "abcdefgh", "/home"):
        assert private not in content
    assert published("--key 0123456789abcdef hf_abcdefghijklmnopqrst") == "--key [hidden] [hidden]"
    assert published("'{hf_path: /data/m/model, password: pw}'") == "'{hf_path: model, password: [hidden]}'"
    assert published("https://me:pw@host/a/b ~/models/base") == "https://[hidden]@host/a/b base"


@pytest.mark.parametrize(
    "text", ["https://host/a/b", "and/or", "outputs/a/b", "max_tokens=5", "tokenizer=a/b", "/no_think", "100 tokens: 5"]
)
def test_what_is_no_secret_and_no_local_path_stays(text: str) -> None:
    assert published(text) == text


def test_a_folder_is_no_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs" / "hf").mkdir(parents=True)
    assert hub_id("outputs/hf") is None
    assert hub_id("org/base") == "org/base"


def test_a_card_of_the_owner_is_kept(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    write_model_card(tmp_path, RECORD, 1, None, "text-generation")
    write_model_card(tmp_path, RECORD, 2, None, "text-generation")
    assert "| Steps | 2 |" in path.read_text()
    path.write_text("# My model\n")
    write_model_card(tmp_path, RECORD, 3, None, "text-generation")
    assert path.read_text() == "# My model\n"


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/x/examples/train.py", "run.yaml", "a.b=1 2"], "megatron-wrap train run.yaml 'a.b=1 2'"),
        (["/x/bin/megatron-wrap", "profile", "run.yaml"], "megatron-wrap profile run.yaml"),
        (["/x/megatron_wrap/cli/main.py", "train"], "megatron-wrap train"),
        (["loop.py", "run.yaml"], "python loop.py run.yaml"),
    ],
)
def test_the_command_is_that_which_a_user_types(argv: list[str], command: str) -> None:
    assert command_line(argv) == command

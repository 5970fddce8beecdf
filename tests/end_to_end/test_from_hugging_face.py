"""A user's whole way: a Hugging Face folder in, fine-tuning with TP2, a Hugging Face folder out, which answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "from_hugging_face"


@pytest.fixture
def tuned(command, sample_data, tmp_path) -> dict[str, Path]:
    """The example's folders after its commands: begin, end, checkpoints."""
    begin, end, checkpoints = tmp_path / "begin", tmp_path / "end", tmp_path / "checkpoints"
    data = "megatron_wrap.data."
    made = command("make_model", begin, sample_data / "tokenizer", environment={"PYTHONPATH": str(EXAMPLE)})
    assert made.code == 0, made.err
    script = (
        *("torch.distributed.run", "--nproc-per-node", 2, EXAMPLE / "finetune.py", begin, end),
        f"{data}train={sample_data / 'train.jsonl'}",
        f"{data}validation={sample_data / 'validation.jsonl'}",
        "megatron_lm.train.common.train_iters=6",
        "megatron_lm.train.common.seq_length=128",
        f"megatron_lm.train.common.save={checkpoints}",
        "megatron_lm.train.common.save_interval=3",
        "megatron_wrap.checkpoint.export_hf=true",
        "megatron_wrap.checkpoint.keep=1",
        "megatron_wrap.init.platform=cpu",
    )
    ended = command(*script)
    assert ended.code == 0, ended.err
    assert "agrees with transformers" in ended.out + ended.err
    return {"begin": begin, "end": end, "checkpoints": checkpoints}


def weights(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    return model.state_dict()


@pytest.mark.matrix
def test_the_folder_that_comes_out_answers(tuned, command, tmp_path):
    import torch
    from transformers import AutoTokenizer, pipeline

    answer = pipeline("text-generation", str(tuned["end"]))("What is a list?", max_new_tokens=5, do_sample=False)
    assert answer[0]["generated_text"].startswith("What is a list?")
    tokenizer = AutoTokenizer.from_pretrained(tuned["end"])
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained(tuned["begin"]).chat_template
    before = json.loads((tuned["begin"] / "config.json").read_text())
    after = json.loads((tuned["end"] / "config.json").read_text())
    assert {**after, "transformers_version": before["transformers_version"]} == before
    assert (tuned["end"] / "generation_config.json").is_file()

    end, begin = weights(tuned["end"]), weights(tuned["begin"])
    assert all(not torch.equal(end[name], begin[name]) for name in end)

    # export_hf wrote one beside the last checkpoint, and the command writes the same from it
    assert [path.name for path in tuned["checkpoints"].glob("hf_*")] == ["hf_0000006"]
    ended = command("megatron_wrap.cli.main", "export-hf", tuned["checkpoints"], tmp_path / "again")
    assert ended.code == 0, ended.err
    for folder in (tuned["checkpoints"] / "hf_0000006", tmp_path / "again"):
        assert all(torch.equal(tensor, end[name]) for name, tensor in weights(folder).items())
        assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template

    verified = command("megatron_wrap.cli.main", "verify-hf", tmp_path / "again", "--json", tmp_path / "verdict.json")
    assert verified.code == 0, verified.err
    assert json.loads((tmp_path / "verdict.json").read_text())["agrees"] is True
    assert "the standard library's documentation" in verified.out


@pytest.mark.matrix
def test_a_folder_of_half_the_weights_is_refused_before_a_process_starts(command, tmp_path, sample_data):
    made = command("make_model", "model", sample_data / "tokenizer", environment={"PYTHONPATH": str(EXAMPLE)})
    assert made.code == 0, made.err
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    run = (
        "megatron_wrap.cli.main",
        "train",
        EXAMPLE / "sft.yaml",
        f"megatron_wrap.model_provider.hf_path={file.parent}",
    )
    ended = command(
        *run,
        f"megatron_wrap.data.train={sample_data / 'train.jsonl'}",
        f"megatron_wrap.data.validation={sample_data / 'validation.jsonl'}",
    )
    assert ended.code == 2
    assert "model.safetensors: is truncated" in ended.err
    assert "initialize" not in ended.out

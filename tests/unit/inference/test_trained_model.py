"""The run of a trained model, and the commands that use one, in one process."""

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.checkpoint.files.hashed_files import digest
from megatron_wrap.cli.chat import read_prompts
from megatron_wrap.cli.main import main
from megatron_wrap.inference.trained_model import read_model

pytestmark = pytest.mark.process_group

SAVE = """\
megatron_lm:
  model:
    arch:
      __select__: tiny-llama
      __override__: {num_layers: 1, hidden_size: 32, ffn_hidden_size: 64, num_attention_heads: 4, vocab_size: 257}
  train:
    common: {micro_batch_size: 2, global_batch_size: 2, seq_length: 16, train_iters: 1, save: checkpoints}
    learning-rate: {lr: 1e-2}
    dtype: {__select__: bf16}
megatron_wrap:
  init: {platform: cpu}
  data: {__select__: none, __override__: {tokenizer: tokenizer}}
  flow: {__select__: gpt_sft}
"""
TASK = """\
task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: questions.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}]
"""


@pytest.fixture(autouse=True)
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A byte-level tokenizer without a chat template, in the working directory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    monkeypatch.chdir(tmp_path)
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    by_bytes = Tokenizer(models.BPE(vocab=letters, merges=[]))
    by_bytes.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    by_bytes.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=by_bytes, eos_token="<|end|>")
    tokenizer.save_pretrained("tokenizer")
    return tokenizer


@pytest.fixture
def folder(tokenizer: Any) -> str:
    """A random Llama in bf16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=257, max_position_embeddings=64))
    model.to(torch.bfloat16).save_pretrained("model")
    tokenizer.save_pretrained("model")
    return "model"


def save_checkpoint() -> None:
    from megatron_wrap.core import MegatronWrap

    Path("run.yaml").write_text(SAVE)
    with MegatronWrap("run.yaml") as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        wrap.train([{"text": "a few words"}] * 2)
        wrap.save()


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that a mistake ends."""
    assert main(arguments) == 2
    printed = capsys.readouterr().err.splitlines()
    (message,) = [line for line in printed if line.startswith("error: ")]
    return message


def test_a_folder_and_a_checkpoint_keep_precision_length_and_tokenizer(folder: str) -> None:
    save_checkpoint()
    for source, length, tokenizer in (
        (folder, 64, folder),
        ("run.yaml", 16, "tokenizer"),
        ("checkpoints", 16, "tokenizer"),
    ):
        config = read_model(source, num_processes=6)
        assert (config.train.seq_length, config.train.global_batch_size, config.dtype.bf16) == (length, 6, True)
        assert config.data.tokenizer == tokenizer
    assert not read_model(folder, ["megatron_lm.train.dtype.__select__=fp32"]).dtype.bf16


def test_code_that_only_a_checkpoint_names_is_not_imported(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_checkpoint()
    checkpoint = Path("checkpoints/iter_0000001")
    named = "provider_key: foreign_code:provider"
    saved, count = re.subn(r"provider_key: gpt_model", named, (checkpoint / "resolved.yaml").read_text())
    assert count == 1
    (checkpoint / "resolved.yaml").write_text(saved)
    facts = json.loads((checkpoint / "megatron_wrap.json").read_text())
    facts = {**facts, "files": {}, "hashes": {}}
    (checkpoint / "megatron_wrap.json").write_text(json.dumps({**facts, "digest": digest(facts)}))
    Path("foreign_code.py").write_text("open('marker', 'w')\nfrom megatron_wrap.model.gpt_provider import *\n")
    monkeypatch.syspath_prepend(".")
    for arguments in (("export-hf", str(checkpoint), "out"), ("export-hf", "run.yaml", "out"), ("chat", "checkpoints")):
        message = failure(capsys, *arguments)
        assert "iter_0000001: its model is built by foreign_code:provider" in message
        assert "give the YAML of the run" in message
    assert not Path("marker").exists()
    override = "megatron_wrap.model_provider.provider_key=foreign_code:provider"
    assert read_model("checkpoints", [override]).model_provider.provider_key == "foreign_code:provider"
    Path("run.yaml").write_text(SAVE + f"  model_provider: {{__override__: {{{named}}}}}\n")
    assert read_model("run.yaml").model_provider.provider_key == "foreign_code:provider"


def test_a_file_of_prompts_is_completed(folder: str, capfd: pytest.CaptureFixture[str]) -> None:
    Path("prompts.jsonl").write_text('{"prompt": "It was", "id": 7}\n\n"Once"\n')
    words = ["--max-new-tokens", "3", "megatron_wrap.init.platform=cpu"]
    assert main(["chat", folder, "--prompts", "prompts.jsonl", "--output", "answers.jsonl", *words]) == 0
    rows = [json.loads(line) for line in Path("answers.jsonl").read_text().splitlines()]
    assert [list(row) for row in rows] == [
        ["prompt", "id", "completion", "finish_reason"],
        ["prompt", "completion", "finish_reason"],
    ]
    assert "mock" not in capfd.readouterr().err.lower()


def test_a_task_of_the_harness_is_evaluated(folder: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    import lm_eval.evaluator
    import lm_eval.tasks

    # neither the thousands of tasks of the harness nor facts about the machine, which take seconds
    manager = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", manager)
    monkeypatch.setattr(lm_eval.evaluator, "add_env_info", lambda results: None)
    Path("tasks").mkdir()
    Path("tasks/text.yaml").write_text(TASK)
    Path("questions.jsonl").write_text('{"text": "It was."}\n{"text": "Once"}\n')
    words = ["--include-path", "tasks", "megatron_wrap.init.platform=cpu"]
    assert main(["eval", folder, "--tasks", "local_*", "--output", "results.json", "--log-samples", *words]) == 0
    assert "bits_per_byte" in capsys.readouterr().out
    results = json.loads(Path("results.json").read_text())
    assert results["config"]["model_dtype"] == "torch.bfloat16"
    assert len(results["samples"]["local_text"]) == 2
    assert 6 < results["results"]["local_text"]["bits_per_byte,none"] < 10  # 8 of a uniform model
    assert "did you mean local_text" in failure(capsys, "eval", folder, "--tasks", "local_texts", *words)


def test_mistakes_are_one_sentence(folder: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from megatron_wrap.cli import eval as command

    assert "'./nothing' is neither a checkpoint nor a Hugging Face folder" in failure(capsys, "chat", "./nothing")
    Path("bad.jsonl").write_text('"fine"\n{"text": "no prompt"}\n')
    assert "bad.jsonl:2: " in failure(capsys, "chat", folder, "--prompts", "bad.jsonl")
    assert "missing.jsonl: cannot be read" in failure(capsys, "chat", folder, "--prompts", "missing.jsonl")
    assert "--output" in failure(capsys, "chat", folder, "--output", "answers.jsonl")
    cpu = "megatron_wrap.init.platform=cpu"
    assert "needs a chat template" in failure(capsys, "chat", folder, "--system", "Be brief.", cpu)
    Path("bare").mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(folder, name), "bare")
    assert "no tokenizer" in failure(capsys, "chat", "bare", cpu)
    assert "no tokenizer" in failure(capsys, "eval", "bare", "--tasks", "any", cpu)
    values = "megatron_wrap.model_provider.provider_key=gpt_value_model"
    assert "returns scores" in failure(capsys, "chat", folder, values)
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'megatron-wrap[eval]'" in failure(capsys, "eval", folder, "--tasks", "arc_easy")


@pytest.mark.parametrize("line", ["[]", "3", '{"prompt": ""}', '{"messages": []}', "{"])
def test_what_is_no_prompt_is_named_with_its_line(line: str) -> None:
    from megatron_wrap.errors import DataError

    Path("prompts.jsonl").write_text(f'"a text"\n{line}\n')
    with pytest.raises(DataError, match=r"prompts\.jsonl:2: "):
        read_prompts("prompts.jsonl")

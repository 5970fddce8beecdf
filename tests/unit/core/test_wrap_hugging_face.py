"""The facade's verbs around Hugging Face folders, on one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.cli.main import main
from megatron_wrap.config.explain import explain
from megatron_wrap.core import MegatronWrap
from megatron_wrap.errors import CheckpointError, ConfigError, MegatronWrapError

pytestmark = pytest.mark.process_group

RUN = """\
megatron_lm:
  train:
    common: {micro_batch_size: 2, global_batch_size: 4, seq_length: 16, train_iters: 6}
    learning-rate: {lr: 1e-2}
    dtype: {__select__: fp32}
megatron_wrap:
  init: {platform: cpu}
  flow: {__select__: gpt_sft}
"""
SAMPLES = [{"input_ids": list(range(1, 14)), "loss_mask": [1] * 13}] * 4


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random Llama of one layer, with weights so large that each of them shows in the layer's output."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    sizes["initializer_range"] = 0.3
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    LlamaForCausalLM(LlamaConfig(**sizes, **ids, vocab_size=37, num_key_value_heads=2)).save_pretrained(
        tmp_path / "model"
    )
    return tmp_path / "model"


def started(folder: Path, *overrides: str) -> MegatronWrap:
    Path("hf.yaml").write_text(RUN)
    wrap = MegatronWrap.from_pretrained(folder, "hf.yaml", overrides)
    wrap.initialize()
    return wrap


def test_training_is_refused_if_the_model_differs(folder):
    import torch

    from megatron_wrap.engine import verify

    verify.TOLERANCE[torch.float32] = -1.0  # every comparison fails
    with (
        started(folder, "megatron_wrap.model_provider.verify_hf=true") as wrap,
        pytest.raises(CheckpointError, match=r"megatron_wrap\.model_provider\.verify_hf: .*embedding"),
    ):
        wrap.setup_model_and_optimizer()


def test_setup_model_evaluates_and_exports_and_does_not_train(folder, tmp_path):
    with started(folder) as wrap:
        wrap.setup_model()
        assert wrap.state.optimizer is None
        alone = wrap.evaluate({"set": SAMPLES})
        for verb in (lambda: wrap.train(SAMPLES), wrap.save):
            with pytest.raises(MegatronWrapError, match=r"wrap\.setup_model_and_optimizer"):
                verb()
    with started(folder) as wrap:
        wrap.setup_model_and_optimizer()
        assert wrap.evaluate({"set": SAMPLES}) == alone
        wrap.train(SAMPLES)
        trained = wrap.evaluate({"set": SAMPLES})
        wrap.save_pretrained(tmp_path / "out", dtype="bfloat16", max_shard_size=2000)
    assert trained != alone
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    with started(tmp_path / "out") as wrap:
        wrap.setup_model()
        rounded = wrap.evaluate({"set": SAMPLES})["eval/set/loss"]
    assert rounded == pytest.approx(trained["eval/set/loss"], rel=1e-2)


def test_a_second_export_replaces_the_first(folder, tmp_path):
    out = tmp_path / "out"
    with started(folder) as wrap:
        wrap.setup_model()
        wrap.save_pretrained(out, max_shard_size=2000)
        assert len(list(out.glob("model-*.safetensors"))) > 2
        wrap.save_pretrained(out)
        assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]


def test_export_errors(folder, tmp_path):
    (tmp_path / "file").write_text("")
    with started(folder) as wrap:
        wrap.setup_model()
        with pytest.raises(CheckpointError, match=r"model .*hf_path.*choose another"):
            wrap.save_pretrained(folder)
        with pytest.raises(CheckpointError, match=r"file/out"):
            wrap.save_pretrained(tmp_path / "file" / "out")
        with pytest.raises(ConfigError, match=r"max_shard_size 'five'.*5GB"):
            wrap.save_pretrained(tmp_path / "out", max_shard_size="five")
        with pytest.raises(ConfigError, match=r"dtype 'int8'.*float32, bfloat16, float16"):
            wrap.save_pretrained(tmp_path / "out", dtype="int8")
        with pytest.raises(ConfigError, match=r"gpt2: position_embedding_type"):
            wrap.save_pretrained(tmp_path / "out", family="gpt2")


def test_a_push_uploads_what_was_saved(folder, tmp_path, monkeypatch):
    import huggingface_hub

    class Hub:
        def create_repo(self, repo_id: str, private: bool | None, exist_ok: bool) -> None:
            assert (repo_id, private, exist_ok) == ("org/name", True, True)

        def upload_folder(self, repo_id: str, folder_path: Path, commit_message: str) -> Any:
            assert (repo_id, commit_message) == ("org/name", "hf, iteration 0")
            assert (folder_path / "model.safetensors").is_file()
            return type("Commit", (), {"commit_url": "address"})

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)

    with started(folder) as wrap:
        wrap.setup_model()
        assert wrap.push_to_hub("org/name", tmp_path / "out", private=True) == "address"
        monkeypatch.setattr(Hub, "create_repo", lambda *_, **__: 1 / 0)
        with pytest.raises(CheckpointError, match=r"org/name: division by zero"):
            wrap.push_to_hub("org/name", tmp_path / "out")


def test_a_trained_model_has_a_card_also_when_it_is_exported_later(folder, tmp_path, capfd):
    from huggingface_hub import ModelCard

    with started(folder, "megatron_lm.train.common.save=checkpoints") as wrap:
        wrap.setup_model()
        wrap.save_pretrained(tmp_path / "untrained")
        wrap.setup_model_and_optimizer()
        wrap.train(SAMPLES)
        evaluated = wrap.evaluate({"held_out": SAMPLES})
        wrap.save()
        wrap.save_pretrained(tmp_path / "trained")
    assert not (tmp_path / "untrained" / "README.md").exists()
    capfd.readouterr()
    assert main(["export-hf", "checkpoints", str(tmp_path / "later")]) == 0
    log = capfd.readouterr().err
    assert "of iteration 1: " in log
    assert "mock" not in log.lower()
    card = ModelCard.load(tmp_path / "trained" / "README.md")
    assert card.data.eval_results[0].metric_type == "loss"
    assert card.data.eval_results[0].metric_value == evaluated["eval/held_out/loss"]
    assert "| Base model | `model` |" in card.text
    assert "| Steps | 1 |" in card.text
    assert str(tmp_path) not in card.content
    later = ModelCard.load(tmp_path / "later" / "README.md")
    assert later.data.to_dict() == card.data.to_dict()
    assert later.text == card.text


def test_explain_gives_the_folder_as_the_origin_of_a_value(folder):
    from megatron_wrap.config.decode import load_tree

    Path("hf.yaml").write_text(RUN)
    text = explain(load_tree("hf.yaml", [f"megatron_wrap.model_provider.hf_path={folder}"]), "vocab_size")
    assert text.startswith("megatron_lm.model.arch.vocab_size = 37")
    assert "config.json (hf_path)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["export-hf", "nothing", "out"], "nothing: no such run or checkpoint"),
        (["export-hf", ".", "out"], ".: contains no checkpoint"),
        (["export-hf", "run.yaml", "out"], "megatron_lm.train.common.save is null, so the run has no checkpoint"),
        (["verify-hf", "./nothing"], "no Hugging Face folder './nothing'"),
        (["verify-hf", "."], "config.json: no such file"),
    ],
)
def test_errors_of_the_commands_are_one_line(capsys, arguments, message):
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert message in printed
    assert printed.count("\n") == 1


def test_a_wrong_weight_table_is_found_although_the_round_trip_is_exact(folder):
    """Gate and up are exchanged: import and export agree with each other, but the layer's output is wrong."""

    import dataclasses

    from megatron_wrap.bridge.families import llama
    from megatron_wrap.engine.verify import verify_hugging_face

    def exchanged(arch: Any) -> Any:
        table = dict(correct.parameters(arch))
        gated = table["decoder.layers.0.mlp.linear_fc1.weight"]
        table["decoder.layers.0.mlp.linear_fc1.weight"] = dataclasses.replace(gated, parts=gated.parts[::-1])
        return table

    correct = llama.FAMILY
    llama.FAMILY = dataclasses.replace(correct, parameters=exchanged)
    with started(folder) as wrap:
        wrap.setup_model()
        verdict = verify_hugging_face(wrap.state)
    assert not verdict.agrees
    assert not verdict.weight_differences
    assert verdict.first_difference is not None
    assert verdict.first_difference.startswith("layer 0 ")
    assert "layer 0" in next(line for line in verdict.table().splitlines() if line.endswith("DIFFERS"))

"""The facade's verbs around Hugging Face folders, on one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.cli.main import main
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

    from megatron_wrap.evaluation import verify

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


def test_a_second_export_replaces_the_first_and_errors_name_what_to_change(folder, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "file").write_text("")
    with started(folder) as wrap:
        wrap.setup_model()
        wrap.save_pretrained(out, max_shard_size=2000)
        assert len(list(out.glob("model-*.safetensors"))) > 2
        wrap.save_pretrained(out)
        assert [path.name for path in out.glob("*.safetensors*")] == ["model.safetensors"]
        for target, settings, error, message in (
            (folder, {}, CheckpointError, r"model .*hf_path.*choose another"),
            (tmp_path / "file" / "out", {}, CheckpointError, r"file/out"),
            (out, {"max_shard_size": "five"}, ConfigError, r"max_shard_size 'five'.*5GB"),
            (out, {"dtype": "int8"}, ConfigError, r"dtype 'int8'.*float32, bfloat16, float16"),
            (out, {"family": "gpt2"}, ConfigError, r"gpt2: position_embedding_type"),
        ):
            with pytest.raises(error, match=message):
                wrap.save_pretrained(target, **settings)


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
    from megatron_wrap.evaluation.verify import verify_hugging_face

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


# ---- tokens that are new to the weights ----

NEW = ("<a>", "<b>")
TRAIN, KEY = "megatron_lm.train.common", "megatron_wrap.data.new_tokens"


@pytest.fixture
def spare(folder: Path) -> Path:
    """The folder with a tokenizer of 33 tokens; its last 4 rows, of no token, are 0."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.weight[33:] = 0
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({"</s>": 0, **{f"w{index}": index for index in range(1, 33)}}, "</s>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(folder)
    return folder


def rows(wrap: MegatronWrap) -> dict[str, Any]:
    """Embedding and output layer by Hugging Face's names."""
    named = {name: tensor.clone() for name, tensor in wrap.export_weights()}
    return {name: named[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}


def begun(folder: Path, tokens: tuple[str, ...], *overrides: str) -> MegatronWrap:
    wrap = started(folder, f"{KEY}={json.dumps(tokens)}", *overrides)
    wrap.setup_model_and_optimizer()
    return wrap


def test_new_tokens_take_rows_of_no_token_which_a_resumed_run_does_not_begin_again(spare, capfd):
    """Only the first new rows are set; those of a checkpoint whose run did not have the token, too."""
    import torch

    with begun(spare, NEW, f"{TRAIN}.save=saved") as wrap:
        for weight in rows(wrap).values():
            expected = weight[:33].mean(0)
            assert torch.allclose(weight[33], expected, atol=1e-7)
            assert torch.equal(weight[33], weight[34])
            assert not weight[35:].any()
        wrap.train([{"input_ids": [1, 33, 2, 34], "loss_mask": [1] * 4}] * 4)
        wrap.save()
        trained = rows(wrap)
    assert "was not trained with 2 tokens of the tokenizer (ids 33 to 34)" in capfd.readouterr().err
    with begun(spare, NEW, f"{TRAIN}.save=saved") as wrap:
        assert all(torch.equal(weight, trained[name]) for name, weight in rows(wrap).items())
    assert "was not trained" not in capfd.readouterr().err
    with begun(spare, (*NEW, "<c>"), f"{TRAIN}.load=saved", f"{TRAIN}.finetune=true") as wrap:
        for name, weight in rows(wrap).items():
            assert torch.equal(weight[:35], trained[name][:35])
            assert torch.allclose(weight[35], trained[name][:35].mean(0), atol=1e-7)
        wrap.train([{"input_ids": [1, 35, 2, 34], "loss_mask": [1] * 4}] * 4)  # from the optimizer's copy of the rows
        assert all((weight[35] - trained[name][:35].mean(0)).abs().max() < 0.02 for name, weight in rows(wrap).items())
    for keys in ((f"{TRAIN}.save=saved",), (f"{TRAIN}.load=saved",)):
        with pytest.raises(CheckpointError, match=r"was saved without id 35 of this run's tokenizer"):
            begun(spare, (*NEW, "<c>"), *keys)


def test_a_tokenizer_with_more_tokens_than_that_of_the_folder_has_new_ones(spare, tmp_path):
    """Named as data.tokenizer, and not again where the folder's own tokenizer has them: an export of such a run."""
    import torch

    with begun(spare, NEW) as wrap:
        wrap.save_pretrained(tmp_path / "exported")
        mean = {name: weight[33] for name, weight in rows(wrap).items()}
    with started(spare, f"megatron_wrap.data.tokenizer={tmp_path}/exported") as wrap:
        wrap.setup_model()
        assert all(torch.equal(weight[34], mean[name]) for name, weight in rows(wrap).items())
    exported = tmp_path / "exported"
    from safetensors.torch import load_file, save_file

    weights = load_file(exported / "model.safetensors")
    weights["lm_head.weight"][33] = weights["model.embed_tokens.weight"][33] = 7.0
    save_file(weights, exported / "model.safetensors", metadata={"format": "pt"})
    with started(exported, f"megatron_wrap.data.tokenizer={spare}", f"{KEY}={json.dumps(NEW)}") as wrap:
        wrap.setup_model()
        assert all((weight[33] == 7.0).all() for weight in rows(wrap).values())


BOTH = "those of embed_tokens and lm_head stay frozen"


@pytest.mark.parametrize(
    ("keys", "frozen"),
    [
        ({}, BOTH),
        ({"modules_to_save": ["embed_tokens"]}, "those of lm_head stay frozen"),
        ({"trainable_token_indices": [33]}, BOTH),
        ({"trainable_token_indices": {"embed_tokens": [33, 34], "lm_head": [34, 33]}}, ""),
        ({"modules_to_save": ["embed_tokens", "lm_head"]}, ""),
    ],
)
def test_check_reports_new_rows_that_an_adapter_leaves_frozen(spare, capsys, keys, frozen):
    Path("hf.yaml").write_text(RUN)
    adapter = {"__select__": "lora", **keys}
    overrides = [f"megatron_wrap.adapter.{key}={json.dumps(value)}" for key, value in adapter.items()]
    hf_path = f"megatron_wrap.model_provider.hf_path={spare}"
    assert main(["check", "hf.yaml", hf_path, f"{KEY}={json.dumps(NEW)}", *overrides]) == 0
    shown = capsys.readouterr().out
    assert "(ids 33 to 34)" in shown
    assert ("stay frozen" in shown) == bool(frozen)
    assert frozen in shown

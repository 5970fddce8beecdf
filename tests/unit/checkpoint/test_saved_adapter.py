"""The adapter of a checkpoint, and its base, compared with the run's before a process starts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.bridge.adapters.run_adapter import run_adapter
from megatron_wrap.checkpoint.files.run_folder import CheckpointStore
from megatron_wrap.checkpoint.saved_adapter import base_record, check_adapter
from megatron_wrap.checkpoint.saved_run import check_checkpoints
from megatron_wrap.config import load_run_config, write_resolved
from megatron_wrap.errors import CheckpointError, ConfigError

CONFIG = Path(__file__).parents[3] / "configs" / "tiny-llama-sft.yaml"
ADAPTER, TRAIN = "megatron_wrap.adapter", "megatron_lm.train.common"
LORA = f"{ADAPTER}.__select__=lora"


def save(folder: Path, *overrides: str, **facts: Any) -> Path:
    """The files of a checkpoint that are read before a process starts."""
    store = CheckpointStore(folder)
    partial = store.begin(2)
    (partial / ".metadata").write_text("tensor metadata")
    (partial / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    write_resolved(load_run_config(CONFIG, overrides), partial / "resolved.yaml")
    return store.commit(partial, 2, facts)


def check(*overrides: str) -> None:
    check_checkpoints(load_run_config(CONFIG, overrides))


def test_a_misspelled_module_is_reported_by_the_adapter_not_by_the_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, LORA)
    overrides = (LORA, f"{TRAIN}.save={tmp_path}", f"{ADAPTER}.target_modules=[q_prj]")
    check(*overrides)
    with pytest.raises(ConfigError, match=r"did you mean q_proj\?"):
        run_adapter(load_run_config(CONFIG, overrides))


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        ("r=8", "r=16", "r was 8 when it was saved and is 16 here; write megatron_wrap.adapter.r=8, or"),
        ("r=8", "lora_alpha=16", "lora_alpha was 8 "),
        ("use_rslora=true", "r=8", "use_rslora was true when it was saved and is false"),
        ("target_modules=[q_proj, v_proj]", "r=8", r"'megatron_wrap.adapter.target_modules=\[q_proj, v_proj\]'"),
        (
            *("r=4", "target_modules=[q_proj]"),
            "r was 4 .*, target_modules was all-linear .*adapter.r=4 megatron_wrap.adapter.target_modules=all-linear",
        ),
        ("r=8", "init_lora_weights=pissa", "init_lora_weights was true when it was saved and is pissa here"),
        ("r=8", "rank_pattern={q_proj: 4}", r"rank_pattern was null .* is \{q_proj: 4\}"),
    ],
)
@pytest.mark.parametrize("key", ["save", "load"])
def test_another_adapter_is_refused(tmp_path: Path, key: str, saved: str, now: str, message: str) -> None:
    checkpoint = save(tmp_path, LORA, f"{ADAPTER}.{saved}")
    settings = (LORA, f"{TRAIN}.{key}={tmp_path}", *([f"{TRAIN}.save=null"] if key == "load" else []))
    with pytest.raises(CheckpointError, match=f"{checkpoint} contains another adapter: .*{message}"):
        check(*settings, f"{ADAPTER}.{now}")


def test_the_same_adapter_in_other_words_continues(tmp_path: Path) -> None:
    """Names instead of all-linear; dropout and learning rates are not the adapter's shape."""
    save(tmp_path, LORA, f"{ADAPTER}.lora_dropout=0.1")
    modules = "[q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]"
    settings = (f"{TRAIN}.save={tmp_path}", f"{ADAPTER}.target_modules={modules}", f"{ADAPTER}.loraplus_lr_ratio=4")
    check(LORA, *settings)


def test_a_run_with_an_adapter_and_one_without_do_not_continue_each_other(tmp_path: Path) -> None:
    save(tmp_path / "adapter", LORA)
    save(tmp_path / "base")
    with pytest.raises(CheckpointError, match=r"contains an adapter and this run has none"):
        check(f"{TRAIN}.save={tmp_path / 'adapter'}")
    with pytest.raises(CheckpointError, match=r"contains no adapter.*finetune: true"):
        check(LORA, f"{TRAIN}.save={tmp_path / 'base'}")
    begin = (LORA, f"{TRAIN}.save=null", f"{TRAIN}.load={tmp_path / 'base'}")
    check(*begin, f"{TRAIN}.finetune=true")
    check(*begin, f"{TRAIN}.no_load_optim=true")


def test_a_checkpoint_without_its_base_is_refused(tmp_path: Path) -> None:
    save(tmp_path, LORA, base={"path": "base", "digest": "0" * 64})
    with pytest.raises(
        CheckpointError, match=r"without the weights of that model; set megatron_wrap.model_provider.hf"
    ):
        check(LORA, f"{TRAIN}.save={tmp_path}")


def test_changed_weights_of_the_base_are_found_on_request(tmp_path: Path) -> None:
    """Their digest by headers is the same."""
    torch, safetensors = pytest.importorskip("torch"), pytest.importorskip("safetensors.torch")
    folder, file = tmp_path / "base", tmp_path / "base" / "model.safetensors"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    safetensors.save_file({"a": torch.zeros(8)}, file)
    contents = load_run_config(CONFIG, (LORA, f"{ADAPTER}.base_digest=weights"))
    contents = replace(contents, model_provider=replace(contents.model_provider, hf_path=str(folder)))
    without = replace(contents, adapter=replace(contents.adapter, base_digest="headers"))
    base = base_record(contents)
    assert "hashes" not in base_record(without)
    check_adapter(tmp_path, True, base, contents, True)
    file.write_bytes(file.read_bytes()[:-1] + b"\1")
    check_adapter(tmp_path, True, base, without, True)
    check_adapter(tmp_path, True, base_record(without), contents, True)
    with pytest.raises(CheckpointError, match=r"in .*base model.safetensors differs from its SHA-256"):
        check_adapter(tmp_path, True, base, contents, True)

"""Validation of checkpoints before a process starts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.checkpoint.files.run_folder import CheckpointStore
from megatron_wrap.checkpoint.saved_run import SavedRun, compare_models, find_checkpoint
from megatron_wrap.config import RunConfig, load_resolved, load_run_config, write_resolved
from megatron_wrap.errors import CheckpointError

CONFIG = Path(__file__).parents[3] / "configs" / "tiny-llama-mock.yaml"


def save(folder: Path, iteration: int, backend: str = "torch_dist") -> Path:
    store = CheckpointStore(folder)
    partial = store.begin(iteration)
    (partial / ".metadata").write_text("tensor metadata")
    (partial / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))
    return store.commit(partial, iteration, {})


def test_the_newest_checkpoint_of_a_run_or_the_one_of_a_path(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "missing") is None
    CheckpointStore(tmp_path).begin(1)  # and killed
    assert find_checkpoint(tmp_path) is None
    older, newest = save(tmp_path, 5), save(tmp_path, 10)
    assert find_checkpoint(tmp_path) == find_checkpoint(str(tmp_path)) == newest
    assert find_checkpoint(older) == older


def test_release_of_megatron_lm(tmp_path: Path) -> None:
    save(tmp_path, 0).rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert find_checkpoint(tmp_path) == tmp_path / "release"


@pytest.mark.parametrize("folder", [".", "iter_0000010", "release"])
def test_megatron_lm_torch_format_is_refused_with_the_conversion(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder / "mp_rank_00").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"mp_rank_00.*convert\.py.*--ckpt-format torch_dist"):
        find_checkpoint(tmp_path)


def test_other_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, backend="zarr")
    with pytest.raises(CheckpointError, match="format zarr"):
        find_checkpoint(tmp_path)


def test_a_folder_with_only_an_incomplete_checkpoint_is_an_error(tmp_path: Path) -> None:
    (save(tmp_path, 1) / ".metadata").unlink()
    for folder in (tmp_path, tmp_path / "iter_0000001"):
        with pytest.raises(CheckpointError, match=r"iter_0000001 .*incomplete.*\.metadata is missing"):
            find_checkpoint(folder)


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return load_run_config(CONFIG, ["megatron_lm.model.arch.vocab_size=4096"])


def test_the_same_model_is_accepted(tmp_path: Path, config: RunConfig) -> None:
    write_resolved(config, tmp_path / "resolved.yaml")
    compare_models(SavedRun(load_resolved(tmp_path / "resolved.yaml"), {}), config)


@pytest.mark.parametrize(
    ("key", "value", "parameter"),
    [
        ("num_layers", 6, "decoder.layers"),
        ("hidden_size", 512, "embedding.word_embeddings.weight"),
        ("ffn_hidden_size", 1024, "mlp.linear_fc1.weight"),
        ("num_query_groups", 8, "self_attention.linear_qkv.weight"),
        ("vocab_size", 5000, "embedding.word_embeddings.weight"),
        ("swiglu", False, "mlp.linear_fc1.weight"),
        ("apply_layernorm_1p", True, "layer_norm_weight"),
        ("untie_embeddings_and_output_weights", False, "output_layer.weight"),
    ],
)
def test_another_model_is_refused_with_key_values_and_parameter(
    config: RunConfig, key: str, value: Any, parameter: str
) -> None:
    saved = getattr(config.arch, key)
    other = replace(config, arch=replace(config.arch, **{key: value}))
    with pytest.raises(CheckpointError) as refused:
        compare_models(SavedRun(config.resolved, {}), other)
    for part in (f"megatron_lm.model.arch.{key}", f"was {saved}", f"is {value}", parameter, "resolved.yaml"):
        assert part in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value"), [("rotary_base", 5e5), ("max_position_embeddings", 8192), ("ffn_hidden_size", None)]
)
def test_keys_that_affect_no_parameter_may_differ(config: RunConfig, key: str, value: Any) -> None:
    compare_models(SavedRun(config.resolved, {}), replace(config, arch=replace(config.arch, **{key: value})))

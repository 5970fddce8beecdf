"""The run that saved a checkpoint, compared with this run before any process starts; and the checkpoint that this run
starts with. Needs neither torch nor Megatron-Core, and writes nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint.files.run_folder import (
    FORMAT_FILES,
    RESOLVED,
    CheckpointFolder,
    missing_part,
    read_manifest,
)
from megatron_wrap.checkpoint.saved_adapter import check_saved_adapter
from megatron_wrap.checkpoint.saved_schedule import compare_values
from megatron_wrap.config.decode import section_hints
from megatron_wrap.config.reading.yaml_nodes import inline_yaml, read_yaml
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.keys import check_value
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig
from megatron_wrap.data.chat.tokenizer import NewTokens, new_tokens, run_tokenizer
from megatron_wrap.errors import CheckpointError, DataError
from megatron_wrap.inside_folder import leaves_folder

_KEYS_OF_PARAMETERS = {
    "embedding.word_embeddings.weight": ("vocab_size", "hidden_size", "embedding_multiplier"),
    "embedding.position_embeddings.weight": ("position_embedding_type", "max_position_embeddings"),
    "decoder.layers": ("num_layers",),
    "mtp_block.layers": ("mtp_num_layers",),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": ("normalization", "apply_layernorm_1p"),
    "decoder.layers.self_attention.linear_qkv.weight": (
        *("num_attention_heads", "num_query_groups", "kv_channels", "rotary_interleaved", "attention_output_gate"),
    ),
    "decoder.layers.self_attention.linear_qkv.bias": ("add_qkv_bias", "add_bias_linear"),
    "decoder.layers.self_attn_bda.norm.weight": ("norm_placement",),
    "decoder.layers.self_attention.q_layernorm.weight": ("qk_layernorm", "qk_layernorm_type"),
    "decoder.layers.self_attention.core_attention.softmax_offset": ("softmax_type",),
    "decoder.layers.self_attention.in_proj.weight": (
        *("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    ),
    "decoder.layers.mlp.linear_fc1.weight": ("ffn_hidden_size", "swiglu", "geglu", "quick_geglu"),
    "output_layer.weight": ("untie_embeddings_and_output_weights",),
}
"""Parameter, in model order -> the architecture keys that determine the shape or meaning of saved weights and affect
it first. Keys for a longer context or another kernel (rotary_base, transformer_impl) may differ."""


@dataclass(frozen=True)
class SavedRun:
    """The content of `resolved.yaml` and of the manifest."""

    resolved: Mapping[str, Any]
    manifest: Mapping[str, Any]

    def section(self, name: str) -> Mapping[str, Any]:
        """The values of a section of `RunConfig`, such as `arch`."""
        return section_of(self.resolved, name)

    def value(self, name: str) -> Any:
        """The value of `section.key`; None if an older version did not have it."""
        section, _, key = name.partition(".")
        return self.section(section).get(key)

    def arch_selection(self) -> dict[str, Any]:
        """The content of `megatron_lm.model.arch` in a run's YAML that selects the saved architecture, with the sizes
        that were derived from tokenizer and sequence length."""
        values = dict(self.section("arch"))
        values["vocab_size"] = self.manifest.get("vocab_size", values["vocab_size"])
        if values["max_position_embeddings"] is None:
            values["max_position_embeddings"] = self.section("train")["seq_length"]
        # language-model-base gives no dimensions; the saved values override all of its keys
        return {"__select__": "language-model-base", "__override__": values}


def read_saved_run(checkpoint: Path) -> SavedRun | None:
    """The run that saved a checkpoint; None if that was Megatron-LM, which records no configuration of ours."""
    path = checkpoint / RESOLVED
    return SavedRun(read_yaml(path).plain(), read_manifest(checkpoint)) if path.is_file() else None


def section_of(resolved: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The values of a section in a resolved configuration; empty if an older version did not have the section."""
    values: Any = resolved
    for part in SECTION_PATHS[name].split("."):
        values = values.get(part) if isinstance(values, Mapping) else None
    return values if isinstance(values, Mapping) else {}


def find_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint to load from `folder`: the newest complete one in a run's folder, or `folder` itself if it is a
    checkpoint (`iter_0000010`). None if there is none.

    Raises:
        CheckpointError: the checkpoint has Megatron-LM's `torch` format or another one that cannot be read, or all
            checkpoints are incomplete.
    """
    root = Path(folder).expanduser()
    _refuse_torch_format(root)
    if any((root / name).is_file() for name in FORMAT_FILES):
        return _validated(root)
    store = CheckpointFolder(root)
    latest = store.latest()
    if latest is not None:
        return _validated(_in_store(root, store.find(latest) or store.folder_of(latest)))
    if store.tracked() == "release":  # Megatron-LM's name for weights without a training state
        return _validated(_in_store(root, root / "release"))
    present = store.present()
    return _validated(store.folder_of(present[-1])) if present else None


def existing_checkpoint(folder: str | os.PathLike[str]) -> Path:
    """`find_checkpoint`, which raises an error if there is no checkpoint."""
    checkpoint = find_checkpoint(folder)
    if checkpoint is None:
        raise CheckpointError(f"{folder}: contains no checkpoint; name a folder of checkpoints, or an iter_ folder")
    return checkpoint


def _in_store(root: Path, checkpoint: Path) -> Path:
    problem = leaves_folder(root, checkpoint.name)
    if problem is not None:
        raise CheckpointError(f"{root} {problem}; load that checkpoint by its own path")
    return checkpoint


def _validated(checkpoint: Path) -> Path:
    problem, backend = missing_part(checkpoint), None
    if problem is None:
        try:
            backend = json.loads((checkpoint / "metadata.json").read_text(encoding="utf-8")).get("sharded_backend")
        except (OSError, ValueError) as error:
            problem = f"metadata.json cannot be read: {error}"
    if problem is not None:
        raise CheckpointError(
            f"checkpoint {checkpoint} is incomplete: {problem}; copy it again, or use an older checkpoint"
        )
    if backend != "torch_dist":
        raise CheckpointError(
            f"checkpoint {checkpoint} has the format {backend}, which is not supported; load and save it in "
            "Megatron-LM with --ckpt-format torch_dist"
        )
    return checkpoint


def _refuse_torch_format(root: Path) -> None:
    """Refuse Megatron-LM's `torch` format, which has one file for each model-parallel rank and can be loaded on one
    layout only."""
    for pattern in ("mp_rank_*", "iter_*/mp_rank_*", "release/mp_rank_*"):
        path = min(root.glob(pattern), default=None)
        if path is not None:
            raise CheckpointError(
                f"{path} is a Megatron-LM checkpoint in the old torch format, one file per rank; convert it to a "
                "Hugging Face folder with Megatron-LM's tools/checkpoint/convert.py and start from that, or load and "
                "save it in Megatron-LM with --ckpt-format torch_dist"
            )


@dataclass(frozen=True)
class StartingCheckpoint:
    """The checkpoint that a run begins with."""

    path: Path
    resumes: bool
    """Whether the checkpoint is in `save`, so that the run continues it; False: it is in `load`."""


def starting_checkpoint(config: RunConfig) -> StartingCheckpoint | None:
    """The checkpoint in `save`, else in `load`; None if there is none.

    Raises:
        CheckpointError: as `find_checkpoint`.
    """
    for folder, resumes in ((config.train.save, True), (config.train.load, False)):
        path = None if folder is None else find_checkpoint(folder)
        if path is not None:
            return StartingCheckpoint(path, resumes)
    return None


def check_checkpoints(config: RunConfig) -> None:
    """Compare the run's model and adapter with those of the checkpoint that the run would resume or start from.

    Raises:
        CheckpointError: the models or the adapters differ, or the checkpoint cannot be loaded.
    """
    start = starting_checkpoint(config)
    saved = None if start is None else read_saved_run(start.path)
    if start is None or saved is None:
        return
    try:
        compare_models(saved, config)
        if start.resumes or not config.train.finetune:
            compare_index(saved, config)
    except CheckpointError as error:
        raise CheckpointError(f"{start.path}: {error}") from error
    continues = (start.resumes or not config.train.finetune) and not config.train.no_load_optim
    check_saved_adapter(start.path, saved.section("adapter"), saved.manifest.get("base"), config, continues)


def check_resumption(config: RunConfig) -> None:
    """Check that training would continue from the checkpoint that the run begins with.

    Raises:
        CheckpointError: there is one to resume and `resume` is never; or it has another learning-rate schedule.
    """
    start = starting_checkpoint(config)
    if start is None:
        return
    if start.resumes:
        refuse_resume(config)
    saved, train = read_saved_run(start.path), config.train
    if saved is None or train.no_load_optim or saved.section("train").get("no_save_optim"):
        return
    if start.resumes or not train.finetune:
        compare_schedules(saved, config)


def refuse_resume(config: RunConfig) -> None:
    """Raise a CheckpointError if `resume` is never; called with a checkpoint to resume in `save`."""
    if config.checkpoint.resume == "never":
        raise CheckpointError(
            f"{config.train.save} contains a checkpoint and megatron_wrap.checkpoint.resume is never; choose another "
            "folder, or set resume: auto"
        )


def compare_models(saved: SavedRun, config: RunConfig) -> None:
    """Compare the architecture that a checkpoint was saved with to the run's.

    Raises:
        CheckpointError: an architecture key differs; the message names the first such key, both values and the first
            parameter that it affects.
    """
    section, saved_arch = SECTION_PATHS["arch"], saved.section("arch")
    for parameter, key in ((parameter, key) for parameter, keys in _KEYS_OF_PARAMETERS.items() for key in keys):
        before, now = saved_arch.get(key), getattr(config.arch, key)
        if before is None or now is None or before == now:
            continue  # null is resolved later; a difference then shows in the tensor shapes, which the ranks compare
        if key == "max_position_embeddings" and config.arch.position_embedding_type != "learned_absolute":
            continue  # no parameter depends on it
        origin = config.origins.get(f"{section}.{key}")
        raise CheckpointError(
            f"the checkpoint is from another model, which differs from parameter {parameter} on: {section}.{key} was "
            f"{before} when it was saved and is {now} here{f' ({origin})' if origin else ''}; use the architecture "
            f"of the checkpoint ({RESOLVED} in its folder), or another load or save folder"
        )


def compare_index(saved: SavedRun, config: RunConfig) -> None:
    """Compare the number of windows that the index of indexed data is built for, on which their order depends.

    Raises:
        CheckpointError: the run would read the same prefixes in another order than the checkpoint's run.
    """
    if not derived.is_indexed(config.data):
        return
    keys_of_windows = {"data": ("data_key", "train", "split", "mock_data"), "train": ("seed", "seq_length")}
    for section, keys in keys_of_windows.items():
        before, now = saved.section(section), section_of(config.resolved, section)
        if any(before.get(key) != now.get(key) for key in keys):
            return  # other windows, whose order is new anyway
    length: dict[str, Any] = {
        name: saved.section("train").get(name)
        for name in ("train_iters", "train_samples", "rampup_batch_size", "global_batch_size")
    }
    train = replace(config.train, **length)
    data = replace(config.data, index_samples=saved.section("data").get("index_samples"))
    size_before = derived.indexed_samples(replace(config, train=train, data=data))
    size = derived.indexed_samples(config)
    if size_before != size:
        raise CheckpointError(
            f"its windows would come in another order: its index was built for {size_before} samples, and this run's "
            f"for {size}; set {SECTION_PATHS['data']}.index_samples: {size_before} to continue, or finetune: true to "
            "begin again"
        )


def compare_schedules(saved_run: SavedRun, config: RunConfig) -> None:
    """Compare the schedule of the run that saved a checkpoint, as its configuration defines it, with this run's; see
    `load_schedule`. A length in epochs is not known before the data is counted, and is not compared.

    Raises:
        CheckpointError: the two schedules differ; the message names the YAML keys.
    """
    saved = _with_saved(saved_run, config)
    follows = saved.optimizer.use_checkpoint_opt_param_scheduler  # its schedule is that of an earlier checkpoint
    optimizer = config.optimizer
    chosen = optimizer.override_opt_param_scheduler or optimizer.use_checkpoint_opt_param_scheduler
    if not (follows or chosen or saved.train.train_epochs is not None or config.train.train_epochs is not None):
        before, now = derived.schedule_values(saved), derived.schedule_values(config)
        compare_values(before, now, config.train.global_batch_size)


def _with_saved(saved_run: SavedRun, config: RunConfig) -> RunConfig:
    """The run's configuration with the saved values of the sections that determine the schedule."""
    sections = {}
    for section in ("train", "learning_rate", "optimizer"):
        hints = section_hints(section)
        values = {name: value for name, value in saved_run.section(section).items() if name in hints}
        typed = {name: check_value(value, hints[name]) for name, value in values.items()}
        sections[section] = replace(getattr(config, section), **typed)
    return replace(config, **sections)


def differing_runs(saved: SavedRun, config: RunConfig) -> list[str]:
    """Texts with both values of each key that differs, for keys that differ between runs but not within a resumed
    run."""
    texts = []
    for section, key in (("flow", "flow_key"), ("data", "data_key"), ("data", "train"), ("model_provider", "hf_path")):
        before, now = saved.section(section).get(key), section_of(config.resolved, section).get(key)
        if before != now:
            texts.append(f"{SECTION_PATHS[section]}.{key} was {inline_yaml(before)} and is {inline_yaml(now)}")
    return texts


def check_saved_vocabulary(checkpoint: Path, vocab_size: int) -> Mapping[str, Any]:
    """Compare the vocabulary of a checkpoint with the model's, without padding; returns the checkpoint's manifest.

    Raises:
        CheckpointError: they differ.
    """
    manifest = read_manifest(checkpoint)
    saved = manifest.get("vocab_size", vocab_size)
    if saved != vocab_size:
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of another model: embedding.word_embeddings.weight has {saved} rows there "
            f"and {vocab_size} here; use the checkpoint's tokenizer, or set megatron_lm.model.arch.vocab_size"
        )
    return manifest


def tokens_new_to_checkpoint(saved: SavedRun | None, config: RunConfig, vocab_size: int) -> NewTokens | None:
    """Tokens of the run's tokenizer that the checkpoint's run did not have and for which its model has rows; None if
    there are none, or if the checkpoint's tokenizer is not known.

    Args:
        saved: the run that saved the checkpoint; None: Megatron-LM.
        vocab_size: of both models, without padding.
    """
    data = {} if saved is None else saved.section("data")
    path, added = data.get("tokenizer"), tuple(data.get("new_tokens") or ())
    if path is None or (path, added) == (config.data.tokenizer, config.data.new_tokens):
        return None
    try:
        original = run_tokenizer(replace(config.data, tokenizer=path, new_tokens=added))
    except DataError:  # it was moved
        return None
    tokenizer = run_tokenizer(config.data)
    return None if tokenizer is None else new_tokens(tokenizer, original, vocab_size, vocab_size)


def refuse_new_tokens(checkpoint: Path, tokens: NewTokens | None) -> None:
    """Raise a CheckpointError if training would continue with further tokens."""
    if tokens is not None:
        raise CheckpointError(
            f"{checkpoint} was saved without {tokens.listed} of this run's tokenizer; use the tokenizer and "
            "megatron_wrap.data.new_tokens of the checkpoint, or start from its weights in a new save folder with "
            "train.common.load and finetune: true"
        )

"""What can be said about a checkpoint before any process starts: no torch, no Megatron-Core, nothing written."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint.store import FORMAT_FILES, RESOLVED, CheckpointStore, missing_part
from megatron_wrap.config import load_resolved
from megatron_wrap.config.schema import SECTION_PATHS, RunConfig
from megatron_wrap.errors import CheckpointError

_SHAPES: dict[str, str] = {
    "vocab_size": "embedding.word_embeddings.weight",
    "hidden_size": "embedding.word_embeddings.weight",
    "position_embedding_type": "embedding.position_embeddings.weight",
    "max_position_embeddings": "embedding.position_embeddings.weight",
    "num_layers": "decoder.layers",
    "normalization": "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "apply_layernorm_1p": "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
    "num_attention_heads": "decoder.layers.self_attention.linear_qkv.weight",
    "num_query_groups": "decoder.layers.self_attention.linear_qkv.weight",
    "kv_channels": "decoder.layers.self_attention.linear_qkv.weight",
    "rotary_interleaved": "decoder.layers.self_attention.linear_qkv.weight",
    "add_qkv_bias": "decoder.layers.self_attention.linear_qkv.bias",
    "add_bias_linear": "decoder.layers.self_attention.linear_qkv.bias",
    "qk_layernorm": "decoder.layers.self_attention.q_layernorm.weight",
    "ffn_hidden_size": "decoder.layers.mlp.linear_fc1.weight",
    "swiglu": "decoder.layers.mlp.linear_fc1.weight",
    "untie_embeddings_and_output_weights": "output_layer.weight",
}
"""Architecture key that gives saved weights their shape or meaning -> the first parameter that it touches, in the order
of the model. What a longer context or another kernel changes (rotary_base, transformer_impl) may differ."""


def find_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint that loading from `folder` takes: the newest whole one of a run's folder, or `folder` itself where
    it is one (`iter_0000010`). None: there is none.

    Raises:
        CheckpointError: of Megatron-LM's old form or another format, or all that is there is not whole.
    """
    root = Path(folder).expanduser()
    _refuse_old_form(root)
    if any((root / name).is_file() for name in FORMAT_FILES):
        return _whole(root)
    store = CheckpointStore(root)
    latest = store.latest()
    if latest is not None:
        return _whole(store.find(latest) or store.folder_of(latest))
    if store.tracked() == "release":  # Megatron-LM's name for weights without a training state
        return _whole(root / "release")
    present = store.present()
    return _whole(store.folder_of(present[-1])) if present else None


def check_checkpoints(config: RunConfig) -> None:
    """Hold the run's model against that of the checkpoint that it would go on or start from.

    Raises:
        CheckpointError: another model, or a form that cannot be loaded.
    """
    for folder in (config.train.save, config.train.load):
        found = find_checkpoint(folder) if folder is not None else None
        if found is not None:
            if (found / RESOLVED).is_file():
                try:
                    compare_models(load_resolved(found / RESOLVED), config)
                except CheckpointError as error:
                    raise CheckpointError(f"{found}: {error}") from error
            return  # a run that resumes does not look at `load`


def compare_models(saved_resolved: Mapping[str, Any], config: RunConfig) -> None:
    """Hold the architecture that a checkpoint was saved with against the run's.

    Args:
        saved_resolved: the tree of `resolved.yaml` beside the checkpoint (`config.load_resolved`).

    Raises:
        CheckpointError: the first key that makes it another model, with both values and the parameter that it touches.
    """
    section = SECTION_PATHS["arch"]
    saved: Any = saved_resolved
    for name in section.split("."):
        saved = saved.get(name) if isinstance(saved, Mapping) else None
    if not isinstance(saved, Mapping):
        return
    for key, parameter in _SHAPES.items():
        before, now = saved.get(key), getattr(config.arch, key)
        if before is None or now is None or before == now:
            continue  # what null stands for the ranks see in the shapes
        if key == "max_position_embeddings" and config.arch.position_embedding_type != "learned_absolute":
            continue  # no parameter has its size
        raise CheckpointError(
            f"the checkpoint is of another model, from its parameter {parameter} on: {section}.{key} was {before} "
            f"when it was saved and is {now} here{_place(config, f'{section}.{key}')}; take the architecture of the "
            f"checkpoint ({RESOLVED} beside it), or another load or save folder"
        )


def _place(config: RunConfig, path: str) -> str:
    source = config.sources.get(path)
    return f" ({source})" if source else ""


def _whole(checkpoint: Path) -> Path:
    missing = missing_part(checkpoint)
    if missing is not None:
        raise CheckpointError(
            f"checkpoint {checkpoint} is not whole: {missing}; copy it again, or name or keep an older one"
        )
    try:
        backend = json.loads((checkpoint / "metadata.json").read_text(encoding="utf-8")).get("sharded_backend")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {checkpoint} is not whole: metadata.json cannot be read: {error}") from error
    if backend != "torch_dist":
        raise CheckpointError(
            f"checkpoint {checkpoint} has the format {backend}, which cannot be read here; load and save it in "
            "Megatron-LM with --ckpt-format torch_dist"
        )
    return checkpoint


def _refuse_old_form(root: Path) -> None:
    """Megatron-LM's `torch` format has one file for each model-parallel rank and is bound to its layout."""
    for pattern in ("mp_rank_*", "iter_*/mp_rank_*", "release/mp_rank_*"):
        found = min(root.glob(pattern), default=None)
        if found is not None:
            raise CheckpointError(
                f"{found} is a Megatron-LM checkpoint of the old form, one file per rank; convert it to a Hugging Face "
                "folder with Megatron-LM's tools/checkpoint/convert.py and start from that, or load and save it in "
                "Megatron-LM with --ckpt-format torch_dist"
            )

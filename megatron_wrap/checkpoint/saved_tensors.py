"""Content of a checkpoint as Megatron-Core's sharded state: its tensors and objects, and their names.

Names are those of Megatron-LM (megatron/training/checkpointing.py): `model`, `optimizer`, `opt_param_scheduler`. Each
shard is described by its position in the unsharded tensor, so a checkpoint can be loaded on any layout.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy
import torch

from megatron_wrap.bridge.mapping.family import EMBEDDING, HEAD
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.engine.state.muon import MOMENTUM, Muon
from megatron_wrap.engine.state.state import BestEvaluation, Progress, RandomStates
from megatron_wrap.errors import CheckpointError
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.nn.adapters.trained_copies import trained_copies
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.platform.gpu.fp8_scales import readable_scales

CONTENT_METADATA: dict[str, Any] = {
    # Megatron-Core no longer supports saving its default, fully_sharded_model_space (dist_checkpointing/mapping.py)
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
SAVED_MODULES = "modules_to_save."
"""Prefix of the names of parameters that are trained whole in addition to adapters."""
ADAPTER_PART = re.compile(
    rf"_adapter\.(?:(\d+\.)?(?:lora_(?:A|B|magnitude)|initial_[AB])_|token_rows)|(^|\.){re.escape(SAVED_MODULES)}"
)
_ORIGINAL = "original."
"""Prefix of the keys in `model_entries` of the original values of parameters that are trained whole."""
RNG_KEY = "rng_state_of_rank"
OPTIMIZER_PREFIX = "optimizer.state."


def model_entries(
    chunks: Sequence[Any],
    parallel: ParallelState,
    tensor_per_layer: bool = False,
    *,
    base: bool = True,
    adapter: bool = True,
) -> dict[str, dict[str, Any]]:
    """Sharded state of each model chunk, named `model`, or `model0`, `model1`, ... in an interleaved pipeline.

    Args:
        tensor_per_layer: a tensor for each layer, else one tensor for a parameter of all layers, if these are alike.
        base: with all parameters that are not part of an adapter, and the originals of those that are trained whole.
        adapter: with the factors of adapters and the parameters that are trained whole, a tensor for each layer.

    FP8 scales of frozen layers change while the adapter is trained, so they are also included without the base.
    """
    metadata = {**_metadata(parallel), **({"non_homogeneous_layers": True} if tensor_per_layer else {})}
    names = ["model"] if len(chunks) == 1 else [f"model{index}" for index in range(len(chunks))]
    entries = {}
    for name, chunk in zip(names, chunks, strict=True):
        model = bare_model(chunk)
        whole = model.sharded_state_dict(metadata=metadata)
        copies = trained_copies(model)
        kept = {True: adapter, False: base}
        entries[name] = {
            key: entry
            for key, entry in whole.items()
            # the extra state of a layer of Transformer Engine; Megatron-Core's own layers have empty ones
            if key not in copies
            and (kept[is_of_adapter(key)] or (key.endswith("_extra_state") and entry.data is not None))
        }
        if copies and base:
            entries[name] |= {
                f"{_ORIGINAL}{key}": replace(whole[key], data=copy.original) for key, copy in copies.items()
            }
        if copies and adapter:
            per_layer = model.sharded_state_dict(metadata={**metadata, "non_homogeneous_layers": True})
            entries[name] |= {key: replace(per_layer[key], key=SAVED_MODULES + per_layer[key].key) for key in copies}
    return entries


def is_of_adapter(name: str) -> bool:
    """Whether a tensor of a checkpoint is a part of an adapter."""
    return ADAPTER_PART.search(name) is not None


def optimizer_entry(
    optimizer: Any,
    chunks: Sequence[Any],
    models: dict[str, dict[str, Any]],
    parallel: ParallelState,
    config: RunConfig,
    *,
    is_loading: bool,
) -> Any:
    """Sharded state of the optimizer. Collective.

    Args:
        models: from `model_entries` of the chunks, for the same save or load.
    """
    if config.train.freeze:  # a tensor of all layers must be complete
        models = model_entries(chunks, parallel, tensor_per_layer=True)
    for part in optimizer_parts(optimizer):
        _allocate_state(part)
    _align_steps(optimizer)
    # the state is allocated above; without the distributed optimizer is_loading would allocate it again, and fail for
    # SGD
    is_loading = is_loading and bool(config.optimizer.use_distributed_optimizer)
    return optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=_metadata(parallel))


def vocabulary_weights(loaded: Mapping[str, Any], config: RunConfig) -> list[torch.Tensor]:
    """This rank's shards of embedding and output layer, and the originals of those that are trained whole, among the
    `model_entries` of a checkpoint that was read."""
    names = (EMBEDDING,) if derived.has_value_head(config) else (EMBEDDING, HEAD)
    keys = {f"{prefix}{name}" for name in names for prefix in ("", _ORIGINAL)}
    models = [entries for name, entries in loaded.items() if name.startswith("model")]
    return [entries[key] for entries in models for key in sorted(keys & entries.keys())]


def without_fp8(entries: dict[str, Any]) -> dict[str, Any]:
    """The entries with the tensors of FP8 parameters in their nominal dtype, so that a checkpoint does not depend on
    `fp8_param_gather`; call it after `optimizer_entry`, which finds parameters by their tensors. Modifies the
    descriptions in place."""
    from megatron.core.dist_checkpointing.utils import force_all_tensors_to_non_fp8

    force_all_tensors_to_non_fp8(entries)
    return entries


def optimizer_parts(optimizer: Any) -> list[Any]:
    """The optimizers in a chained one, without those that have no parameters on this rank."""
    return [part for part in optimizer.chained_optimizers if part.optimizer is not None]


def optimizer_kind(config: RunConfig) -> tuple[str, str]:
    """Format of a run's optimizer state: (distributed | half precision | fp32, adam | sgd | muon)."""
    if config.optimizer.use_distributed_optimizer:
        kind = "distributed"
    else:
        kind = "half precision" if config.dtype.bf16 or config.dtype.fp16 else "fp32"
    return kind, config.optimizer.optimizer


def keeps_remainders(optimizer: Mapping[str, Any], dtype: Mapping[str, Any]) -> bool:
    """Whether an optimizer keeps, and saves, the 16 bits that the bf16 weights lack instead of fp32 weights.

    Args:
        optimizer, dtype: sections of a configuration.
    """
    aware = bool(optimizer.get("use_precision_aware_optimizer")) and bool(dtype.get("bf16"))
    return aware and optimizer.get("main_params_dtype", "fp32") == "fp32"


def saved_optimizer_kind(tensor_names: set[str]) -> tuple[str, str] | None:
    """Format of a saved optimizer state, as in `optimizer_kind`, from the names of its tensors; None if it has none."""
    kinds = {name.split(".")[2] for name in tensor_names if name.startswith(OPTIMIZER_PREFIX)}
    if not kinds:
        return None
    kind = "distributed" if "param" in kinds else "half precision" if "fp32_param" in kinds else "fp32"
    if MOMENTUM in kinds:
        return kind, "muon"
    return kind, "adam" if "exp_avg" in kinds else "sgd"


def common_entries(progress: Progress, best: BestEvaluation) -> dict[str, Any]:
    """Entries that are the same on all ranks: the counters, the best evaluation, and `iteration` under Megatron-LM's
    name."""
    entries = {"progress": asdict(progress), "best_evaluation": asdict(best)}
    return {"checkpoint_version": 3.0, "iteration": progress.iteration, **entries}


def saved_best(common: dict[str, Any]) -> BestEvaluation:
    """The best evaluation of a checkpoint's run; a default one if the checkpoint has none, as Megatron-LM's."""
    return BestEvaluation(**common.get("best_evaluation", {}))


def saved_progress(common: dict[str, Any]) -> Progress:
    """The counters of a checkpoint, including one written by Megatron-LM."""
    if "progress" in common:
        return Progress(**common["progress"])
    samples = getattr(common.get("args"), "consumed_train_samples", 0)
    return Progress(iteration=int(common.get("iteration", 0)), consumed_samples=int(samples))


def layout_record(parallel: ParallelState, platform_name: str) -> dict[str, Any]:
    """The layout as recorded in the manifest; random generator states are restored only on the same layout."""
    sizes = {name: getattr(parallel, name).size for name in ("tp", "pp", "cp", "dp", "ep")}
    return {**sizes, "virtual": parallel.virtual_size, "platform": platform_name}


def rng_entry(parallel: ParallelState, device: torch.device, is_loading: bool) -> Any:
    """The random generator states of this rank as a sharded object, indexed by (pp, tp, dp x cp) rank."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    axes = (parallel.pp, parallel.tp, parallel.dp_cp)
    return ShardedObject(
        RNG_KEY,
        None if is_loading else random_states(device),
        tuple(axis.size for axis in axes),
        tuple(axis.rank for axis in axes),
        replica_id=0,
    )


def random_states(device: torch.device) -> dict[str, Any]:
    """`RandomStates` as plain values and tensors."""
    states = RandomStates.now(device)
    name, keys, position, has_gauss, cached = states.numpy
    return {
        "python": states.python,
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": states.host,
        "device": states.device,
        "tracker": states.tracker,
    }


def restore_random_states(saved: dict[str, Any]) -> None:
    """Restore states from `random_states`, taken on the same kind of platform."""
    version, internal, gauss_next = saved["python"]
    name, keys, position, has_gauss, cached = saved["numpy"]
    RandomStates(
        python=(version, tuple(internal), gauss_next),
        numpy=(name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached),
        host=saved["torch"],
        device=saved["device"],
        tracker=saved["tracker"],
    ).restore()


def load_model(chunks: Sequence[Any], loaded: dict[str, Any]) -> None:
    """Load the `model_entries` of a checkpoint into the chunks.

    Raises:
        CheckpointError: a parameter is missing or unexpected, or an extra state is not that of an FP8 recipe.
    """
    for name, chunk in zip([name for name in loaded if name.startswith("model")], chunks, strict=True):
        extra_states = [  # None: of Megatron-Core's own layers
            (key, entry) for key, entry in loaded[name].items() if key.endswith("_extra_state") and entry is not None
        ]
        with readable_scales(extra_states) if extra_states else contextlib.nullcontext():
            tensors = {key: value for key, value in loaded[name].items() if not key.startswith(_ORIGINAL)}
            missing, unexpected = bare_model(chunk).load_state_dict(tensors, strict=False)
        copies = trained_copies(bare_model(chunk))
        for key, copy in copies.items():
            if _ORIGINAL + key in loaded[name]:
                copy.original.copy_(loaded[name][_ORIGINAL + key])
                if key not in tensors:  # a checkpoint of the base alone
                    copy.parameter.copy_(copy.original)
        # a checkpoint may contain only the adapter or only its base
        contained = {key in copies or is_of_adapter(key) for key in tensors if not key.endswith("_extra_state")}
        absent = [key for key in missing if key not in copies and is_of_adapter(key) in contained]
        # and one of the torch implementation lacks Transformer Engine's extra states
        wrong = [key for key in [*absent, *unexpected] if not key.endswith("_extra_state")]
        if wrong:
            raise CheckpointError(
                f"the checkpoint is from another model: {wrong[0]} is only in the "
                f"{'model' if wrong[0] in missing else 'checkpoint'}; use the architecture of the checkpoint"
            )


def _metadata(parallel: ParallelState) -> dict[str, Any]:
    return {**CONTENT_METADATA, "dp_cp_group": parallel.dp_cp.group}


def _align_steps(optimizer: Any) -> None:
    """Set Adam's step in groups without parameters, which do not count it: the groups of global rank 0 are saved, and
    that rank may have no trained parameters. Collective."""
    groups = [group for part in optimizer_parts(optimizer) for group in part.optimizer.param_groups]
    step = max(gather_objects(max((group.get("step", 0) for group in groups), default=0)))
    for group in groups:
        if step and not group["params"]:
            group["step"] = step


def _allocate_low_precision(adam: Any) -> None:
    """Allocate the state of Transformer Engine's FusedAdam as its first step does; Megatron-Core's init_state_fn calls
    `initialize_state` without its second argument."""
    for group in adam.param_groups:
        for parameter in group["params"]:
            if not adam.state[parameter]:
                adam.initialize_state(parameter, adam.store_param_remainders and parameter.dtype == torch.bfloat16)


def _allocate_state(part: Any) -> None:
    """Allocate the optimizer state of every parameter, zeros before the first step: Megatron-Core saves and loads only
    allocated state (optimizer/optimizer.py)."""
    if getattr(part.optimizer, "exp_avg_dtype", None) is not None and part.config.use_precision_aware_optimizer:
        _allocate_low_precision(part.optimizer)
        return
    if part.init_state_fn is not None:
        part.init_state_fn(part.optimizer, part.config)
        return
    if isinstance(part.optimizer, Muon):
        part.optimizer.allocate_state()
        return
    for group in part.optimizer.param_groups:  # SGD, for which Megatron-Core defines no init_state_fn
        for parameter in group["params"]:
            if group.get("momentum") and "momentum_buffer" not in part.optimizer.state[parameter]:
                part.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

"""What a checkpoint holds of a run, in Megatron-Core's terms: which tensors and objects, under which names.

Names are those of Megatron-LM (megatron/training/checkpointing.py): `model`, `optimizer`, `opt_param_scheduler`. Each
tensor is described by its place in the whole model, so any layout can read what any other wrote.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy
import torch

from megatron_wrap.config.schema import RunConfig
from megatron_wrap.engine.state import Progress
from megatron_wrap.errors import CheckpointError
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.parallel.state import ParallelState

CONTENT_METADATA: dict[str, Any] = {
    # the default of Megatron-Core, fully_sharded_model_space, cannot be saved any more (dist_checkpointing/mapping.py)
    "distrib_optim_sharding_type": "fully_reshardable",
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
RNG_KEY = "rng_state_of_rank"
OPTIMIZER_PREFIX = "optimizer.state."


def model_entries(chunks: Sequence[Any], parallel: ParallelState) -> dict[str, dict[str, Any]]:
    """Sharded state of each model chunk; `model`, or `model0`, `model1`, ... of an interleaved pipeline."""
    metadata = _metadata(parallel)
    names = ["model"] if len(chunks) == 1 else [f"model{place}" for place in range(len(chunks))]
    return {
        name: bare_model(chunk).sharded_state_dict(metadata=metadata) for name, chunk in zip(names, chunks, strict=True)
    }


def optimizer_entry(
    optimizer: Any, models: dict[str, dict[str, Any]], parallel: ParallelState, is_loading: bool, distributed: bool
) -> Any:
    """Sharded state of the optimizer over the `model_entries` of the same call. Collective.

    Args:
        distributed: the optimizer's state is sharded over replicas.
    """
    for part in optimizer_parts(optimizer):
        _allocate_state(part)
    # the state is allocated: a plain optimizer has nothing more to do for a load, and for SGD it would fail
    return optimizer.sharded_state_dict(models, is_loading=is_loading and distributed, metadata=_metadata(parallel))


def optimizer_parts(optimizer: Any) -> list[Any]:
    """The optimizers that a chained one is made of, those without parameters on this rank left out."""
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    return [part for part in parts if getattr(part, "optimizer", None) is not None]


def optimizer_form(config: RunConfig) -> tuple[str, str]:
    """How a run's optimizer keeps its state: (distributed | half precision | fp32, adam | sgd)."""
    if config.optimizer.use_distributed_optimizer:
        kind = "distributed"
    else:
        kind = "half precision" if config.dtype.bf16 or config.dtype.fp16 else "fp32"
    return kind, config.optimizer.optimizer


def saved_optimizer_form(tensor_names: set[str]) -> tuple[str, str] | None:
    """The form of a saved optimizer, from the names of its tensors; None: it has none."""
    kinds = {name.split(".")[2] for name in tensor_names if name.startswith(OPTIMIZER_PREFIX)}
    if not kinds:
        return None
    kind = "distributed" if "param" in kinds else "half precision" if "fp32_param" in kinds else "fp32"
    return kind, "adam" if "exp_avg" in kinds else "sgd"


def common_entries(progress: Progress) -> dict[str, Any]:
    """What is the same on all ranks: counters, and Megatron-LM's names for them."""
    return {"checkpoint_version": 3.0, "iteration": progress.iteration, "progress": asdict(progress)}


def saved_progress(common: dict[str, Any]) -> Progress:
    """The counters of a checkpoint, also of one that Megatron-LM wrote."""
    if "progress" in common:
        return Progress(**common["progress"])
    samples = getattr(common.get("args"), "consumed_train_samples", 0)
    return Progress(iteration=int(common.get("iteration", 0)), consumed_samples=int(samples))


def layout_facts(parallel: ParallelState, platform_name: str) -> dict[str, Any]:
    """The layout as it stands in the manifest; random generators are restored only into the same one."""
    sizes = {name: getattr(parallel, name).size for name in ("tp", "pp", "cp", "dp", "ep")}
    return {**sizes, "virtual": parallel.virtual_size, "platform": platform_name}


def rng_entry(parallel: ParallelState, device: torch.device, is_loading: bool) -> Any:
    """The random generators of this rank as a sharded object, one for each place (pp, tp, dp x cp) of the layout."""
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
    """States of Python's, numpy's, torch's, the device's and Megatron-Core's generators, plain values and tensors."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [str(name), [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state() if device.type == "cuda" else None,
        "tracker": dict(get_cuda_rng_tracker().get_states()),
    }


def restore_random_states(device: torch.device, saved: dict[str, Any]) -> None:
    """Set what `random_states` gave, on the same kind of platform."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    version, internal, gauss_next = saved["python"]
    random.setstate((version, tuple(internal), gauss_next))
    name, keys, position, has_gauss, cached = saved["numpy"]
    numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    torch.set_rng_state(saved["torch"])
    if device.type == "cuda":
        torch.cuda.set_rng_state(saved["device"])
    get_cuda_rng_tracker().set_states(saved["tracker"])


def load_model(chunks: Sequence[Any], loaded: dict[str, Any]) -> None:
    """Put the loaded `model_entries` into the chunks.

    Raises:
        CheckpointError: a parameter is missing or unknown.
    """
    for name, chunk in zip([name for name in loaded if name.startswith("model")], chunks, strict=True):
        missing, unexpected = bare_model(chunk).load_state_dict(loaded[name], strict=False)
        # Transformer Engine's extra states are not in what the torch implementation saved
        wrong = [key for key in [*missing, *unexpected] if not key.endswith("_extra_state")]
        if wrong:
            raise CheckpointError(f"the checkpoint is of another model: {wrong[0]} is in only one of the two")


def _metadata(parallel: ParallelState) -> dict[str, Any]:
    return {**CONTENT_METADATA, "dp_cp_group": parallel.dp_cp.group}


def _allocate_state(part: Any) -> None:
    """Give every parameter its optimizer state, zeros where no step was taken yet: Megatron-Core saves and loads only
    what is there (optimizer/optimizer.py)."""
    if part.init_state_fn is not None:
        part.init_state_fn(part.optimizer, part.config)
        return
    for group in part.optimizer.param_groups:  # SGD, for which Megatron-Core has no such function
        for parameter in group["params"]:
            if group.get("momentum") and "momentum_buffer" not in part.optimizer.state[parameter]:
                part.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

"""Loading of a run's state from Megatron-Core's distributed format, on any layout. Public functions are collective over
all ranks, unless they are for rank 0; a failure on one rank raises on all ranks.

A checkpoint stores some parameters in several parts, such as the halves of a fused SwiGLU weight. Megatron-Core's
ShardedTensorFactory describes each part as a view of the parameter, and a load reads directly into these views.
Megatron-Core then still concatenates the parts in a new tensor and copies it to the parameter; `merged_in_place` leaves
out both copies.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_wrap.bridge.loading.load_weights import fill_new_rows
from megatron_wrap.checkpoint import saved_tensors
from megatron_wrap.checkpoint.files.run_folder import RESOLVED, CheckpointStore, read_manifest
from megatron_wrap.checkpoint.files.verified_reading import BlockVerification
from megatron_wrap.checkpoint.save import FAILURES
from megatron_wrap.checkpoint.saved_adapter import check_adapter, check_others, compare_adapters
from megatron_wrap.checkpoint.saved_run import (
    check_saved_vocabulary,
    compare_models,
    existing_checkpoint,
    read_saved_run,
    refuse_new_tokens,
    tokens_new_to_checkpoint,
)
from megatron_wrap.checkpoint.saved_schedule import load_schedule, take_group_values
from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema.run import SECTION_PATHS
from megatron_wrap.data.chat.tokenizer import NewTokens
from megatron_wrap.engine.passes.parameters import quantize_parameters
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import CheckpointError
from megatron_wrap.parallel.agreement import agreed, on_rank_0
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.platform.megatron_core.checkpoint_reader import read_by
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.pools.threads import switching_often


@dataclass(frozen=True)
class LoadReport:
    """Result of a load; the same on every rank."""

    path: Path
    """The checkpoint."""
    iteration: int
    """Iteration at which the checkpoint was saved."""
    loaded: tuple[str, ...]
    """The parts that were loaded: weights, optimizer and schedule, random generators."""
    skipped: tuple[str, ...]
    """Requested parts that were not loaded, with the reason."""
    other_layout: bool
    """Whether the checkpoint was saved on another parallel layout or platform."""


def load_checkpoint(
    state: TrainingState,
    folder: str | os.PathLike[str],
    *,
    weights_only: bool = False,
    with_optimizer: bool = True,
    with_rng: bool = True,
) -> LoadReport:
    """Load a checkpoint of this model into a run; it may have been saved on another layout. Collective.

    Random generators are restored only on the layout and platform on which they were saved.

    Args:
        folder: a run's checkpoint folder (the newest complete checkpoint is loaded) or one checkpoint.
        weights_only: do not load iteration, optimizer, schedule and random generators.
        with_optimizer: load optimizer and schedule.
        with_rng: restore the random generators.

    Raises:
        CheckpointError: on every rank, if the checkpoint is missing, incomplete, in an unsupported format, from another
            model (the message names the first parameter that differs), or without a matching optimizer.
    """
    saved: SavedContent = on_rank_0(lambda: examine(folder, state.config, state.shape.vocab_size), failures=FAILURES)
    with_optimizer = with_optimizer and not weights_only
    layout = saved_tensors.layout_record(state.parallel, state.platform.name)
    other_layout = saved.layout is not None and saved.layout != layout
    skipped: list[str] = []
    if not weights_only:
        refuse_new_tokens(saved.path, saved.new_tokens)
    on_rank_0(lambda: _check_adapters(saved, state.config, with_optimizer), failures=FAILURES)
    models = saved_tensors.model_entries(state.chunks, state.parallel, base=saved.has_base, adapter=saved.has_adapter)
    request = saved.readable(models)
    if with_optimizer:
        _check_optimizer(saved, state.config)
        request["optimizer"] = saved_tensors.optimizer_entry(
            state.optimizer, state.chunks, models, state.parallel, state.config, is_loading=True
        )
    with_rng = with_rng and not weights_only
    if with_rng and (other_layout or saved.layout is None or not saved.has_rng):
        reason = "saved on another layout" if other_layout else "none in the checkpoint"
        skipped.append(f"random generators, {reason}")
        with_rng = False
    if with_rng:
        request["rng_state"] = saved_tensors.rng_entry(state.parallel, state.platform.device, is_loading=True)
    check_tensors(saved, saved_tensors.without_fp8(request))
    loaded = _read_and_set(state, saved, request, with_optimizer, with_rng, whole=not weights_only)
    if not weights_only:
        state.progress = saved_tensors.saved_progress(loaded)
        state.best = saved_tensors.saved_best(loaded)
    parts = [("weights", True), ("optimizer and schedule", with_optimizer), ("random generators", with_rng)]
    return LoadReport(
        saved.path, saved.iteration, tuple(name for name, done in parts if done), tuple(skipped), other_layout
    )


def _read_and_set(
    state: TrainingState,
    saved: SavedContent,
    request: dict[str, Any],
    with_optimizer: bool,
    with_rng: bool,
    *,
    whole: bool,
) -> dict[str, Any]:
    path = saved.path
    loaded = read_verified(request, path, state.parallel.dp_cp.group, state.platform.device, whole=whole)
    if saved.new_tokens is not None:
        fill_new_rows(saved_tensors.vocabulary_weights(loaded, state.config), saved.new_tokens, state.parallel.tp)
    with torch.no_grad(), agreed(f"checkpoint {path} cannot be loaded: {{}}", FAILURES):
        saved_tensors.load_model(state.chunks, loaded)
        if with_optimizer:
            from_checkpoint = state.config.optimizer.use_checkpoint_opt_param_scheduler
            take_group_values(loaded["optimizer"], state.optimizer.param_groups, from_checkpoint)
            state.optimizer.load_state_dict(loaded["optimizer"])
            if state.transformer_config.fp8_param:
                quantize_parameters(state.optimizer, state.chunks)
            load_schedule(state.lr_scheduler, loaded["opt_param_scheduler"], state.config.train.global_batch_size)
        elif state.optimizer is not None:
            # FP8 parameters have lost precision that the loaded tensors have
            state.optimizer.reload_model_params(loaded if state.transformer_config.fp8_param else None)
        if with_rng:
            saved_tensors.restore_random_states(loaded["rng_state"])
    return loaded


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint differs from what was saved."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"checkpoint {path} is damaged: {reason}; restore it, or load an older one")
        self.path = path
        self.reason = reason


def read_verified(
    request: dict[str, Any], path: Path, group: Any, device: torch.device, *, whole: bool
) -> dict[str, Any]:
    """Read a checkpoint with `read`, and compare its blocks with their hashes before a tensor in them is read.
    Collective.

    Args:
        device: of most tensors.
        whole: also compare the blocks that no rank reads.

    Raises:
        DamagedCheckpoint: on every rank, if a block differs; tensors of other blocks may have been overwritten.
        CheckpointError: on every rank, if any rank could not read.
    """
    message, rank, size = f"checkpoint {path} cannot be loaded: {{}}", dist.get_rank(), dist.get_world_size()
    hashes = on_rank_0(lambda: read_manifest(path).get("hashes"), failures=FAILURES)
    if hashes is None:
        logger.info_rank_0(f"checkpoint {path} has no hashes, so its content cannot be verified")
    tensors = {name: entry for name, entry in (hashes or {}).items() if name.endswith(".distcp")}
    loaded, failure = {}, None
    with switching_often(), BlockVerification(path, tensors, device) as verification:
        if whole:
            verification.begin(rank, size)
        try:
            with torch.no_grad(), read_by(verification), agreed(message, FAILURES):
                loaded = read(request, path, group)
            compared = gather_objects(verification.compared()) if whole else []
            if whole:
                with agreed(message, FAILURES):
                    verification.compare_rest(set().union(*compared), rank, size)
        except CheckpointError as error:  # on every rank
            failure = error
    reason = next((text for text in gather_objects(verification.damage) if text is not None), None)
    if reason is not None:
        raise DamagedCheckpoint(path, reason)
    if failure is not None:
        raise failure
    return loaded


@dataclass(frozen=True)
class SavedContent:
    """Content of a checkpoint, read on rank 0."""

    path: Path
    iteration: int
    shapes: dict[str, tuple[int, ...]]
    """Name of each tensor -> its unsharded shape."""
    objects: set[str]
    layout: dict[str, Any] | None
    has_optimizer: bool
    frozen: tuple[str, ...] | None
    """Value of `train.freeze` in the run that saved it; None: not recorded."""
    remainders: bool | None
    """Value of `saved_tensors.keeps_remainders` in the run that saved it; None: not recorded."""
    base: dict[str, Any] | None
    """Path and digest of the Hugging Face folder that the checkpoint of an adapter needs; None: it has all weights."""
    others: Mapping[str, Mapping[str, str]]
    """Name -> path and digest of each frozen adapter besides the trained one."""
    new_tokens: NewTokens | None
    """Tokens of this run that the run that saved it did not have."""

    @property
    def has_base(self) -> bool:
        """Whether it contains the weights for which an adapter is trained."""
        return self.base is None

    @property
    def has_adapter(self) -> bool:
        """Whether it contains an adapter."""
        return any(saved_tensors.is_of_adapter(name) for name in self.shapes if not name.startswith("optimizer."))

    @property
    def has_rng(self) -> bool:
        """Whether it contains states of random number generators."""
        return any(name.startswith(saved_tensors.RNG_KEY + "/") for name in self.objects)

    def readable(self, models: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The `model_entries` that the checkpoint contains: without the extra states of Transformer Engine that it
        lacks."""
        return {
            name: {key: entry for key, entry in entries.items() if self._has_extra_state(entry)}
            for name, entries in models.items()
        }

    def _has_extra_state(self, entry: Any) -> bool:
        is_extra = isinstance(entry, ShardedObject) and "_extra_state" in entry.unique_key
        return not is_extra or entry.unique_key in self.objects


def examine(folder: str | os.PathLike[str], config: RunConfig, vocab_size: int) -> SavedContent:
    """Find a checkpoint and read its metadata without its tensors; for rank 0.

    Args:
        folder: a run's checkpoint folder, or one checkpoint.
        config: of this run; its model must be that of the checkpoint.
        vocab_size: of this run, without padding.

    Raises:
        CheckpointError: the checkpoint is missing, incomplete or from another model.
    """
    path = existing_checkpoint(folder)
    tracked = CheckpointStore(folder).tracked()
    if tracked is not None and tracked.isdecimal() and path.name != f"iter_{int(tracked):07d}":
        logger.warning_rank_0(f"the newest checkpoint of {folder} is missing or incomplete; loading {path}")
    frozen = remainders = None
    saved_run = read_saved_run(path)
    if saved_run is not None:
        compare_models(saved_run, config)
        compare_adapters(path, saved_run.section("adapter"), config)
        frozen = tuple(saved_run.section("train").get("freeze", ()))
        remainders = saved_tensors.keeps_remainders(saved_run.section("optimizer"), saved_run.section("dtype"))
    manifest = check_saved_vocabulary(path, vocab_size)
    entries = dist_checkpointing.serialization.load_sharded_metadata(str(path)).values()
    common = dist_checkpointing.load_common_state_dict(str(path))
    return SavedContent(
        path=path,
        iteration=saved_tensors.saved_progress(common).iteration,
        shapes={entry.key: tuple(entry.global_shape) for entry in entries if isinstance(entry, ShardedTensor)},
        objects={entry.unique_key for entry in entries if not isinstance(entry, ShardedTensor)},
        layout=manifest.get("layout"),
        has_optimizer="optimizer" in common,
        remainders=remainders,
        base=manifest.get("base"),
        others=manifest.get("other_adapters", {}),
        frozen=frozen,
        new_tokens=tokens_new_to_checkpoint(saved_run, config, vocab_size),
    )


def _check_adapters(saved: SavedContent, config: RunConfig, with_optimizer: bool) -> None:
    check_adapter(saved.path, saved.has_adapter, saved.base, config, with_optimizer)
    if saved.others:
        check_others(saved.path, saved.others, config)


def _check_optimizer(saved: SavedContent, config: RunConfig) -> None:
    """Compare the optimizer state of a checkpoint with the one that this run would load."""
    kind, saved_kind = saved_tensors.optimizer_kind(config), saved_tensors.saved_optimizer_kind(set(saved.shapes))
    freeze, remainders = (
        sorted(config.train.freeze),
        saved_tensors.keeps_remainders(vars(config.optimizer), vars(config.dtype)),
    )
    difference = None
    if not saved.has_optimizer:
        difference = "contains no optimizer (no_save_optim); choose another checkpoint"
    elif saved_kind not in (None, kind):
        difference = (
            f"contains the state of a {' '.join(saved_kind)} optimizer, but this run has a {' '.join(kind)} one; use "
            "the precision, optimizer and use_distributed_optimizer that it was saved with"
        )
    elif saved.frozen is not None and sorted(saved.frozen) != freeze:
        difference = (
            f"contains the optimizer of a run with megatron_lm.train.common.freeze {sorted(saved.frozen)}, here "
            f"{freeze}, so other parameters are trained; set freeze as it was"
        )
    elif saved.remainders not in (None, remainders):
        contains = "the 16 bits that bf16 weights lack" if saved.remainders else "the fp32 weights"
        difference = (
            f"contains {contains}, and this run would read the other of the two; set "
            f"{SECTION_PATHS['optimizer']}.use_precision_aware_optimizer and main_params_dtype as they were"
        )
    if difference is not None:
        raise CheckpointError(
            f"{saved.path} {difference}, or set megatron_lm.train.common.no_load_optim: true to start a new optimizer "
            "from the weights"
        )


def check_tensors(saved: SavedContent, request: dict[str, Any]) -> None:
    """Compare every tensor that any rank requests with the checkpoint, before any is read. Collective.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is not in this model.
    """
    wanted: dict[str, tuple[tuple[int, ...], bool]] = {}
    values = list(nested_values(request))
    while values:
        value = values.pop(0)
        if isinstance(value, ShardedTensorFactory):
            built = value.build()
            values = [*(nested_values(built) if isinstance(built, dict | list) else [built]), *values]
        elif isinstance(value, ShardedTensor):
            wanted[value.key] = (tuple(value.global_shape), value.allow_shape_mismatch)
    everywhere = {name: entry for part in gather_objects(wanted) for name, entry in part.items()}
    for name, (shape, flexible) in everywhere.items():
        saved_shape = saved.shapes.get(name)
        # an embedding's rows are padded to a multiple of the tensor-parallel size, so their number may differ
        same = saved_shape == shape or (saved_shape is not None and flexible and saved_shape[1:] == shape[1:])
        if not same:
            there = "is missing" if saved_shape is None else f"has shape {_shown(name, saved_shape)}"
            raise _other_model(saved, name, f"{there} there and has shape {_shown(name, shape)} here")
    for name in saved.shapes:
        if name not in everywhere and not name.startswith("optimizer."):
            raise _other_model(
                saved, name, f"has shape {_shown(name, saved.shapes[name])} there and is not in this model"
            )


def _other_model(saved: SavedContent, name: str, difference: str) -> CheckpointError:
    where = f" ({RESOLVED} in it)" if (saved.path / RESOLVED).is_file() else ""
    return CheckpointError(
        f"{saved.path} is a checkpoint of another model: {name} {difference}; use the architecture of the checkpoint"
        f"{where}, or another load or save folder"
    )


def _shown(name: str, shape: tuple[int, ...]) -> str:
    numbers = " x ".join(str(size) for size in shape)
    return f"{numbers} (layers first)" if ".layers." in name else numbers


def read(sharded_state: dict[str, Any], folder: Path, group: Any) -> dict[str, Any]:
    """Read as `dist_checkpointing.load` does; the ranks of `group` share the reading. Collective over all ranks.

    Returns:
        The state with tensors instead of their descriptions; the model's tensors are overwritten in place.

    Raises:
        CheckpointError: on every rank, if any rank could not read.
    """
    # only validates the format; the strategy below is the same class in both Megatron-Core versions
    get_default_load_sharded_strategy(str(folder))
    strategy: Any = _AgreedRead(f"checkpoint {folder} cannot be read: {{}}; restore it, or load an older one")
    if group.size() > 1:
        strategy = _SharedRead(strategy, group)
    return dist_checkpointing.load(merged_in_place(sharded_state), str(folder), strategy)


class _SharedRead(FullyParallelLoadStrategyWrapper):
    """Replicas share the reading, and send each other what they read.

    Tensors that are sent must be contiguous: gloo writes to the storage of a view without its strides, and NCCL refuses
    it. The halves of experts' fused weights are such views; they are read into tensors of their own.
    """

    def load(self, sharded_state_dict: Any, checkpoint_dir: Any, *arguments: Any, **named: Any) -> Any:
        for tensor in nested_values(sharded_state_dict):
            if isinstance(tensor, ShardedTensor) and tensor.data is not None and not tensor.data.is_contiguous():
                tensor.data = torch.empty(tensor.data.shape, dtype=tensor.data.dtype, device=tensor.data.device)
        return super().load(sharded_state_dict, checkpoint_dir, *arguments, **named)


class _AgreedRead(TorchDistLoadShardedStrategy):
    """Raises on all ranks if one cannot read its part.

    Args:
        message: of the CheckpointError; {} is replaced by the cause.
    """

    def __init__(self, message: str) -> None:
        super().__init__()
        self._message = message

    def load(self, *arguments: Any, **named: Any) -> Any:
        result = None
        with agreed(self._message, FAILURES):
            try:
                result = super().load(*arguments, **named)
            except CheckpointException as failure:
                refusals = [cause for cause, _ in failure.failures.values() if isinstance(cause, CheckpointError)]
                if refusals:
                    raise refusals[0] from failure
                raise
        return result


def merged_in_place(sharded_state: Mapping[str, Any]) -> dict[str, Any]:
    """The sharded state for a load. Its factories return the parameter itself if all of its parts were read into it,
    and otherwise merge the parts as before."""
    return dict(dict_list_map_outplace(_in_place, sharded_state))


def _in_place(entry: Any) -> Any:
    if not isinstance(entry, ShardedTensorFactory):
        return entry
    functions = _Functions(entry)
    return replace(entry, build_fn=functions.build, merge_fn=functions.merge)


class _Functions:
    """`build_fn` and `merge_fn` of a factory, which is the inverse of `build_fn`."""

    def __init__(self, factory: ShardedTensorFactory) -> None:
        self._factory = factory
        self._whole: torch.Tensor | None = None
        self._parts: list[Any] = []

    def build(self, key: str, tensor: torch.Tensor, *further: Any) -> Any:
        """The descriptions of the parts of a tensor."""
        built = self._factory.build_fn(key, tensor, *further)
        self._whole, self._parts = tensor, [getattr(entry, "data", None) for entry in nested_values(built)]
        return built

    def merge(self, loaded: Any) -> torch.Tensor:
        """The tensor with the parts that were read."""
        whole, parts, self._whole, self._parts = self._whole, self._parts, None, []
        read = list(nested_values(loaded))
        are_tensors = all(isinstance(part, torch.Tensor) for part in [*parts, *read])
        if whole is not None and are_tensors and _are_all_of(whole, parts) and _are_same(read, parts):
            return whole
        return self._factory.merge_fn(loaded)


def _are_all_of(whole: torch.Tensor, parts: list[torch.Tensor]) -> bool:
    """Whether the parts are views of the tensor that cover all of its elements."""
    storage = whole.untyped_storage().data_ptr()
    return sum(part.numel() for part in parts) == whole.numel() and all(
        part.untyped_storage().data_ptr() == storage for part in parts
    )


def _are_same(tensors: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors have the same memory and the same shapes."""

    def views(of: list[torch.Tensor]) -> list[Any]:
        return [(tensor.data_ptr(), tensor.dtype, tensor.size(), tensor.stride()) for tensor in of]

    return views(tensors) == views(others)

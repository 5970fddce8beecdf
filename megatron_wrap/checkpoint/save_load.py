"""Saving and loading of a run's state, on any layout. Every function here is collective over all ranks."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject

from megatron_wrap.bridge.export.adapted import other_adapters
from megatron_wrap.bridge.export.training_record import training_record
from megatron_wrap.bridge.loading.load_weights import fill_new_rows
from megatron_wrap.checkpoint import content
from megatron_wrap.checkpoint.adapter import base_facts, check_adapter, check_others, compare_adapters
from megatron_wrap.checkpoint.background import BackgroundSaves
from megatron_wrap.checkpoint.files.complete_checkpoints import RESOLVED, read_facts
from megatron_wrap.checkpoint.files.publish_and_prune import CheckpointStore
from megatron_wrap.checkpoint.files.verification import BlockVerification
from megatron_wrap.checkpoint.load_lr_schedule import load_schedule, take_group_values
from megatron_wrap.checkpoint.precheck import (
    check_saved_vocabulary,
    compare_models,
    existing_checkpoint,
    refuse_new_tokens,
    tokens_new_to_checkpoint,
)
from megatron_wrap.checkpoint.saved_run import section_of
from megatron_wrap.checkpoint.strategy import FAILURES, cannot_write, plan, read, write
from megatron_wrap.config import RunConfig, load_resolved, write_resolved
from megatron_wrap.config.schema.derived import saves_adapter_alone
from megatron_wrap.config.schema.run import SECTION_PATHS
from megatron_wrap.data.chat.new_tokens import NewTokens
from megatron_wrap.engine.passes.parameters import quantize_parameters, synchronize_parameters
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import CheckpointError
from megatron_wrap.parallel.agreement import agree, agreed, on_rank_0
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.platform.megatron_core import versions
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


def save_checkpoint(
    state: TrainingState,
    folder: str | os.PathLike[str],
    keep: int | None = None,
    background: BackgroundSaves | None = None,
    follow_up: Callable[[], None] | None = None,
) -> Path:
    """Save everything that a resumed run needs as the checkpoint of the current iteration. Collective.

    The checkpoint becomes visible only when it is complete; an earlier one of the same iteration stays valid until
    then.

    Args:
        folder: the run's checkpoint folder, on a file system that all ranks share.
        keep: number of checkpoints to keep, older ones but the best are removed; None keeps all.
        background: other processes write the checkpoint, and this function returns when the state is copied; None: it
            returns when the checkpoint is complete.
        follow_up: called on global rank 0 once the checkpoint is complete, without communication.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: on every rank, if any rank could not write; earlier checkpoints are unchanged.
    """
    iteration, best = state.progress.iteration, state.best.iteration
    store = CheckpointStore(folder)

    def after() -> None:
        store.prune(keep, best)
        if follow_up is not None:
            follow_up()

    if background is not None:
        _publish_later(state, store, iteration, background, after)
    else:
        publish(state, store, iteration, lambda: _full_state(state))
        on_rank_0(after, f"{store.folder}: older checkpoints cannot be removed: {{}}")
    return store.folder_of(iteration)


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
    layout = content.layout_facts(state.parallel, state.platform.name)
    other_layout = saved.layout is not None and saved.layout != layout
    skipped: list[str] = []
    if not weights_only:
        refuse_new_tokens(saved.path, saved.new_tokens)
    on_rank_0(
        lambda: check_adapter(saved.path, saved.has_adapter, saved.base, state.config, with_optimizer),
        failures=FAILURES,
    )
    on_rank_0(lambda: check_others(saved.path, saved.others, state.config), failures=FAILURES)
    models = content.model_entries(state.chunks, state.parallel, base=saved.has_base, adapter=saved.has_adapter)
    request = saved.readable(models)
    if with_optimizer:
        kind = content.optimizer_kind(state.config)
        _check_optimizer(saved, kind)
        _check_frozen(saved, state.config)
        _check_remainders(saved, state.config)
        request["optimizer"] = _optimizer_entry(state, models, is_loading=True)
    with_rng = with_rng and not weights_only
    if with_rng and (other_layout or saved.layout is None or not saved.has_rng):
        reason = "saved on another layout" if other_layout else "none in the checkpoint"
        skipped.append(f"random generators, {reason}")
        with_rng = False
    if with_rng:
        request["rng_state"] = content.rng_entry(state.parallel, state.platform.device, is_loading=True)
    check_tensors(saved, content.without_fp8(request))
    loaded = _read_and_set(state, saved, request, with_optimizer, with_rng, whole=not weights_only)
    if not weights_only:
        state.progress = content.saved_progress(loaded)
        state.best = content.saved_best(loaded)
    parts = [("weights", True), ("optimizer and schedule", with_optimizer), ("random generators", with_rng)]
    return LoadReport(
        saved.path, saved.iteration, tuple(name for name, done in parts if done), tuple(skipped), other_layout
    )


def publish(
    state: TrainingState, store: CheckpointStore, iteration: int, sharded_state: Callable[[], dict[str, Any]]
) -> None:
    """Write a checkpoint into a hidden folder and rename the folder once it is complete. Collective.

    Args:
        sharded_state: returns Megatron-Core's sharded state to write; called once all ranks see the folder.

    Raises:
        CheckpointError: on every rank, if any rank could not write; no new checkpoint is visible then.
    """
    message = cannot_write(store.folder, "{}")
    with _hidden_folder(state, store, iteration, message) as partial:
        hashes = write(sharded_state(), partial, state.parallel.dp_cp.group)
        on_rank_0(lambda: _commit(store, partial, iteration, _describe(state, partial), hashes), message, FAILURES)


def _publish_later(
    state: TrainingState, store: CheckpointStore, iteration: int, background: BackgroundSaves, after: Callable[[], None]
) -> None:
    """Publish a checkpoint as `publish` does, but write the files and rename the folder after the return, then call
    `after`."""
    message = cannot_write(store.folder, "{}")
    with _hidden_folder(state, store, iteration, message) as partial:
        planned = plan(_full_state(state), partial, state.parallel.dp_cp.group, background.copy)
        facts = on_rank_0(lambda: _describe(state, partial), message, FAILURES)

    def finish(records: Sequence[Mapping[str, Any]]) -> None:
        planned.finish(records)
        hashes = {name: entry for record in records for name, entry in record["hashes"].items()}
        _commit(store, partial, iteration, facts, hashes)
        after()

    background.start(store, iteration, partial, planned.files, finish)


@contextlib.contextmanager
def _hidden_folder(state: TrainingState, store: CheckpointStore, iteration: int, message: str) -> Iterator[Path]:
    """Context with a hidden folder that all ranks see; the folder is removed if the block fails. Collective."""
    partial = Path(on_rank_0(lambda: str(store.begin(iteration)), message))
    try:
        unseen = f"rank {state.parallel.world.rank} does not see {partial}, which rank 0 created"
        agree(None if partial.is_dir() else f"{unseen}; set megatron_lm.train.common.save to a shared file system")
        yield partial
    except BaseException:
        if state.parallel.world.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _full_state(state: TrainingState) -> dict[str, Any]:
    synchronize_parameters(state.chunks, bool(state.config.ddp.overlap_param_gather))
    train = state.config.train
    models = content.model_entries(state.chunks, state.parallel, base=not saves_adapter_alone(state.config))
    sharded_state: dict[str, Any] = {**content.common_entries(state.progress, state.best), **models}
    if not train.no_save_optim:
        sharded_state["optimizer"] = _optimizer_entry(state, models, is_loading=False)
        sharded_state["opt_param_scheduler"] = state.lr_scheduler.state_dict()
    if not train.no_save_rng:
        sharded_state["rng_state"] = content.rng_entry(state.parallel, state.platform.device, is_loading=False)
    return content.without_fp8(sharded_state)


def _optimizer_entry(state: TrainingState, models: dict[str, dict[str, Any]], is_loading: bool) -> Any:
    if state.config.train.freeze:
        models = content.model_entries(state.chunks, state.parallel, tensor_per_layer=True)
    distributed = bool(state.config.optimizer.use_distributed_optimizer)
    return content.optimizer_entry(state.optimizer, models, state.parallel, is_loading, distributed)


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
    hashes = on_rank_0(lambda: read_facts(path).get("hashes"), failures=FAILURES)
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


def _describe(state: TrainingState, partial: Path) -> dict[str, Any]:
    """Write the resolved configuration into a checkpoint, and return the facts for its manifest; on rank 0."""
    write_resolved(state.config, partial / RESOLVED)
    facts = {
        "megatron_core": versions.version(),
        "torch": torch.__version__,
        "vocab_size": state.shape.vocab_size,
        "layout": content.layout_facts(state.parallel, state.platform.name),
        "consumed_samples": state.progress.consumed_samples,
        "training": training_record(state.config),
    }
    if saves_adapter_alone(state.config):
        facts["base"] = base_facts(state.config)
    if others := other_adapters(state.config):
        facts["other_adapters"] = others
    return facts


def _commit(
    store: CheckpointStore, partial: Path, iteration: int, facts: dict[str, Any], hashes: dict[str, Any]
) -> None:
    """Complete a save on rank 0, after all tensors are written."""
    versions.common_state_file(partial)
    store.commit(partial, iteration, facts, hashes)


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
    """Value of `content.keeps_remainders` in the run that saved it; None: not recorded."""
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
        return any(content.is_of_adapter(name) for name in self.shapes if not name.startswith("optimizer."))

    @property
    def has_rng(self) -> bool:
        """Whether it contains states of random number generators."""
        return any(name.startswith(content.RNG_KEY + "/") for name in self.objects)

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
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    path = existing_checkpoint(folder)
    tracked = CheckpointStore(folder).tracked()
    if tracked is not None and tracked.isdecimal() and path.name != f"iter_{int(tracked):07d}":
        logger.warning_rank_0(f"the newest checkpoint of {folder} is missing or incomplete; loading {path}")
    frozen = remainders = None
    if (path / RESOLVED).is_file():
        resolved = load_resolved(path / RESOLVED)
        compare_models(resolved, config)
        compare_adapters(path, section_of(resolved, "adapter"), config)
        frozen = tuple(section_of(resolved, "train").get("freeze", ()))
        remainders = content.keeps_remainders(section_of(resolved, "optimizer"), section_of(resolved, "dtype"))
    facts = check_saved_vocabulary(path, vocab_size)
    entries = dist_checkpointing.serialization.load_sharded_metadata(str(path)).values()
    common = dist_checkpointing.load_common_state_dict(str(path))
    return SavedContent(
        path=path,
        iteration=content.saved_progress(common).iteration,
        shapes={entry.key: tuple(entry.global_shape) for entry in entries if isinstance(entry, ShardedTensor)},
        objects={entry.unique_key for entry in entries if not isinstance(entry, ShardedTensor)},
        layout=facts.get("layout"),
        has_optimizer="optimizer" in common,
        remainders=remainders,
        base=facts.get("base"),
        others=facts.get("other_adapters", {}),
        frozen=frozen,
        new_tokens=tokens_new_to_checkpoint(path, config, vocab_size),
    )


def _check_optimizer(saved: SavedContent, kind: tuple[str, str]) -> None:
    hint = "or set megatron_lm.train.common.no_load_optim: true to start a new optimizer from the weights"
    if not saved.has_optimizer:
        raise CheckpointError(f"{saved.path} contains no optimizer (no_save_optim); choose another checkpoint, {hint}")
    saved_kind = content.saved_optimizer_kind(set(saved.shapes))
    if saved_kind is not None and saved_kind != kind:
        raise CheckpointError(
            f"{saved.path} contains the state of a {' '.join(saved_kind)} optimizer, but this run has a "
            f"{' '.join(kind)} one; use the precision, optimizer and use_distributed_optimizer that it was saved with, "
            + hint
        )


def _check_remainders(saved: SavedContent, config: RunConfig) -> None:
    here = content.keeps_remainders(vars(config.optimizer), vars(config.dtype))
    if saved.remainders is not None and saved.remainders != here:
        contains = "the 16 bits that bf16 weights lack" if saved.remainders else "the fp32 weights"
        raise CheckpointError(
            f"{saved.path} contains {contains}, and this run would read the other of the two; set "
            f"{SECTION_PATHS['optimizer']}.use_precision_aware_optimizer and main_params_dtype as they were, "
            "or megatron_lm.train.common.no_load_optim: true to start a new optimizer from the weights"
        )


def _check_frozen(saved: SavedContent, config: RunConfig) -> None:
    here = sorted(config.train.freeze)
    if saved.frozen is not None and sorted(saved.frozen) != here:
        raise CheckpointError(
            f"{saved.path} contains the optimizer of a run with megatron_lm.train.common.freeze "
            f"{sorted(saved.frozen)}, here {here}, so other parameters are trained; set freeze as it was, or "
            "megatron_lm.train.common.no_load_optim: true to start a new optimizer from the weights"
        )


def check_tensors(saved: SavedContent, request: dict[str, Any]) -> None:
    """Compare every tensor that any rank requests with the checkpoint, before any is read. Collective.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is not in this model.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

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
        fill_new_rows(content.vocabulary_weights(loaded, state.config), saved.new_tokens, state.parallel.tp)
    with torch.no_grad(), agreed(f"checkpoint {path} cannot be loaded: {{}}", FAILURES):
        content.load_model(state.chunks, loaded)
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
            content.restore_random_states(loaded["rng_state"])
    return loaded

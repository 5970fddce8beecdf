"""Loads the schedule of learning rate and weight decay, after a comparison with this run's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_wrap.config.schema.run import SECTION_PATHS
from megatron_wrap.errors import CheckpointError

_RATE, _OPTIMIZER, _TRAIN = (SECTION_PATHS[name] for name in ("learning_rate", "optimizer", "train"))

_KEYS = {
    "max_lr": f"{_RATE}.lr",
    "min_lr": f"{_RATE}.min_lr",
    "lr_warmup_steps": f"{_RATE}.lr_warmup_iters",
    "lr_decay_steps": f"{_RATE}.lr_decay_iters (null: {_TRAIN}.train_iters)",
    "lr_decay_style": f"{_RATE}.lr_decay_style",
    "start_wd": f"{_OPTIMIZER}.start_weight_decay (null: weight_decay)",
    "end_wd": f"{_OPTIMIZER}.end_weight_decay (null: weight_decay)",
    "wd_incr_style": f"{_OPTIMIZER}.weight_decay_incr_style",
    "wd_incr_steps": f"{_TRAIN}.train_iters",
}
"""Value of Megatron-Core's `OptimizerParamScheduler` -> the YAML key that sets it."""

_OF_A_GROUP = ("max_lr", "min_lr", "start_wd", "end_wd")
"""Values of a parameter group that the schedule reads (optimizer_param_scheduler.py, get_lr and get_wd)."""

_OLDER_NAMES = {
    "start_lr": "max_lr",
    "warmup_iter": "lr_warmup_steps",
    "warmup_steps": "lr_warmup_steps",
    "end_iter": "lr_decay_steps",
    "decay_steps": "lr_decay_steps",
    "decay_style": "lr_decay_style",
    "num_iters": "num_steps",
}
"""Name in checkpoints of earlier Megatron-LM versions -> current name (optimizer_param_scheduler.py,
load_state_dict)."""


def load_schedule(scheduler: Any, saved: Mapping[str, Any], global_batch_size: int) -> None:
    """Continue this run's schedule where the saved one stopped.

    Values that have no effect on the schedule may differ, for example the length of a constant one. With
    `override_opt_param_scheduler` or `use_checkpoint_opt_param_scheduler` nothing is compared.

    Args:
        scheduler: Megatron-Core's OptimizerParamScheduler, which counts samples.
        saved: its `state_dict` in the checkpoint.
        global_batch_size: samples of an iteration, for messages.

    Raises:
        CheckpointError: the two schedules differ; the message names the YAML keys.
    """
    saved = {_OLDER_NAMES.get(name, name): value for name, value in saved.items()}
    current = scheduler.state_dict()
    if not (scheduler.override_opt_param_scheduler or scheduler.use_checkpoint_opt_param_scheduler):
        compare_values(saved, current, global_batch_size)
        saved |= {name: current[name] for name in _KEYS if name in saved}
    # Megatron-Core adds num_steps to the samples that the scheduler has counted so far
    scheduler.load_state_dict({**saved, "num_steps": saved["num_steps"] - scheduler.num_steps})


def compare_values(saved: Mapping[str, Any], current: Mapping[str, Any], global_batch_size: int) -> None:
    """Compare the values of two schedules, named as in Megatron-Core's `OptimizerParamScheduler`.

    Raises:
        CheckpointError: they have different effects; the message names the YAML keys.
    """
    before, now = _effective(saved), _effective(current)
    differing = [name for name in _KEYS if name in before and name in now and before[name] != now[name]]
    if not differing:
        return
    parts = [
        f"{_KEYS[name]} was {_shown(name, before[name], global_batch_size)} and is "
        f"{_shown(name, now[name], global_batch_size)}"
        for name in differing
    ]
    raise CheckpointError(
        f"the learning-rate or weight-decay schedule differs from that of the checkpoint: {'; '.join(parts)}; set "
        f"these keys back, or set {_OPTIMIZER}.override_opt_param_scheduler: true to use this run's, or "
        f"{_OPTIMIZER}.use_checkpoint_opt_param_scheduler: true to use the checkpoint's"
    )


def take_group_values(saved: Any, groups: Sequence[dict[str, Any]], from_checkpoint: bool) -> None:
    """Set the limits of learning rate and weight decay in the parameter groups of a loaded optimizer state to this
    run's. Megatron-Core's schedule computes each group's values from them, and 0.19 identifies a group by them
    (optimizer.py, `_filter_and_reorder_param_groups`). Call it before the state is loaded.

    Args:
        saved: the loaded state, which is changed.
        groups: parameter groups of this run's optimizer.
        from_checkpoint: set this run's groups to the checkpoint's limits instead
            (`use_checkpoint_opt_param_scheduler`), which changes `groups`.
    """
    groups_by_identity = {_identity(group): group for group in groups}
    for saved_group in _groups(saved):
        group = groups_by_identity.get(_identity(saved_group))
        if group is None:
            continue
        source, target = (saved_group, group) if from_checkpoint else (group, saved_group)
        target.update({name: source[name] for name in _OF_A_GROUP if name in source})


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(group.get(name) for name in ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"))


def _groups(state: Any) -> Iterator[dict[str, Any]]:
    """The parameter groups anywhere in an optimizer's state; a chained optimizer has several parts."""
    if isinstance(state, Mapping):
        for name, value in state.items():
            if name == "param_groups":
                yield from value
            else:
                yield from _groups(value)
    elif isinstance(state, list):
        for value in state:
            yield from _groups(value)


def _effective(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values that affect the schedule (optimizer_param_scheduler.py, get_lr and get_wd)."""
    without_effect: set[str] = set()
    if values.get("lr_decay_style") == "constant":
        without_effect |= {"lr_decay_steps", "min_lr"}
    if values.get("start_wd") == values.get("end_wd"):
        without_effect |= {"wd_incr_steps", "wd_incr_style"}
    return {name: value for name, value in values.items() if name in _KEYS and name not in without_effect}


def _shown(name: str, value: Any, global_batch_size: int) -> str:
    if not name.endswith("_steps"):
        return str(value)
    iterations = value / global_batch_size
    return f"{iterations:g} ({value:g} samples)"

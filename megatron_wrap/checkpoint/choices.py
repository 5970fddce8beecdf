"""Values for the keys that a run's YAML leaves open, with those of the checkpoint that the run resumes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_wrap.checkpoint.content import layout_facts
from megatron_wrap.checkpoint.precheck import find_checkpoint
from megatron_wrap.checkpoint.store import RESOLVED, read_facts
from megatron_wrap.config import RunConfig, load_resolved
from megatron_wrap.config.defaults import OPTIMIZER_KEYS, OVERLAP_KEYS, choices, with_choices
from megatron_wrap.config.schema import SECTION_PATHS
from megatron_wrap.parallel.agreement import on_rank_0
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.platform.base import Platform
from megatron_wrap.utils.dist_logger import logger


def decided(config: RunConfig, platform: Platform, parallel: ParallelState) -> RunConfig:
    """The configuration of a training run with values for all keys that the YAML leaves open, which a line of the log
    names. Collective.

    A resumed run keeps the kind of optimizer of its checkpoint, which cannot be converted, and on the same layout all
    values, so that it goes on bit for bit.
    """
    layout = layout_facts(parallel, platform.name)
    saved = on_rank_0(lambda: saved_choices(config, layout))
    chosen = choices(config, platform.machine, parallel.dp_cp.size, saved)
    enabled = [str(choice) for choice in chosen if choice.value]
    if enabled:
        logger.info_rank_0(f"chosen for this machine and layout: {'; '.join(enabled)}")
    return with_choices(config, chosen)


def saved_choices(config: RunConfig, layout: Mapping[str, Any]) -> dict[str, bool]:
    """section.key -> value in the checkpoint whose optimizer the run would load; empty if there is none.

    Args:
        layout: of the run, from `layout_facts`.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
    """
    train = config.train
    found = find_checkpoint(train.save) if train.save is not None else None
    if found is None and train.load is not None and not train.finetune:
        found = find_checkpoint(train.load)
    if found is None or train.no_load_optim or not (found / RESOLVED).is_file():
        return {}
    resolved = load_resolved(found / RESOLVED)
    same_layout = read_facts(found).get("layout") == layout
    values = {name: _at(resolved, name) for name in (*OPTIMIZER_KEYS, *(OVERLAP_KEYS if same_layout else ()))}
    return {name: value for name, value in values.items() if isinstance(value, bool)}


def _at(resolved: Mapping[str, Any], name: str) -> Any:
    section, _, key = name.partition(".")
    value: Any = resolved
    for part in (*SECTION_PATHS[section].split("."), key):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value

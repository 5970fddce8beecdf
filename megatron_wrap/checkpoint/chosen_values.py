"""Selects values for the keys that a run's YAML leaves open, some of them from the checkpoint that the run resumes
from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_wrap.bridge.adapters.trained_parameters import trained_shape
from megatron_wrap.checkpoint.saved_run import read_saved_run, starting_checkpoint
from megatron_wrap.checkpoint.saved_tensors import layout_record
from megatron_wrap.config import RunConfig
from megatron_wrap.config.defaults import (
    FUSED_CLIPPING,
    LAYERS,
    OPTIMIZER_KEYS,
    OVERLAP_KEYS,
    OVERLAPPED_COMMUNICATION,
    choices,
    with_choices,
)
from megatron_wrap.config.reading.pipeline_layout import even_layout
from megatron_wrap.model.transformer_config import use_transformer_engine
from megatron_wrap.parallel.agreement import on_rank_0
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.plan.context_exchange import EXCHANGE_KEY, exchange_choice
from megatron_wrap.plan.pipeline_split import LAYOUT_KEY, split_choice
from megatron_wrap.platform.base.platform import Platform
from megatron_wrap.utils.dist_logger import logger


def decided(config: RunConfig, platform: Platform, parallel: ParallelState, vocab_size: int) -> RunConfig:
    """The configuration of a training run with values for all keys that the YAML leaves open; those that enable
    something are logged. Collective.

    A resumed run keeps the kind of optimizer of its checkpoint, which cannot be converted, and on the same layout all
    values, so that it continues bit for bit.

    Args:
        vocab_size: of the model, without padding.
    """
    layout = layout_record(parallel, platform.name)
    saved, split, exchange, device = on_rank_0(lambda: (*_saved_choices(config, layout), platform.device_name))
    chosen = choices(config, platform.machine, parallel.dp_cp.size, saved)
    config = with_choices(config, chosen)
    split_here = split_choice(config, trained_shape(config, vocab_size), device, split)
    exchange_here = exchange_choice(config, use_transformer_engine(config, platform), exchange)
    more = tuple(choice for choice in (split_here, exchange_here) if choice is not None)
    enabled = [str(choice) for choice in (*chosen, *more) if choice.value]
    if enabled:
        logger.info_rank_0(f"chosen for this machine and layout: {'; '.join(enabled)}")
    return with_choices(config, more)


def _saved_choices(config: RunConfig, layout: Mapping[str, Any]) -> tuple[dict[str, Any], str | None, str | None]:
    """The choices in the checkpoint whose optimizer the run would load: section.key -> value. If the checkpoint has the
    run's layout, also the layers of its pipeline stages and its `cp_comm_type`. Empty without a checkpoint of this
    package.

    Args:
        layout: of the run, from `layout_record`.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
    """
    train, start = config.train, starting_checkpoint(config)
    loads_optimizer = start is not None and not train.no_load_optim and (start.resumes or not train.finetune)
    saved = read_saved_run(start.path) if start is not None and loads_optimizer else None
    if saved is None:
        return {}, None, None
    has_layout = saved.manifest.get("layout") == layout
    names = (
        *OPTIMIZER_KEYS,
        *((*OVERLAP_KEYS, OVERLAPPED_COMMUNICATION, FUSED_CLIPPING, LAYERS) if has_layout else ()),
    )
    values = {name: value for name in names if isinstance(value := saved.value(name), bool | str)}
    if not has_layout:
        return values, None, None
    # a checkpoint older than these choices has even stages, and cp_comm_type, by default p2p, in its architecture
    even = even_layout(config.arch.num_layers, config.parallel.pipeline_model_parallel_size, layout["virtual"] or 1)
    split, exchange = saved.value(LAYOUT_KEY), saved.value(EXCHANGE_KEY) or saved.value("arch.cp_comm_type")
    split = split if isinstance(split, str) or even is None else str(even)
    return values, split, exchange if isinstance(exchange, str) else "p2p"

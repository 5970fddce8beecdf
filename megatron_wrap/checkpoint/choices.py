"""Values for the keys that a run's YAML leaves open; some are those of the checkpoint that the run resumes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_wrap.checkpoint.content import layout_facts
from megatron_wrap.checkpoint.precheck import starting_checkpoint
from megatron_wrap.checkpoint.saved_run import SavedRun, read_saved_run
from megatron_wrap.config import RunConfig
from megatron_wrap.config.defaults import OPTIMIZER_KEYS, OVERLAP_KEYS, choices, with_choices
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
    layout = layout_facts(parallel, platform.name)
    saved, split, exchange, device = on_rank_0(
        lambda: (
            *(saved_choices(config, layout), saved_split(config, layout), saved_exchange(config, layout)),
            platform.device_name,
        )
    )
    chosen = choices(config, platform.machine, parallel.dp_cp.size, saved)
    split_here = split_choice(config, vocab_size, device, split)
    exchange_here = exchange_choice(config, use_transformer_engine(config, platform), exchange)
    chosen += tuple(choice for choice in (split_here, exchange_here) if choice is not None)
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
    saved = _continued_run(config)
    if saved is None:
        return {}
    values: dict[str, bool] = {}
    for name in (*OPTIMIZER_KEYS, *(OVERLAP_KEYS if saved.facts.get("layout") == layout else ())):
        section, _, key = name.partition(".")
        value = saved.section(section).get(key)
        if isinstance(value, bool):
            values[name] = value
    return values


def saved_split(config: RunConfig, layout: Mapping[str, Any]) -> str | None:
    """The layers of the pipeline stages in the checkpoint whose optimizer the run would load, if it has the run's
    layout; even where the checkpoint is older than the choice of a split.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
    """
    saved = _continued_on(config, layout)
    if saved is None:
        return None
    section, _, key = LAYOUT_KEY.partition(".")
    split = saved.section(section).get(key)
    stages, chunks = config.parallel.pipeline_model_parallel_size, layout["virtual"] or 1
    even = even_layout(config.arch.num_layers, stages, chunks)
    return split if isinstance(split, str) or even is None else str(even)


def saved_exchange(config: RunConfig, layout: Mapping[str, Any]) -> str | None:
    """`cp_comm_type` of the checkpoint whose optimizer the run would load, if it has the run's layout. In a checkpoint
    older than the choice the key stands in the architecture, and p2p is what runs had without it.

    Raises:
        CheckpointError: the checkpoint cannot be loaded.
    """
    saved = _continued_on(config, layout)
    if saved is None:
        return None
    section, _, key = EXCHANGE_KEY.partition(".")
    value = saved.section(section).get(key) or saved.section("arch").get(key)
    return value if isinstance(value, str) else "p2p"


def _continued_run(config: RunConfig) -> SavedRun | None:
    """The run whose optimizer state this one would load; None: there is none, or it is Megatron-LM's."""
    train, start = config.train, starting_checkpoint(config)
    if start is None or train.no_load_optim or (train.finetune and not start.resumes):
        return None
    return read_saved_run(start.path)


def _continued_on(config: RunConfig, layout: Mapping[str, Any]) -> SavedRun | None:
    """`_continued_run` if it had the given layout, else None."""
    saved = _continued_run(config)
    return saved if saved is not None and saved.facts.get("layout") == layout else None

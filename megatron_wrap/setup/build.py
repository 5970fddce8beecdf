"""Builds a `TrainingState` from the configuration: flow, model chunks, gradient reduction, optimizer, learning rate."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron_wrap.bridge.adapters.run_adapter import run_adapter
from megatron_wrap.bridge.adapters.trained_parameters import trained_shape
from megatron_wrap.bridge.loading.hf_path import folder_arch, starting_weights
from megatron_wrap.bridge.loading.weight_folder import WeightFolder
from megatron_wrap.config.checks.vocabulary import model_vocab_size
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.derived import token_multiple
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.data.indexed.windows import open_indexed
from megatron_wrap.data.order.sample_sets import first_training_samples
from megatron_wrap.data.sources.rows import BadSample, converted
from megatron_wrap.engine.batches.collation import try_flow
from megatron_wrap.engine.batches.global_batch import SampleSharing
from megatron_wrap.engine.batches.micro_batch import Localization
from megatron_wrap.engine.batches.micro_batching import micro_batching_of
from megatron_wrap.engine.memory import avoidable_logits_bytes, defers_logits
from megatron_wrap.engine.passes.loss import MetricReduction
from megatron_wrap.engine.passes.pipeline_schedule import PipelineSchedule
from megatron_wrap.engine.passes.router_replay import RoutingReplay
from megatron_wrap.engine.passes.stragglers import Stragglers
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.flow.contract.class_checks import packing_refusal
from megatron_wrap.model.transformer_config import transformer_config, use_transformer_engine
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.plan.pipeline_split import faster_split
from megatron_wrap.platform.base.platform import Platform
from megatron_wrap.profiling.advice import ProfiledRun
from megatron_wrap.profiling.step_profiler import StepProfiler
from megatron_wrap.setup.adapter import adapt_chunks
from megatron_wrap.setup.flow import build_flow, sample_preparation
from megatron_wrap.setup.model_chunks import build_chunks, predicted_ids, start_user_buffers, trainable_chunks
from megatron_wrap.setup.optimizer import build_lr_scheduler, build_optimizer
from megatron_wrap.setup.seeds import generators_of_graphs, seed_everything
from megatron_wrap.utils.dist_logger import logger

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def build_training_state(
    config: RunConfig,
    platform: Platform,
    parallel: ParallelState,
    tokenizer: Any,
    from_hugging_face: bool = True,
    training: bool = True,
    reference: RunConfig | None = None,
) -> TrainingState:
    """Build the state of a run, with the weights of hf_path or initial ones, after the flow has collated some data.

    Args:
        tokenizer: the run's Hugging Face tokenizer, or None.
        from_hugging_face: False: ignore hf_path and adapter.path, for a caller that loads a checkpoint.
        training: False: build only the model, without gradient buffers and optimizer.
        reference: the configuration of the reference or teacher model, for the flow's vocabulary.
    """
    seed_everything(config.train.seed, platform, parallel, generators_of_graphs(config, platform))
    vocab_size = model_vocab_size(config.arch, tokenizer, config.model_provider.hf_path)
    flow = build_flow(config, tokenizer, vocab_size, parallel, reference)
    prepare_sample = sample_preparation(flow, config) if training else flow.prepare_sample
    if training:
        try_flow(flow, _first_samples(config, prepare_sample, vocab_size, tokenizer), config.train.seed)
    model_config = transformer_config(config, platform, training)
    # a checkpoint of an adapter does not contain the base
    weight_folder = starting_weights(config) if from_hugging_face or derived.saves_adapter_alone(config) else None
    start_user_buffers(config, platform, model_config)
    bare = build_chunks(
        *(config, platform, parallel, model_config, vocab_size, tokenizer, True, weight_folder),
        defer_logits=defers_logits(config, platform, parallel, vocab_size),
        predicted_ids=predicted_ids(config, flow.context.common_vocab_size),
    )
    _warn_of_unread(weight_folder if from_hugging_face else None, config)
    adapter = run_adapter(config, vocab_size)
    if adapter is not None:
        adapt_chunks(adapter, config, parallel, bare, vocab_size, from_hugging_face)
    chunks = trainable_chunks(config, platform, parallel, model_config, bare, vocab_size) if training else bare
    optimizer = build_optimizer(config, model_config, chunks, parallel) if training else None
    shape = trained_shape(config, vocab_size, adapter)
    stragglers = _stragglers(config, parallel, platform.device) if training else None
    return TrainingState(
        config=config,
        platform=platform,
        parallel=parallel,
        flow=flow,
        transformer_config=model_config,
        chunks=chunks,
        optimizer=optimizer,
        lr_scheduler=None if optimizer is None else build_lr_scheduler(config, optimizer),
        prepare_sample=prepare_sample,
        calculate_loss=flow.calculate_loss,
        shape=shape,
        micro_batching=micro_batching_of(config, parallel, shape, _group_size(model_config, parallel)),
        localization=_localization(config, parallel, platform.device, model_config, training),
        pipeline_schedule=_pipeline_schedule(config, parallel, model_config, flow, chunks, stragglers),
        stragglers=stragglers,
        sharing=SampleSharing(parallel.world),
        reduction=MetricReduction(flow, parallel, platform.device),
    )


def _warn_of_unread(weight_folder: WeightFolder | None, config: RunConfig) -> None:
    for warning in [] if weight_folder is None else weight_folder.left_out(folder_arch(config)):
        logger.warning_rank_0(warning)


def _pipeline_schedule(
    config: RunConfig,
    parallel: ParallelState,
    model_config: TransformerConfig,
    flow: MegatronWrapTrainingFlowBase,
    chunks: list[Any],
    stragglers: Stragglers | None,
) -> PipelineSchedule:
    spread = config.arch.num_experts is not None and config.parallel.expert_model_parallel_size > 1
    shape, sequence_parallel = flow.context.routing, model_config.sequence_parallel
    return PipelineSchedule(
        parallel=parallel,
        sequence_parallel=sequence_parallel,
        half_precision=config.dtype.bf16 or config.dtype.fp16,
        # Megatron-Core's all-gather of tokens takes equal numbers on all processes
        # (transformer/moe/token_dispatcher.py, MoEAllGatherTokenDispatcher)
        equal_tokens=spread and config.arch.moe_token_dispatcher_type == "allgather",
        routing=None if shape is None else RoutingReplay(shape, chunks, parallel, sequence_parallel),
        clock=None if stragglers is None else stragglers.clock,
    )


def _stragglers(config: RunConfig, parallel: ParallelState, device: torch.device) -> Stragglers | None:
    interval = config.logger.straggler_interval
    if interval is None or parallel.world.size == 1:
        return None
    return Stragglers(parallel, device, interval, config.logger.straggler_factor)


def _localization(
    config: RunConfig, parallel: ParallelState, device: torch.device, model_config: TransformerConfig, training: bool
) -> Localization:
    return Localization(
        parallel=parallel,
        device=device,
        sequence_parallel=model_config.sequence_parallel,
        has_experts=config.arch.num_experts is not None,
        token_multiple=token_multiple(config),
        noise_alpha=config.train.neftune_noise_alpha if training else None,
        hidden_size=config.arch.hidden_size,
    )


def _first_samples(
    config: RunConfig, prepare_sample: Callable[[Any], Any], vocab_size: int, tokenizer: Any
) -> list[tuple[str, Any]]:
    """The head of the training data: `FILE:ROW` and prepared sample."""
    count, skip_bad = 2 * config.train.micro_batch_size, config.data.on_bad_sample == "skip"
    if derived.is_indexed(config.data):
        windows = open_indexed(config, vocab_size, tokenizer).training
        rows = [(windows.where(position), windows.read(position)) for position in range(count)]
    else:
        sources, mock_samples = derived.training_sources(config), derived.mock_samples(config.data)
        rows = first_training_samples(sources, mock_samples, count, skip_bad)
    prepared = []
    for where, sample in rows:
        try:
            prepared.append((where, converted(prepare_sample, sample, functools.partial(str, where))))
        except BadSample:
            if not skip_bad:
                raise
    return prepared


def _group_size(model_config: TransformerConfig, parallel: ParallelState) -> int:
    """Number of which a replica's number of micro-batches must be a multiple."""
    return model_config.microbatch_group_size_per_vp_stage if parallel.virtual_size else 1


def build_step_profiler(state: TrainingState, output_dir: Path) -> StepProfiler | None:
    """The profiler of `megatron_wrap.profile`; None if all of its steps have been taken.

    Args:
        output_dir: of the run.
    """
    config, iteration = state.config, state.progress.iteration
    if not any(step > iteration for step in config.profile.steps):
        return None
    platform, parallel = state.platform, state.parallel
    run = ProfiledRun(
        device=platform.machine.device,
        transformer_engine_layers=use_transformer_engine(config, platform),
        has_transformer_engine=platform.has_transformer_engine,
        has_triton=platform.machine.triton,
        can_pack=not packing_refusal(type(state.flow)),
        dp_size=parallel.dp.size,
        num_microbatches=max(1, derived.num_microbatches(config, parallel.dp.size)),
        total_gib=platform.total_memory_bytes() / 2**30 / (1 if platform.name == "cuda" else parallel.world.size),
        faster_split=faster_split(config, state.shape, platform.machine.device),
    )
    return StepProfiler(
        config,
        platform,
        parallel,
        iteration,
        Path(config.profile.output_dir) if config.profile.output_dir else output_dir / "profile",
        run=run,
        flops=state.step_flops,
        avoidable_logits_bytes=avoidable_logits_bytes(config, parallel, state.chunks, state.shape.vocab_size),
    )

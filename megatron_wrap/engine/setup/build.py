"""Builds a `TrainingState` from the configuration: flow, model chunks, gradient reduction, optimizer, learning rate."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy
import torch

from megatron_wrap.bridge.adapters.run_adapter import run_adapter
from megatron_wrap.bridge.adapters.trained_parameters import trained_shape
from megatron_wrap.bridge.loading.hf_path import folder_arch, starting_weights, tokens_new_to_folder
from megatron_wrap.bridge.loading.load_weights import fill_new_rows, load_weights
from megatron_wrap.bridge.loading.weight_folder import WeightFolder
from megatron_wrap.bridge.mapping.model_parameters import mapped_parameters
from megatron_wrap.config.checks.vocabulary import model_vocab_size
from megatron_wrap.config.defaults import FP8_GATHER_FROM, experts_choice
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.derived import token_multiple
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.data.indexed.windows import open_indexed
from megatron_wrap.data.order.sample_sets import first_training_samples
from megatron_wrap.data.sources.rows import BadSample, converted
from megatron_wrap.engine.batches.context_parallel_shard import Localization
from megatron_wrap.engine.batches.micro_batch import try_flow
from megatron_wrap.engine.batches.micro_batching import micro_batching_of
from megatron_wrap.engine.batches.sample_sharing import SampleSharing
from megatron_wrap.engine.passes.metric_reduction import MetricReduction
from megatron_wrap.engine.passes.pipeline_schedule import PipelineSchedule
from megatron_wrap.engine.passes.router_replay import RoutingReplay
from megatron_wrap.engine.passes.stragglers import Stragglers
from megatron_wrap.engine.reference.precomputed import sample_preparation
from megatron_wrap.engine.setup.adapter import adapt_chunks, quantize_base
from megatron_wrap.engine.setup.flow import build_flow
from megatron_wrap.engine.setup.freeze import check_model_inputs, freeze_parameters
from megatron_wrap.engine.setup.linear_cross_entropy import defers_logits
from megatron_wrap.engine.setup.optimizer import build_lr_scheduler, build_optimizer
from megatron_wrap.engine.setup.tied_gradients import with_tied_gradients
from megatron_wrap.engine.setup.user_buffers import start_user_buffers
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import PlatformError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.model.initial_weights import fill_initial_weights, is_expert
from megatron_wrap.model.provider import MegatronModelProviderEntry
from megatron_wrap.model.request import ModelRequest, padded_vocab_size
from megatron_wrap.model.transformer_config import same_named, transformer_config, use_transformer_engine
from megatron_wrap.parallel.agreement import on_rank_0
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.platform.base.machine import megatron_core_version
from megatron_wrap.platform.base.platform import Platform
from megatron_wrap.platform.megatron_core.added_gradients import sum_over_ranks
from megatron_wrap.platform.megatron_core.versions import accepts, version
from megatron_wrap.utils.dist_logger import logger
from megatron_wrap.utils.garbage import delayed_collection

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_wrap.data.chat.tokenizer import NewTokens


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
    seed_everything(config.train.seed, platform, parallel, _generators_of_graphs(config, platform))
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
    chunks = _trainable(config, platform, parallel, model_config, bare, vocab_size) if training else bare
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


def seed_everything(seed: int, platform: Platform, parallel: ParallelState, generators: str | None = None) -> None:
    """Seed Python, numpy, torch and Megatron-Core's tensor-parallel generators, each pipeline stage differently, as in
    Megatron-LM (megatron/training/initialize.py).

    Args:
        generators: the argument of Megatron-Core's `model_parallel_cuda_manual_seed` that selects another kind of them.
    """
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    stage_seed = seed + 100 * parallel.pp.rank
    random.seed(stage_seed)
    numpy.random.seed(stage_seed)
    platform.seed(stage_seed)
    if generators is None:
        model_parallel_cuda_manual_seed(stage_seed)
    else:
        model_parallel_cuda_manual_seed(stage_seed, **{generators: True}, force_reset_rng=True)


def _generators_of_graphs(config: RunConfig, platform: Platform) -> str | None:
    """Argument `generators` for a model whose layers are captured as CUDA graphs, which draw random numbers from them.
    Transformer Engine's attention accepts only its own kind."""
    if not derived.captures_graphs(config.arch):
        return None
    return "te_rng_tracker" if use_transformer_engine(config, platform) else "use_cudagraphable_rng"


def predicted_ids(config: RunConfig, common_vocab_size: int | None) -> int | None:
    """Argument `predicted_ids` of `build_chunks`: for a teacher the number of rows that the student has as well, so
    that the teacher's distributions are over the same ids on every layout; None for other models.

    Args:
        config: with the architecture of the model.
        common_vocab_size: of both models of the run; None: they have the same number of rows.
    """
    is_teacher = config.policy is not None and config.policy.models.role == "teacher"
    return common_vocab_size if is_teacher else None


@delayed_collection()  # the many new objects of a model would start one of all that was imported
def build_chunks(
    config: RunConfig,
    platform: Platform,
    parallel: ParallelState,
    model_config: TransformerConfig,
    vocab_size: int,
    tokenizer: Any,
    new_weights: bool = True,
    weight_folder: WeightFolder | None = None,
    defer_logits: bool = False,
    predicted_ids: int | None = None,
) -> list[torch.nn.Module]:
    """This process's model chunks; in half precision each is wrapped in Megatron-Core's Float16Module. Collective.

    Args:
        vocab_size: number of rows of embedding and output layer, without padding.
        tokenizer: of the run, or None; rows of tokens that are new to `weight_folder` are the mean of the others'.
        new_weights: set initial weights; False: leave the weights unset.
        weight_folder: a Hugging Face folder, whose weights are loaded instead of the initial ones.
        defer_logits: see `ModelRequest.defers_logits`.
        predicted_ids: the rows from this one on have probability 0, as padding has; None: `vocab_size`.
    """
    from megatron.core.transformer.module import Float16Module

    provider = MegatronModelProviderEntry.get_provider(config.model_provider.provider_key)
    ids = vocab_size if predicted_ids is None else predicted_ids
    padded = padded_vocab_size(vocab_size, config.arch.make_vocab_size_divisible_by, parallel.tp.size)
    # Here, not between the chunks: the constructors of the first and the last one, which are on other processes, wait
    # for each other. On one rank, because a node's cache of the hub may lack the folder's tokenizer.
    new_tokens = on_rank_0(lambda: tokens_new_to_folder(config, tokenizer, ids)) if weight_folder is not None else None
    chunks = []
    for stage in range(parallel.virtual_size or 1):
        virtual_stage = stage if parallel.virtual_size else None
        last_stage = parallel.virtual_size - 1 if parallel.virtual_size else 0
        request = ModelRequest(
            config=config,
            transformer_config=model_config,
            state=parallel,
            transformer_engine=use_transformer_engine(config, platform),
            experts_impl=experts_choice(config.arch, fp8=bool(model_config.fp8)).value,
            vocab_size=ids,
            padded_vocab_size=padded,
            pre_process=parallel.pp.rank == 0 and stage == 0,
            post_process=parallel.is_last_stage and stage == last_stage,
            virtual_stage=virtual_stage,
            defers_logits=defer_logits,
        )
        chunk = _built(config, provider, request)
        platform.synchronize()  # with CUDA graphs of layers the first one has changed the stream
        chunk.to(platform.device)
        _mark_experts(chunk)
        if new_weights and (weight_folder is None or weight_folder.omitted):
            fill_initial_weights(
                chunk, config.arch, vocab_size, config.train.seed, parallel.tp, expert_tp=parallel.expert_tp
            )
        half = config.dtype.bf16 or config.dtype.fp16
        chunks.append(Float16Module(model_config, chunk) if half else chunk)
        if weight_folder is not None:  # after Float16Module, which also converts the buffers that must stay fp32
            _load_folder(chunk, config, weight_folder, new_tokens, parallel)
    return chunks


def _load_folder(
    chunk: torch.nn.Module,
    config: RunConfig,
    folder: WeightFolder,
    new_tokens: NewTokens | None,
    parallel: ParallelState,
) -> None:
    arch = folder_arch(config)
    load_weights(chunk, arch, folder, parallel)
    if new_tokens is not None:
        mapped = mapped_parameters(chunk, folder.family, arch)
        fill_new_rows([weight for _, weight, mapping in mapped if mapping.padded], new_tokens, parallel.tp)


def _built(config: RunConfig, provider: Callable[[ModelRequest], torch.nn.Module], request: ModelRequest) -> Any:
    """Build a chunk. With `adapter.base_weights` its linear layers have no values yet, and keep them quantized
    later."""
    if config.adapter.base_weights == "bf16":
        return provider(request)
    from megatron_wrap.nn.layers.quantized_weights import weights_without_memory

    with weights_without_memory():
        chunk = provider(request)
    quantize_base(chunk, config)
    return chunk


def _mark_experts(chunk: torch.nn.Module) -> None:
    """Mark the experts' parameters, which then have separate gradient buffers and optimizer states for every EP.

    Megatron-Core marks them only if EP > 1 (tensor_parallel/layers.py). Without the mark a checkpoint saved with EP 1
    would have another format, and with an expert TP smaller than TP the gradients of an expert's copies would not be
    reduced.
    """
    for name, parameter in chunk.named_parameters():
        if is_expert(name):
            parameter.allreduce = False  # type: ignore[attr-defined]


def _trainable(
    config: RunConfig,
    platform: Platform,
    parallel: ParallelState,
    model_config: TransformerConfig,
    bare: list[torch.nn.Module],
    vocab_size: int,
) -> list[torch.nn.Module]:
    """Freeze parameters of the chunks, and wrap them for training."""
    check_model_inputs(config, bare)
    freeze_parameters(config, bare, parallel, vocab_size)
    platform.refuse_unsafe(derived.optimizer_settings(config.optimizer), platform.has_transformer_engine)
    return wrap_chunks(config, parallel, model_config, bare)


def wrap_chunks(
    config: RunConfig, parallel: ParallelState, model_config: TransformerConfig, chunks: list[torch.nn.Module]
) -> list[torch.nn.Module]:
    """Wrap the chunks in Megatron-Core's DistributedDataParallel, and set the hooks that its schedules call."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    ddp = config.ddp
    settings: dict[str, Any] = {
        **same_named(ddp, DistributedDataParallelConfig),
        "grad_reduce_in_fp32": ddp.accumulate_allreduce_grads_in_fp32,
        "use_distributed_optimizer": config.optimizer.use_distributed_optimizer,
        # Megatron-Core's check raises on one rank only, during the backward pass, and synchronizes for each bucket;
        # ours checks the norm of the full gradient on all ranks (checked_optimizer.py)
        "check_for_nan_in_grad": False,
        "bucket_size": ddp.ddp_bucket_size,
        "fp8_param_gather": model_config.fp8_param,
        **ddp.upstream,
    }
    ddp_config = DistributedDataParallelConfig(**accepts(DistributedDataParallelConfig, settings))
    if model_config.fp8_param and ddp.overlap_param_gather and megatron_core_version() < FP8_GATHER_FROM:
        raise PlatformError(
            "megatron_lm.misc.ddp.overlap_param_gather: with fp8_param_gather it gives wrong gradients after an "
            f"evaluation with megatron-core {version()}; write null or false, or install 0.19"
        )
    # later chunks are not split into buckets: their reduction overlaps with the computation of the first chunk
    # (Megatron-LM, megatron/training/training.py, get_model)
    wrapped = [
        DistributedDataParallel(model_config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    single = len(wrapped) == 1
    model_config.finalize_model_grads_func = with_tied_gradients(finalize_model_grads, wrapped)
    if ddp.overlap_grad_reduce:
        model_config.no_sync_func = wrapped[0].no_sync if single else [chunk.no_sync for chunk in wrapped]
        if not single and ddp_config.align_param_gather:
            model_config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
    size = parallel.dp.size * parallel.cp.size
    if size > 1 and not ddp_config.average_in_collective:
        sum_over_ranks(wrapped)
        # the schedule averages the losses, those of routers too
        model_config.grad_scale_func = lambda loss: loss / size
    return wrapped

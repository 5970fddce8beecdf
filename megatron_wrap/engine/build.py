"""Builds a `TrainingState` from the configuration: flow, model chunks, gradient reduction, optimizer, schedule."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy
import torch

from megatron_wrap.bridge.family import Family
from megatron_wrap.bridge.source import WeightSource
from megatron_wrap.bridge.start import hugging_face_source
from megatron_wrap.bridge.transfer import load_weights
from megatron_wrap.config import derived
from megatron_wrap.config.defaults import FP8_GATHER_FROM
from megatron_wrap.config.fp8 import token_multiple
from megatron_wrap.config.schema import RunConfig
from megatron_wrap.data.indexed import open_indexed
from megatron_wrap.data.sources import first_training_samples
from megatron_wrap.engine.cut import batch_cut
from megatron_wrap.engine.micro_batch import try_flow
from megatron_wrap.engine.optimizer import build_optimizer, build_scheduler
from megatron_wrap.engine.precomputed import use_precomputed
from megatron_wrap.engine.reduce import MetricReduction
from megatron_wrap.engine.samples import SampleSharing
from megatron_wrap.engine.schedule import Schedule
from megatron_wrap.engine.state import TrainingState
from megatron_wrap.errors import ConfigError, PlatformError
from megatron_wrap.flow import FlowContext, MegatronWrapFlowEntry, MegatronWrapTrainingFlowBase
from megatron_wrap.flow.config import decode_flow_config
from megatron_wrap.metrics.throughput import ExpertShape, LatentAttentionShape, ModelShape
from megatron_wrap.model.initial_weights import fill_initial_weights, is_expert
from megatron_wrap.model.provider import MegatronModelProviderEntry, padded_vocab_size
from megatron_wrap.model.request import ModelRequest
from megatron_wrap.model.transformer import same_named, transformer_config, use_transformer_engine
from megatron_wrap.parallel.collectives import average_detached, gather_sequence, sum_on_group
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.platform.base import Platform
from megatron_wrap.platform.machine import megatron_core_version
from megatron_wrap.platform.versions import accepts, version

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


def build_training_state(
    config: RunConfig,
    platform: Platform,
    parallel: ParallelState,
    tokenizer: Any,
    from_hugging_face: bool = True,
    training: bool = True,
) -> TrainingState:
    """Build the state of a run, with the weights of `model_provider.hf_path` or else initial weights. First the flow
    collates the head of the training data, to find errors early.

    Args:
        tokenizer: the run's Hugging Face tokenizer, or None.
        from_hugging_face: False ignores hf_path, for a caller that loads a checkpoint.
        training: False builds only the model, without gradient buffers, optimizer and schedule.
    """
    seed_everything(config.train.seed, parallel)
    vocab_size = resolve_vocab_size(config, tokenizer)
    flow = build_flow(config, parallel, tokenizer, vocab_size)
    if training:
        use_precomputed(flow, config)
        try_flow(flow, _first_samples(config, vocab_size, tokenizer), config.train.seed)
    model_config = transformer_config(config, parallel, platform, training)
    hugging_face = hugging_face_source(config) if from_hugging_face else None
    bare = build_chunks(config, platform, parallel, model_config, vocab_size, hugging_face=hugging_face)
    chunks = wrap_chunks(config, model_config, bare) if training else bare
    if training:
        platform.refuse_unsafe(config.optimizer.upstream, platform.has_transformer_engine)
    optimizer = build_optimizer(config, model_config, chunks) if training else None
    shape = model_shape(config, vocab_size)
    return TrainingState(
        config=config,
        platform=platform,
        parallel=parallel,
        flow=flow,
        transformer_config=model_config,
        chunks=chunks,
        optimizer=optimizer,
        scheduler=None if optimizer is None else build_scheduler(config, optimizer),
        shape=shape,
        cut=batch_cut(config, parallel, shape, _group_size(model_config, parallel)),
        schedule=Schedule(
            parallel=parallel,
            device=platform.device,
            sequence_parallel=model_config.sequence_parallel,
            half_precision=config.dtype.bf16 or config.dtype.fp16,
            has_experts=config.arch.num_experts is not None,
            token_multiple=token_multiple(config),
        ),
        sharing=SampleSharing(parallel.world),
        reduction=MetricReduction(flow, parallel, platform.device),
    )


def _first_samples(config: RunConfig, vocab_size: int, tokenizer: Any) -> list[Any]:
    """The head of the training data."""
    count = 2 * config.train.micro_batch_size
    if derived.is_indexed(config.data):
        windows = open_indexed(config, vocab_size, tokenizer).training
        return [windows.read(position) for position in range(count)]
    return first_training_samples(
        derived.training_sources(config),
        derived.mock_samples(config.data),
        count,
        skip_bad=config.data.on_bad_sample == "skip",
    )


def _group_size(model_config: TransformerConfig, parallel: ParallelState) -> int:
    """The number of a replica's micro-batches must be a multiple of it."""
    return model_config.microbatch_group_size_per_vp_stage if parallel.virtual_size else 1


def seed_everything(seed: int, parallel: ParallelState) -> None:
    """Seed Python, numpy, torch and Megatron-Core's tensor-parallel generators, each pipeline stage differently, as in
    Megatron-LM (megatron/training/initialize.py)."""
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    stage_seed = seed + 100 * parallel.pp.rank
    random.seed(stage_seed)
    numpy.random.seed(stage_seed)
    torch.manual_seed(stage_seed)
    model_parallel_cuda_manual_seed(stage_seed)


def resolve_vocab_size(config: RunConfig, tokenizer: Any) -> int:
    """The model's vocabulary size, without padding: that of the architecture, else the tokenizer's.

    Raises:
        ConfigError: neither is set, or the tokenizer has more entries than the model.
    """
    given = config.arch.vocab_size
    if tokenizer is None:
        if given is None:
            raise ConfigError(
                "megatron_lm.model.arch.vocab_size is null and there is no tokenizer to take it from; set it, or "
                "megatron_wrap.data.tokenizer"
            )
        return given
    if given is not None and len(tokenizer) > given:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} entries, but megatron_lm.model.arch.vocab_size is {given}; set it to "
            f"{len(tokenizer)} or larger, or use the model's own tokenizer"
        )
    return given if given is not None else len(tokenizer)


def build_flow(
    config: RunConfig, parallel: ParallelState, tokenizer: Any, vocab_size: int
) -> MegatronWrapTrainingFlowBase:
    """The flow of `megatron_wrap.flow.flow_key`."""
    flow_class = MegatronWrapFlowEntry.get_flow_class(config.flow.flow_key)
    context = FlowContext(
        micro_batch_size=config.train.micro_batch_size,
        seq_length=config.train.seq_length,
        vocab_size=vocab_size,
        cp_size=parallel.cp.size,
        sum_on_cp_group=lambda partial: sum_on_group(partial, parallel.cp.group),
        average_across_dp_ranks=lambda value: average_detached(value, parallel.dp.group),
        tokenizer=tokenizer,
        gather_on_cp_group=lambda part, dim: gather_sequence(part, dim, parallel.cp.group),
        sources=tuple(source.name for source in config.data.train),
    )
    return flow_class(decode_flow_config(flow_class, config), context)


def build_chunks(
    config: RunConfig,
    platform: Platform,
    parallel: ParallelState,
    model_config: TransformerConfig,
    vocab_size: int,
    new_weights: bool = True,
    hugging_face: tuple[Family, WeightSource] | None = None,
) -> list[torch.nn.Module]:
    """This process's model chunks; in half precision each is wrapped in Megatron-Core's Float16Module.

    Args:
        new_weights: set initial weights; False leaves the weights unset.
        hugging_face: load these weights instead of the initial ones.
    """
    from megatron.core.transformer.module import Float16Module

    provider = MegatronModelProviderEntry.get_provider(config.model_provider.provider_key)
    padded = padded_vocab_size(vocab_size, config.arch.make_vocab_size_divisible_by, parallel.tp.size)
    chunks = []
    for stage in range(parallel.virtual_size or 1):
        virtual_stage = stage if parallel.virtual_size else None
        last_stage = parallel.virtual_size - 1 if parallel.virtual_size else 0
        request = ModelRequest(
            config=config,
            transformer_config=model_config,
            state=parallel,
            transformer_engine=use_transformer_engine(config, platform),
            vocab_size=vocab_size,
            padded_vocab_size=padded,
            pre_process=parallel.pp.rank == 0 and stage == 0,
            post_process=parallel.is_last_stage and stage == last_stage,
            virtual_stage=virtual_stage,
        )
        chunk = provider(request)
        chunk.to(platform.device)
        _mark_experts(chunk)
        if new_weights and (hugging_face is None or not hugging_face[1].is_complete(hugging_face[0])):
            fill_initial_weights(
                chunk, config.arch, vocab_size, config.train.seed, parallel.tp, expert_tp=parallel.expert_tp
            )
        half = config.dtype.bf16 or config.dtype.fp16
        chunks.append(Float16Module(model_config, chunk) if half else chunk)
        if hugging_face is not None:  # after Float16Module, which also converts the buffers that must stay fp32
            family, source = hugging_face
            load_weights(chunk, family, config.arch, source, parallel)
    return chunks


def _mark_experts(chunk: torch.nn.Module) -> None:
    """Mark the experts' parameters, so that they have their own gradient buffers and optimizer states for every EP.

    Megatron-Core marks them only if EP > 1 (tensor_parallel/layers.py). Without the mark a checkpoint saved with EP 1
    would have another format, and with an expert TP smaller than TP the gradients of an expert's copies would not be
    reduced.
    """
    for name, parameter in chunk.named_parameters():
        if is_expert(name):
            parameter.allreduce = False  # type: ignore[attr-defined]


def wrap_chunks(
    config: RunConfig, model_config: TransformerConfig, chunks: list[torch.nn.Module]
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
        DistributedDataParallel(model_config, ddp_config, chunk, disable_bucketing=place > 0)
        for place, chunk in enumerate(chunks)
    ]
    one = len(wrapped) == 1
    model_config.finalize_model_grads_func = finalize_model_grads
    if ddp.overlap_grad_reduce:
        model_config.no_sync_func = wrapped[0].no_sync if one else [chunk.no_sync for chunk in wrapped]
        if not one and getattr(ddp_config, "align_param_gather", False):
            model_config.grad_sync_func = [chunk.start_grad_sync for chunk in wrapped]
    return wrapped


def model_shape(config: RunConfig, vocab_size: int) -> ModelShape:
    """The sizes from which the model's FLOPs are computed."""
    arch = config.arch
    experts = None
    if arch.num_experts is not None:
        experts = ExpertShape(
            num_layers=sum(derived.moe_layer_pattern(arch)),
            num_experts=arch.num_experts,
            topk=arch.moe_router_topk,
            ffn_hidden_size=derived.moe_ffn_hidden_size(arch),
            shared_ffn_hidden_size=arch.moe_shared_expert_intermediate_size or 0,
            shared_gate=arch.moe_shared_expert_gate,
        )
    latent = None
    if arch.multi_latent_attention:
        latent = LatentAttentionShape(
            q_lora_rank=arch.q_lora_rank,
            kv_lora_rank=arch.kv_lora_rank,
            qk_head_dim=arch.qk_head_dim + arch.qk_pos_emb_head_dim,
            qk_pos_emb_head_dim=arch.qk_pos_emb_head_dim,
            v_head_dim=arch.v_head_dim,
        )
    return ModelShape(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=derived.ffn_hidden_size(arch),
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=derived.num_query_groups(arch),
        kv_channels=derived.kv_channels(arch),
        vocab_size=vocab_size,
        output_size=1 if derived.has_value_head(config) else None,
        gated_linear_unit=arch.swiglu,
        experts=experts,
        latent_attention=latent,
    )

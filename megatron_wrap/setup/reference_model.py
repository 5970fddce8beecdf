"""Builds the reference or teacher model of `megatron_wrap.models`."""

from __future__ import annotations

from typing import Any

from megatron_wrap.bridge.adapters.peft_folder import with_other_adapter
from megatron_wrap.bridge.adapters.trained_parameters import trained_shape
from megatron_wrap.bridge.loading.hf_path import starting_weights
from megatron_wrap.config.checks.vocabulary import model_vocab_size
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.engine.memory import defers_logits
from megatron_wrap.engine.passes.reference_model import BaseOfPolicy, ReferenceModel
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.model.transformer_config import transformer_config
from megatron_wrap.parallel.agreement import on_rank_0
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.plan.flops import forward_flops
from megatron_wrap.plan.model_parts import model_shape
from megatron_wrap.plan.pipeline_split import with_split
from megatron_wrap.platform.base.platform import Platform
from megatron_wrap.setup.flow import common_vocab_size
from megatron_wrap.setup.model_chunks import build_chunks, predicted_ids


def build_reference(config: RunConfig, platform: Platform, parallel: ParallelState, tokenizer: Any) -> ReferenceModel:
    """The reference or teacher model in evaluation mode, with the weights of `hf_path` if that is set; else the caller
    must load them. A teacher's logits have the columns of the student's on each process. It has as many rows as the
    student, and rows that only one of the two models has are left out.

    Args:
        config: the run's with the architecture of that model (`megatron_wrap.checkpoint.reference_config`).
        tokenizer: the run's Hugging Face tokenizer, or None.
    """
    settings = config.models.reference_or_teacher
    assert settings is not None, "only called with a reference or teacher model"
    vocab_size = model_vocab_size(config.arch, tokenizer, config.model_provider.hf_path)
    shape = model_shape(config, vocab_size)
    config = with_split(config, shape, on_rank_0(lambda: platform.device_name))
    model_config = transformer_config(config, platform, training=False)
    weight_folder = starting_weights(config) if settings.source == "hf_path" else None
    deferred = defers_logits(config, platform, parallel, vocab_size, trained=False)
    common = common_vocab_size(config, tokenizer, vocab_size)
    rows, predicted = vocab_size, predicted_ids(config, common)
    if predicted is not None and config.policy is not None:
        rows = model_vocab_size(config.policy.arch, tokenizer, config.policy.model_provider.hf_path)
    chunks = build_chunks(
        *(config, platform, parallel, model_config, rows, tokenizer),
        new_weights=False,
        weight_folder=weight_folder,
        defer_logits=deferred,
        predicted_ids=predicted,
    )
    for chunk in chunks:
        chunk.eval().requires_grad_(False)
    half = config.dtype.bf16 or config.dtype.fp16
    reference = ReferenceModel(
        chunks=chunks,
        transformer_config=model_config,
        config=config,
        vocab_size=vocab_size,
        flops=forward_flops(shape),
        device=platform.device,
        has_policy_columns=common is None or config.models.role == "teacher",
        averages_in_fp32=half and settings.ema_decay is not None,
    )
    if settings.offload:
        reference.keep_on_host()
    return reference


def base_of_policy(state: TrainingState) -> ReferenceModel:
    """The policy's own chunks, whose trained adapter is switched off while the model is used as the reference."""
    from megatron.core.distributed import DistributedDataParallel

    settings = state.config.models.reference_or_teacher
    chunks = [chunk.module if isinstance(chunk, DistributedDataParallel) else chunk for chunk in state.chunks]
    adapter, vocab_size = None if settings is None else settings.adapter, state.shape.vocab_size
    if adapter is None:
        shape = model_shape(state.config, vocab_size)
    else:
        shape = trained_shape(with_other_adapter(state.config, adapter), vocab_size)
    return BaseOfPolicy(
        chunks=chunks,
        transformer_config=state.transformer_config,
        config=state.config,
        vocab_size=vocab_size,
        flops=forward_flops(shape),
        device=state.platform.device,
        policy=state.chunks,
        adapter=adapter,
    )

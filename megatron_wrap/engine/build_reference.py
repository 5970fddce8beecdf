"""Builds the second model of `megatron_wrap.models`."""

from __future__ import annotations

from typing import Any

from megatron_wrap.bridge.start import hugging_face_source
from megatron_wrap.config.schema import RunConfig
from megatron_wrap.engine.build import build_chunks, resolve_vocab_size
from megatron_wrap.engine.reference import ReferenceModel
from megatron_wrap.model.transformer import transformer_config
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.platform.base import Platform


def build_reference(
    config: RunConfig, platform: Platform, parallel: ParallelState, tokenizer: Any, policy_vocab_size: int
) -> ReferenceModel:
    """The second model, in evaluation mode, with the weights of `hf_path`, if it has that; else the caller must load
    them.

    Args:
        config: the run's with the architecture of the second model (`megatron_wrap.checkpoint.second_model`).
        tokenizer: the run's Hugging Face tokenizer, or None.
        policy_vocab_size: without padding.
    """
    settings = config.models.second
    assert settings is not None, "only called with a second model"
    vocab_size = policy_vocab_size if config.arch.vocab_size is None else resolve_vocab_size(config, tokenizer)
    model_config = transformer_config(config, parallel, platform, training=False)
    source = hugging_face_source(config) if settings.source == "hf_path" else None
    chunks = build_chunks(config, platform, parallel, model_config, vocab_size, False, source)
    for chunk in chunks:
        chunk.eval().requires_grad_(False)
    half = config.dtype.bf16 or config.dtype.fp16
    reference = ReferenceModel(
        chunks=chunks,
        transformer_config=model_config,
        config=config,
        vocab_size=vocab_size,
        device=platform.device,
        averages_in_fp32=half and settings.ema_decay is not None,
    )
    if settings.offload:
        reference.keep_on_host()
    return reference

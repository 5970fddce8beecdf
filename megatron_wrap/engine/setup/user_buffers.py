"""Transformer Engine's user buffers: memory that the GPUs of a tensor-parallel group write to directly, so that the
communication of its layers overlaps with their matmuls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.errors import ConfigError
from megatron_wrap.model.transformer_config import use_transformer_engine
from megatron_wrap.platform.base.platform import Platform

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

_KEY = "megatron_lm.model.parallel.tp_comm_overlap"


def start_user_buffers(config: RunConfig, platform: Platform, model_config: TransformerConfig) -> None:
    """Allocate the buffers of a model of Transformer Engine's layers with `tp_comm_overlap`, before its first pass; do
    nothing for other models. The buffers have the size of one micro-batch, as in Megatron-LM
    (megatron/training/initialize.py), and belong to the process: `Platform.uninstall` releases them. Collective over
    all processes.

    Raises:
        ConfigError: micro-batches differ in size, or the GPUs here have no multicast and UB_SKIPMC is not set.
    """
    if not (model_config.tp_comm_overlap and use_transformer_engine(config, platform)):
        return
    if derived.varies_in_length(config):
        raise ConfigError(
            f"{_KEY}: the user buffers of Transformer Engine hold micro-batches of one size, and samples differ in "
            "length; write collate_type: fixed_length without packing, transformer_impl: torch, or false"
        )
    from transformer_engine.pytorch.module.base import UserBufferQuantizationMode, initialize_ub

    tokens = config.train.seq_length * config.train.micro_batch_size // config.parallel.context_parallel_size
    mode = UserBufferQuantizationMode.FP8 if model_config.fp8 else UserBufferQuantizationMode.NONE
    try:
        initialize_ub(
            [tokens, config.arch.hidden_size],
            config.parallel.tensor_model_parallel_size,
            quantization_modes=[mode],
            dtype=model_config.params_dtype if not model_config.fp8 else torch.bfloat16,
            bootstrap_backend=model_config.tp_comm_bootstrap_backend,
        )
    except RuntimeError as error:
        raise ConfigError(f"{_KEY}: Transformer Engine has no user buffers here: {error}; or write false") from error

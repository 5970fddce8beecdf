"""The model in evaluation mode, for forward passes between steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.platform.megatron_core.generation import without_fp8


@contextmanager
def evaluation_mode(state: TrainingState) -> Iterator[None]:
    """Context without dropout, graph and FP8. With `overlap_param_gather` the parameters are gathered first, because in
    training the forward pass gathers them. A nested use changes nothing."""
    if not state.chunks[0].training:
        yield
        return
    overlapped = state.config.ddp.overlap_param_gather and state.optimizer is not None
    for chunk in state.chunks:
        chunk.eval()
        if overlapped:
            chunk.disable_forward_pre_hook(param_sync=True)
    try:
        with torch.no_grad(), without_fp8(state.chunks) if state.transformer_config.fp8 else nullcontext():
            yield
    finally:
        for chunk in state.chunks:
            chunk.train()
            if overlapped:
                chunk.enable_forward_pre_hook()

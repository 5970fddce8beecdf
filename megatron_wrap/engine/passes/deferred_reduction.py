"""Passes whose gradients stay on this rank until they are reduced later."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


@contextmanager
def deferred_reduction(chunks: Sequence[Any], config: TransformerConfig, share: float) -> Iterator[None]:
    """Context in which runs of the schedule leave this rank's gradients in its buffers, as between micro-batches.

    Args:
        chunks, config: the model chunks of this process, and their configuration.
        share: micro-batches of the run, as a share of those of the step. The schedule divides losses, and those of the
            routers, by the micro-batches of a run (schedules.py, forward_step_calc_loss).
    """
    before = config.finalize_model_grads_func, config.no_sync_func, config.grad_sync_func, config.grad_scale_func
    scale = config.grad_scale_func

    def scaled(loss: Tensor) -> Tensor:
        return (loss if scale is None else scale(loss)) * share

    try:
        config.finalize_model_grads_func = lambda *arguments, **keywords: None
        config.no_sync_func = config.grad_sync_func = None
        config.grad_scale_func = scaled
        with ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        finalize, no_sync, grad_sync, grad_scale = before
        config.finalize_model_grads_func = finalize
        config.no_sync_func, config.grad_sync_func, config.grad_scale_func = no_sync, grad_sync, grad_scale

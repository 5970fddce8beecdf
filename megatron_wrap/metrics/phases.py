"""Names under which parts of a step appear in a profiler's trace."""

from __future__ import annotations

from contextlib import AbstractContextManager

DATA, LOSS, OPTIMIZER = "megatron_wrap::data", "megatron_wrap::loss", "megatron_wrap::optimizer"
COMPUTED_TOKENS = "megatron_wrap::computed_tokens="
"""Followed by a number: tokens of this process's replica with padding, in the micro-batches that begin there."""


def phase(name: str) -> AbstractContextManager[None]:
    """A part of a step, recorded while a profiler runs; it takes a few microseconds elsewhere."""
    from torch.profiler import record_function

    return record_function(name)

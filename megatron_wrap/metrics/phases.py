"""Marks of a step's parts in a profiler's trace."""

from __future__ import annotations

from contextlib import AbstractContextManager

DATA, LOSS, OPTIMIZER = "megatron_wrap::data", "megatron_wrap::loss", "megatron_wrap::optimizer"
COMPUTED_TOKENS = "megatron_wrap::computed_tokens="
"""Followed by a number: tokens of this process's replica, with padding, in the micro-batches that follow."""


def phase(name: str) -> AbstractContextManager[None]:
    """Mark a part of a step for the profiler; without a profiler it costs a few microseconds."""
    from torch.profiler import record_function

    return record_function(name)

"""megatron-wrap with Liger-Kernel's RMSNorm instead of its own, only for measurements."""

from __future__ import annotations

from typing import Any

from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from torch import Tensor

from comparison import with_megatron_wrap
from comparison.task import Outcome, Task
from megatron_wrap.nn.kernels import rms_norm as our_rms_norm


def rms_norm(x: Tensor, gamma: Tensor, eps: float, zero_centered: bool = False) -> Tensor:
    """`kernels.rms_norm.rms_norm`; the mode "gemma" computes in fp32 until the end, as ours does."""
    return LigerRMSNormFunction.apply(x, gamma, eps, float(zero_centered), "gemma", False, None).to(gamma.dtype)


def run(task: Task, options: dict[str, Any]) -> Outcome:
    """Train as `with_megatron_wrap.run` does."""
    our_rms_norm.rms_norm = rms_norm
    return with_megatron_wrap.run(task, options)

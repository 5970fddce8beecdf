"""What a kernel of a GPU, or an operation on a CPU, does, by its name."""

from __future__ import annotations

import re

MATMUL, ATTENTION, COMMUNICATION = "matrix products", "attention", "exposed communication"
OPTIMIZER, LOSS, ELEMENTWISE, COPIES = "optimizer", "loss", "elementwise", "copies"
DATA, IDLE = "data", "idle"
KINDS = (MATMUL, ATTENTION, COMMUNICATION, OPTIMIZER, LOSS, ELEMENTWISE, COPIES, DATA, IDLE)
"""The rows of the table of a step, in their order."""


def _table(*rules: tuple[str, str]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in rules)


_KERNELS = _table(
    (COMMUNICATION, r"nccl|userbuffers|nvshmem|symm_mem|one_shot_all_reduce|two_shot_all_reduce"),
    # before the products: FlashAttention 3 is built from CUTLASS
    (ATTENTION, r"flash|fmha|sdpa|attn|attention|thd_|masked_softmax|cunn_softmax|softmax_warp_\w+<.*\bfalse>"),
    (MATMUL, r"nvjet|gemm|gemv|cutlass|xmma|cublas|split_?k|tensorop|wgmma|matmul"),
    (OPTIMIZER, r"multi_tensor|adam|fusedoptimizer|muon"),
    (LOSS, r"cross_entropy|online_softmax|log_?softmax|nll_loss|softmax_warp|_normalizer_kernel|_gradient_kernel"),
    (COPIES, r"memcpy|memset|copy|fillfunctor"),
    (
        ELEMENTWISE,
        r"elementwise|reduce_kernel|norm|rope|rotary|rotate|silu|gelu|relu|swiglu|geglu|act_kernel|gated|dropout"
        r"|triton_|embedding|index|gather|scatter|scan|sort|topk|cast|quantize|transpose|arange|philox|distribution"
        r"|where|mask|permute|amax|aten|native::",
    ),
)
"""(kind, names) of GPU kernels; the first that matches is taken. Names are those of cuBLAS (nvjet, xmma, gemm),
CUTLASS, cuDNN, FlashAttention, NCCL, Transformer Engine, Apex, torch, Triton and this package."""

_OPERATIONS = _table(
    (COMMUNICATION, r"^(c10d|gloo|nccl|mpi|_c10d_functional)\b|^(c10d|gloo|nccl)[:_]"),
    (ATTENTION, r"scaled_dot_product|flash_attention|efficient_attention"),
    (MATMUL, r"^aten::(mm|addmm|bmm|baddbmm|mv|addmv|dot|_scaled_mm|_grouped_mm|linear|convolution)$|mkldnn_linear"),
    (OPTIMIZER, r"^Optimizer\.step|_fused_adam|_foreach"),
    (LOSS, r"cross_entropy|log_softmax|nll_loss"),
    (COPIES, r"^aten::(copy_|_to_copy|cat|_cat|stack|clone|contiguous|fill_|zero_|zeros|empty\w*|new_\w+)$"),
)
"""The same for operations on a CPU, except that what matches none is elementwise."""

_COLLECTIVES = (
    ("reduce-scatter", re.compile(r"reduce_?scatter", re.IGNORECASE)),
    ("all-gather", re.compile(r"all_?gather", re.IGNORECASE)),
    ("all-reduce", re.compile(r"all_?reduce", re.IGNORECASE)),
    ("all-to-all", re.compile(r"all_?to_?all", re.IGNORECASE)),
    ("send and receive", re.compile(r"send|recv|receive", re.IGNORECASE)),
    ("broadcast", re.compile(r"broadcast", re.IGNORECASE)),
)


def kernel_kind(name: str) -> str | None:
    """Kind of a GPU kernel or copy; None: the name is not known, and is counted as elementwise."""
    return next((kind for kind, pattern in _KERNELS if pattern.search(name)), None)


def operation_kind(name: str) -> str:
    """Kind of an operation on a CPU."""
    return next((kind for kind, pattern in _OPERATIONS if pattern.search(name)), ELEMENTWISE)


def collective(name: str) -> str:
    """Which collective a communication kernel or operation is: "all-reduce", ..., or "other"."""
    return next((found for found, pattern in _COLLECTIVES if pattern.search(name)), "other")

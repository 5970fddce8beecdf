"""Kinds of GPU kernels and CPU operations, recognized by their names."""

from __future__ import annotations

import re

MATMUL, ATTENTION, COMMUNICATION = "matmuls", "attention", "exposed communication"
OPTIMIZER, LOSS, ELEMENTWISE, COPIES = "optimizer", "loss", "elementwise", "copies"
DATA, IDLE = "data", "idle"
KINDS = (MATMUL, ATTENTION, COMMUNICATION, OPTIMIZER, LOSS, ELEMENTWISE, COPIES, DATA, IDLE)
"""Rows of the table of a step, in this order."""

_Rules = tuple[tuple[str, re.Pattern[str]], ...]


def _rules(*rules: tuple[str, str]) -> _Rules:
    return tuple((result, re.compile(pattern, re.IGNORECASE)) for result, pattern in rules)


_KERNELS = _rules(
    (COMMUNICATION, r"nccl|userbuffers|nvshmem|symm_mem|one_shot_all_reduce|two_shot_all_reduce"),
    # before the matmuls: FlashAttention 3 is built from CUTLASS
    (ATTENTION, r"flash|fmha|sdpa|attn|attention|thd_|masked_softmax|cunn_softmax|softmax_warp_\w+<.*\bfalse>"),
    # linear attention of flash-linear-attention, and this package's convolution for it
    (
        ATTENTION,
        r"delta_rule|chunk_(fwd|bwd)_kernel|_wy_repr_|recompute_w_u|chunk_local_cumsum|causal_conv1d|short_convolution",
    ),
    (MATMUL, r"nvjet|gemm|gemv|cutlass|xmma|cublas|split_?k|tensorop|wgmma|matmul|expert_products|weight_gradients"),
    (OPTIMIZER, r"multi_tensor|adam|fusedoptimizer|muon|square_sums"),
    (LOSS, r"cross_entropy|online_softmax|log_?softmax|nll_loss|softmax_warp|log_normalizer|log_prob"),
    (COPIES, r"memcpy|memset|copy|fillfunctor"),
    (
        ELEMENTWISE,
        r"elementwise|reduce_kernel|norm|rope|rotary|rotate|silu|gelu|relu|swiglu|geglu|act_kernel|gated|dropout"
        r"|triton_|embedding|index|gather|scatter|scan|sort|topk|cast|quantize|transpose|arange|philox|distribution"
        r"|where|mask|permute|amax|aten|native::|_routing_|_rows_kernel|_split_to_",
    ),
)
"""(kind, names) of GPU kernels; the first match counts. Names are those of cuBLAS (nvjet, xmma, gemm),
CUTLASS, cuDNN, FlashAttention, NCCL, Transformer Engine, Apex, torch, Triton and this package."""

_OPERATIONS = _rules(
    (COMMUNICATION, r"^(c10d|gloo|nccl|mpi|_c10d_functional)\b|^(c10d|gloo|nccl)[:_]"),
    (ATTENTION, r"scaled_dot_product|flash_attention|efficient_attention"),
    (MATMUL, r"^aten::(mm|addmm|bmm|baddbmm|mv|addmv|dot|_scaled_mm|_grouped_mm|linear|convolution)$|mkldnn_linear"),
    (OPTIMIZER, r"^Optimizer\.step|_fused_adam|_foreach"),
    (LOSS, r"cross_entropy|log_softmax|nll_loss"),
    (COPIES, r"^aten::(copy_|_to_copy|cat|_cat|stack|clone|contiguous|fill_|zero_|zeros|empty\w*|new_\w+)$"),
)
"""(kind, names) of operations on a CPU; the first match counts, and one that matches none is elementwise."""

_COLLECTIVES = _rules(
    ("reduce-scatter", r"reduce_?scatter"),
    ("all-gather", r"all_?gather"),
    ("all-reduce", r"all_?reduce"),
    ("all-to-all", r"all_?to_?all"),
    ("send and receive", r"send|recv|receive"),
    ("broadcast", r"broadcast"),
)
COLLECTIVES = (*(name for name, _ in _COLLECTIVES), "other")

_WRAPPERS = re.compile(r"^((\w+::)*(device_kernel|Kernel2?|enable_sm\w+)<)+")
"""Matches templates whose arguments are CUTLASS's kernels."""
_ARGUMENTS = re.compile(r"<[^<>]*>")


def kernel_kind(name: str) -> str | None:
    """Kind of a GPU kernel or copy; None: the name is unknown, and the kernel counts as elementwise."""
    return _first(_KERNELS, name)


def operation_kind(name: str) -> str:
    """Kind of an operation on a CPU."""
    return _first(_OPERATIONS, name) or ELEMENTWISE


def collective(name: str) -> str:
    """The collective, one of COLLECTIVES, that a communication kernel or operation performs."""
    return _first(_COLLECTIVES, name) or "other"


def short_name(name: str) -> str:
    """A kernel's name without namespaces, template arguments and parameters."""
    short = _WRAPPERS.sub("", name.removeprefix("void ").replace("(anonymous namespace)::", ""))
    while (shorter := _ARGUMENTS.sub("", short)) != short:
        short = shorter
    return re.split(r"[<>(,]", short)[0].rpartition("::")[2].strip() or name


def _first(rules: _Rules, name: str) -> str | None:
    return next((result for result, pattern in rules if pattern.search(name)), None)

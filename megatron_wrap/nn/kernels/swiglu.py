"""SwiGLU by Liger-Kernel. Import it only where `liger_kernel` is installed."""

from __future__ import annotations

from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction
from torch import Tensor


def swiglu(gates: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension (Shazeer 2020, arXiv:2002.05202, without biases).

    Args:
        gates: [..., 2F] on a GPU, in any floating dtype.

    Returns:
        [..., F] in the same dtype.
    """
    rows = LigerFusedGateUpSiLUMulFunction.apply(gates.reshape(-1, gates.shape[-1]))
    return rows.view(*gates.shape[:-1], -1)

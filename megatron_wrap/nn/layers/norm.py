"""RMSNorm and LayerNorm of the `torch` implementation, for Megatron-Core's layer spec.

Megatron-Core's own torch norms do not support sequence parallelism (`transformer/torch_norm.py`), where tensor-parallel
ranks normalize different tokens and the gradients of the parameters must be summed over the tensor-parallel group.
`distributed/finalize_model_grads.py` does this for parameters whose `sequence_parallel` attribute is true.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_wrap.errors import ConfigError
from megatron_wrap.nn.kernels.available import has_triton

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


MAX_NORM_COLUMNS = 16384
"""Largest last dimension that `rms_norm` supports; its programs keep a row in registers."""


class _Norm(nn.Module):
    """Base of both norms: parameters with their `sequence_parallel` attribute, and fp32 arithmetic."""

    bias: nn.Parameter | None
    with_bias: bool

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **ignored: Any) -> None:
        super().__init__()
        self.eps = eps
        self.shape = (hidden_size,)
        self.zero_centered_gamma = bool(config.layernorm_zero_centered_gamma)
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype)) if self.with_bias else None
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set gamma to 1 (stored as 0 if zero-centered) and beta to 0."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _to_common_dtype(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Input, gamma and beta in one dtype, as torch's kernels require for fp32 arithmetic on half precision."""
        if not self.zero_centered_gamma and x.dtype == self.weight.dtype:
            return x, self.weight, self.bias
        gamma = self.weight.float()
        return (
            x.float(),
            gamma + 1 if self.zero_centered_gamma else gamma,
            None if self.bias is None else self.bias.float(),
        )

    def extra_repr(self) -> str:
        return f"{self.shape[0]}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class RMSNorm(_Norm):
    """x / sqrt(mean(x^2) + eps) * gamma over the last dimension (Zhang and Sennrich 2019, arXiv:1910.07467).

    Args:
        config: Megatron-Core's; reads `params_dtype`, `sequence_parallel` and `layernorm_zero_centered_gamma`.
        hidden_size: size of the last dimension: the hidden size, or the head size for query and key norms.
        eps: added to the mean square.

    Other keyword arguments of Megatron-Core are ignored. The parameters are created on torch's default device.
    """

    with_bias = False

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., hidden_size] in any floating dtype -> the same shape in the parameters' dtype; computes in
        fp32."""
        if _can_normalize(x):
            from megatron_wrap.nn.kernels.rms_norm import rms_norm

            return rms_norm(x, self.weight, self.eps, self.zero_centered_gamma)
        value, gamma, _ = self._to_common_dtype(x)
        return F.rms_norm(value, self.shape, gamma, self.eps).to(self.weight.dtype)


class LayerNorm(_Norm):
    """(x - mean) / sqrt(variance + eps) * gamma + beta over the last dimension (arXiv:1607.06450).

    Arguments as for `RMSNorm`.
    """

    with_bias = True

    def forward(self, x: Tensor) -> Tensor:
        """Normalize [..., hidden_size] in any floating dtype -> the same shape in the parameters' dtype; computes in
        fp32."""
        value, gamma, beta = self._to_common_dtype(x)
        return F.layer_norm(value, self.shape, gamma, beta, self.eps).to(self.weight.dtype)


class NormBeforeAdd(nn.Module):
    """A norm of the output of attention or the MLP, before dropout and the addition to the residual stream; to replace
    Megatron-Core's `get_bias_dropout_add` in a layer spec.

    Args:
        config: Megatron-Core's; reads `hidden_size` and `layernorm_epsilon`.
        norm: class of the norm, built with (config, hidden_size, eps).
    """

    def __init__(self, config: TransformerConfig, norm: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.norm = norm(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)

    def forward(self, training: bool, fused: bool) -> Callable[..., Tensor]:
        """The function ((output [s, b, hidden_size], bias or None), residual, dropout probability) -> [s, b,
        hidden_size]; arguments as those of Megatron-Core's function."""
        from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

        add = get_bias_dropout_add(training, fused)

        def normalize_and_add(output: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
            value, bias = output
            added: Tensor = add((self.norm(value if bias is None else value + bias), None), residual, dropout)
            return added

        return normalize_and_add


def norm_class(normalization: str) -> type[RMSNorm] | type[LayerNorm]:
    """The class for `TransformerConfig.normalization`, "RMSNorm" or "LayerNorm".

    Raises:
        ConfigError: unknown name.
    """
    known: dict[str, type[RMSNorm] | type[LayerNorm]] = {"RMSNorm": RMSNorm, "LayerNorm": LayerNorm}
    if normalization not in known:
        raise ConfigError(f"normalization {normalization!r} is not supported; choose {' or '.join(known)}")
    return known[normalization]


def _can_normalize(x: Tensor) -> bool:
    """Whether the kernel supports this input on this machine."""
    fits = x.numel() > 0 and x.shape[-1] <= MAX_NORM_COLUMNS
    return x.is_cuda and x.dtype != torch.float64 and fits and has_triton()

"""Operations on vocabulary-parallel logits for losses, without gathering the logits.

They are imported on first use: importing this package imports neither torch nor Megatron-Core.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_wrap.ops.divergence import kl_divergence
    from megatron_wrap.ops.log_probs import entropy, log_probs_and_entropy, token_log_probs, vocabulary_max
    from megatron_wrap.ops.token_values import (
        TokenTerms,
        TopK,
        gather_log_probs,
        gather_logits,
        log_probs_and_logsumexp,
        logsumexp,
        mean_log_probs,
        token_terms,
        top_k,
        top_k_log_probs,
    )

__all__ = [
    "TokenTerms",
    "TopK",
    "entropy",
    "gather_log_probs",
    "gather_logits",
    "kl_divergence",
    "log_probs_and_entropy",
    "log_probs_and_logsumexp",
    "logsumexp",
    "mean_log_probs",
    "token_log_probs",
    "token_terms",
    "top_k",
    "top_k_log_probs",
    "vocabulary_max",
]

# A module must not have the name of a function: importing it would overwrite the function in this namespace.
_MODULES = ("divergence", "log_probs", "token_values")


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (import_module(f"{__name__}.{module}") for module in _MODULES)
    return next(getattr(module, name) for module in modules if hasattr(module, name))

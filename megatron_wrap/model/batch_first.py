"""Deprecated: `BatchFirstGPTModel` is in `megatron_wrap.model.gpt_model`."""

import warnings

from megatron_wrap.model.gpt_model import BatchFirstGPTModel

__all__ = ["BatchFirstGPTModel"]

warnings.warn(
    "megatron_wrap.model.batch_first is now megatron_wrap.model.gpt_model; import BatchFirstGPTModel from there",
    DeprecationWarning,
    stacklevel=2,
)

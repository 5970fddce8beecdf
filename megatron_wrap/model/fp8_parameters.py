"""Parameters that Transformer Engine keeps in FP8 (`fp8_param_gather`), and frozen ones that are kept quantized
(`nn/layers/quantized_weights.py`): reading and writing their values."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.nn.layers.quantized_weights import quantized_of


def is_quantized(tensor: Any) -> bool:
    """Whether a tensor is in one of Transformer Engine's FP8 formats."""
    from megatron.core.fp8_utils import is_float8tensor

    return bool(is_float8tensor(tensor))


def in_high_precision(tensor: Tensor) -> Tensor:
    """The values of a tensor in its nominal dtype, such as bf16: a copy of one in FP8 or of a quantized one, else the
    tensor itself."""
    if (quantized := quantized_of(tensor)) is not None:
        return quantized.values()
    from megatron.core.fp8_utils import dequantize_fp8_tensor

    return dequantize_fp8_tensor(tensor) if is_quantized(tensor) else tensor


@contextlib.contextmanager
def writable(parameter: Tensor) -> Iterator[Tensor]:
    """Yield the tensor to which parts of a parameter's values can be written; use it without gradients.

    A part of an FP8 tensor cannot be written, because a scale belongs to many values. Such a parameter is written as a
    whole at the end of the block, from a copy in its nominal dtype. An optimizer that is built later takes the values
    of the copy, without the rounding to FP8, as it would from a parameter that Transformer Engine initialized
    (`preserve_high_precision_init_val`).

    The recipe `delayed` scales by the largest value that was written earlier. For a new model this is a value of
    uninitialized memory, so the record is cleared.

    A quantized parameter is written in the same way.
    """
    if (quantized := quantized_of(parameter)) is not None:
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        yield values
        quantized.write(values)
        return
    if not is_quantized(parameter):
        yield parameter
        return
    values = in_high_precision(parameter)
    yield values
    largest = getattr(getattr(parameter, "_quantizer", None), "amax", None)
    if largest is not None:
        largest.zero_()
    parameter.copy_(values)
    initial = getattr(parameter, "get_high_precision_init_val", lambda: None)()
    if initial is not None:
        initial.copy_(values)

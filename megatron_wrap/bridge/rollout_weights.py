"""The current weights for an engine that rolls out: a list of the Hugging Face tensors, and passes over them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_wrap.bridge.stream import WeightStream
from megatron_wrap.errors import CheckpointError, ConfigError

BUCKET_BYTES = 2**30
"""Default of the largest bucket, in bytes: that of vLLM's packed buffers."""


@dataclass(frozen=True)
class WeightMetadata:
    """One Hugging Face tensor, before it is gathered."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def dtype_name(self) -> str:
        """Name of the dtype without the module, such as "bfloat16"."""
        return str(self.dtype).removeprefix("torch.")

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class RolloutWeights:
    """The model's weights as Hugging Face tensors, in the order, with the names and the bytes of `save_pretrained`.

    Each `for name, tensor in weights` is a new pass over the weights at that time. It is collective: every rank must
    iterate to the end. Each rank gets every tensor whole, on the model's device, and has one at a time.

    Args:
        open_stream: the weights at the time of the call. Collective.
        is_sender: this process sends the tensors to the engine.

    Raises:
        CheckpointError: the family lacks a parameter of this model, or the model lacks one of the family.
    """

    def __init__(self, open_stream: Callable[[], WeightStream], is_sender: bool) -> None:
        self._open_stream = open_stream
        self._metadata = _metadata(open_stream())
        self.is_sender = is_sender

    def metadata(self) -> list[WeightMetadata]:
        """Name, dtype and shape of every tensor, in the order of a pass and the same on every rank. No tensor is
        gathered and no rank communicates."""
        return list(self._metadata)

    @property
    def nbytes(self) -> int:
        """Size of all tensors, in bytes."""
        return sum(one.nbytes for one in self._metadata)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of each weight, as `metadata` lists them. Collective.

        Raises:
            CheckpointError: the model's weights are not those of `metadata`.
        """
        stream = self._open_stream()  # a pass of its own: whoever replaces a parameter cannot leave old weights here
        if _metadata(stream) != self._metadata:
            raise CheckpointError(
                "the model has other weights than at wrap.weight_source(): call wrap.weight_source() again"
            )
        for tensor in stream.tensors:
            yield tensor.name, stream.whole(tensor)

    def buckets(self, max_bytes: int = BUCKET_BYTES, one_dtype: bool = False) -> Iterator[list[tuple[str, Tensor]]]:
        """A pass in lists of consecutive tensors. Collective.

        Args:
            max_bytes: of a list, at most; a larger tensor is a list of its own.
            one_dtype: all tensors of a list have the same dtype.

        Raises:
            ConfigError: max_bytes is below 1.
        """
        if max_bytes < 1:
            raise ConfigError(f"max_bytes {max_bytes} is not the size of a bucket; use at least 1")
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self:
            full = size + tensor.nbytes > max_bytes
            if bucket and (full or (one_dtype and bucket[-1][1].dtype != tensor.dtype)):
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += tensor.nbytes
        if bucket:
            yield bucket


def _metadata(stream: WeightStream) -> list[WeightMetadata]:
    return [WeightMetadata(tensor.name, tensor.dtype, tensor.shape) for tensor in stream.tensors]

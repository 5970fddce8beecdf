"""The current weights for a rollout engine: a list of the Hugging Face tensors, and passes over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor

from megatron_wrap.bridge.export.weight_stream import WeightMetadata, WeightStream
from megatron_wrap.errors import CheckpointError, ConfigError

BUCKET_BYTES = 2**30
"""Default size limit of a bucket, in bytes: that of vLLM's packed buffers."""


class RolloutWeights:
    """The model's weights as Hugging Face tensors, with the order, names and bytes of `save_pretrained`.

    Each `for name, tensor in weights` is a new pass that yields the current weights. It is collective: every rank must
    iterate to the end. Each rank gets every whole tensor on the model's device, one at a time.

    Args:
        open_stream: returns a stream of the current weights. Collective.
        is_sender: whether this process sends the tensors to the engine.

    Raises:
        CheckpointError: the family lacks a parameter of this model, or the model lacks one of the family.
    """

    def __init__(self, open_stream: Callable[[], WeightStream], is_sender: bool) -> None:
        self._open_stream = open_stream
        self._metadata = _metadata(open_stream())
        self.is_sender = is_sender

    def metadata(self) -> list[WeightMetadata]:
        """Name, dtype and shape of every tensor in the order of a pass, the same on every rank. Neither gathers tensors
        nor communicates."""
        return list(self._metadata)

    @property
    def nbytes(self) -> int:
        """Size of all tensors, in bytes."""
        return sum(tensor.nbytes for tensor in self._metadata)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of each weight, as `metadata` lists them. Collective.

        Raises:
            CheckpointError: the model's weights are not those of `metadata`.
        """
        stream = self._open_stream()  # a new stream for each pass, because parameters may be replaced between passes
        if _metadata(stream) != self._metadata:
            raise CheckpointError(
                "the model has other weights than at wrap.weight_source(): call wrap.weight_source() again"
            )
        yield from stream

    def buckets(self, max_bytes: int = BUCKET_BYTES, one_dtype: bool = False) -> Iterator[list[tuple[str, Tensor]]]:
        """A pass in lists of consecutive tensors. Collective.

        Args:
            max_bytes: maximum size of a list; a larger tensor is its only element.
            one_dtype: whether all tensors of a list must have the same dtype.

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

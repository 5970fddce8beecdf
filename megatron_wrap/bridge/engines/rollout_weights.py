"""The current weights for a rollout engine: a list of the Hugging Face tensors, passes over them, and the trainer's
side of a transfer: broadcasts of packed tensors, while requests to the engine wait until they have been received."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron_wrap.bridge.export.weight_stream import WeightMetadata, WeightStream
from megatron_wrap.errors import CheckpointError, ConfigError
from megatron_wrap.parallel.agreement import agreed

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


Broadcast = Callable[[Tensor], None]
"""Broadcasts a contiguous uint8 tensor [bytes] from this process to all ranks of the engine."""
Chunk = list[tuple[str, Tensor]]
"""(name, whole tensor) of the weights in one broadcast."""
FAILED = "{} was not updated: {{}}; its workers may have part of the weights, so update them again before a rollout"
"""Error message of a failed update, for the name of an engine."""


@dataclass
class Transfer(ABC):
    """Broadcasts weights to an engine, over a group that the caller opens. The class of an engine defines its requests.

    Args:
        weights: from `wrap.weight_source()`.
    """

    engine: ClassVar[str]
    """Name of the engine, for messages."""
    weights: RolloutWeights
    _broadcast: Broadcast | None = field(default=None, init=False)

    @abstractmethod
    def chunks(self) -> Generator[Chunk]:
        """A pass over the weights, in the lists of tensors that are broadcast at once. Collective."""

    @abstractmethod
    def update(self, chunks: Generator[Chunk], weight_version: str | None) -> None:
        """Update the engine with all chunks, on the sending rank; `broadcast` sends one."""

    def set_up(self, requests: Iterable[Callable[[], Any]], join: Callable[[], Broadcast]) -> None:
        """Open the sender's end of the group by `join` during the requests. Collective over the trainer's ranks.

        Raises:
            CheckpointError: on every rank, if a request or `join` fails.
        """
        with agreed(f"{self.engine}'s weight transfer was not set up: {{}}", (Exception,)):
            if self.weights.is_sender:
                with during(requests):
                    self._broadcast = join()

    def send_weights(self, weight_version: str | None = None) -> None:
        """Update the engine with the current weights. Collective over the trainer's ranks.

        Args:
            weight_version: name of these weights in the engine's responses; None: unchanged.

        Raises:
            CheckpointError: on every rank, if a request or the broadcast fails, or `connect` was not called.
        """
        with agreed(FAILED.format(self.engine), (Exception,)):
            chunks = self.chunks()
            try:
                if self.weights.is_sender:
                    if self._broadcast is None:
                        raise RuntimeError("call connect first")
                    self.update(chunks, weight_version)
            finally:  # the other ranks gather the weights in lockstep
                for _ in chunks:
                    pass

    def broadcast(self, chunk: Chunk) -> None:
        """Send the concatenated bytes of a chunk's tensors, on the sending rank."""
        assert self._broadcast is not None
        self._broadcast(torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in chunk]))


@contextmanager
def during(calls: Iterable[Callable[[], Any]]) -> Iterator[list[Future[Any]]]:
    """Context in which blocking calls run in threads of their own. At its end it waits for them and raises their
    errors. If the block raises, it does not wait, because the engine may be blocked in a broadcast that never comes."""
    futures = []
    for call in calls:
        futures.append(Future[Any]())
        threading.Thread(target=_call, args=(call, futures[-1]), daemon=True).start()
    yield futures
    for future in futures:
        future.result()


def _call(call: Callable[[], Any], future: Future[Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # raised again by `result`
        future.set_exception(error)

"""Weights to vLLM, by its weight transfer (docs.vllm.ai, training/weight_transfer)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from megatron_wrap.bridge.engines.broadcast import BackgroundCall, Broadcast, finished, packed
from megatron_wrap.bridge.engines.rollout_weights import BUCKET_BYTES, RolloutWeights
from megatron_wrap.parallel.agreement import agreed

_FAILED = "vLLM was not updated: {}; its workers may have part of the weights, so update them again before a rollout"


class VllmClient(Protocol):
    """vLLM's `VLLMWeightSyncClient`: reaches every replica, returns when all of them are done, raises on failure."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Set up the receiving side; returns when its ranks have joined the group."""

    def start_weight_update(self) -> None:
        """Begin an update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive the tensors that `update_info` lists; returns when they are loaded."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update."""


@dataclass
class VllmTransfer:
    """The trainer's side of vLLM's dense NCCL transfer with packed broadcasts, over a group that the caller opens.

    A trainer in whose environment vLLM is installed can use vLLM's own sender instead, with `vllm_source`.

    Args:
        weights: from `wrap.weight_source()`.
        client: used by the sending rank alone.
        buffer_bytes: a broadcast ends with the tensor that makes it larger than this; vLLM learns the number here.
    """

    weights: RolloutWeights
    client: VllmClient
    buffer_bytes: int = BUCKET_BYTES
    _broadcast: Broadcast | None = field(default=None, init=False)

    def connect(self, master_address: str, master_port: int, world_size: int, join: Callable[[], Broadcast]) -> None:
        """Set up the transfer once, before the first update. Collective over the trainer's ranks.

        Args:
            master_address, master_port: where the group meets.
            world_size: ranks of the group: the sender, which is rank 0, and all of vLLM's workers.
            join: opens the sender's end of the group, on the sending rank, while vLLM's workers join.

        Raises:
            CheckpointError: on every rank, if the client or `join` fails.
        """
        with agreed("vLLM's weight transfer was not set up: {}", (Exception,)):
            if not self.weights.is_sender:
                return
            info = {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": 1,
                "world_size": world_size,
                "packed": True,
                "packed_buffer_size_bytes": self.buffer_bytes,
                "packed_num_buffers": 2,
            }
            workers = BackgroundCall(lambda: self.client.init_weight_transfer_engine(info))
            self._broadcast = join()
            workers.result()

    def send_weights(self, weight_version: str | None = None) -> None:
        """Update vLLM with the current weights. Collective over the trainer's ranks.

        Args:
            weight_version: name of these weights in vLLM's responses; None: unchanged.

        Raises:
            CheckpointError: on every rank, if the client or the broadcast fails, or `connect` was not called.
        """
        with agreed(_FAILED, (Exception,)):
            weights = iter(self.weights)
            with finished(weights):
                if self.weights.is_sender:
                    self._send(weights, weight_version)

    def _send(self, weights: Iterator[tuple[str, Tensor]], weight_version: str | None) -> None:
        if self._broadcast is None:
            raise RuntimeError("call connect first")
        metadata = self.weights.metadata()
        info = {
            "names": [tensor.name for tensor in metadata],
            "dtype_names": [tensor.dtype_name for tensor in metadata],
            "shapes": [list(tensor.shape) for tensor in metadata],
        }
        self.client.start_weight_update()
        update = BackgroundCall(lambda: self.client.update_weights(info))
        for tensors in _chunks(weights, self.buffer_bytes):
            update.raise_failure()
            self._broadcast(packed(tensors))
        update.result()
        if weight_version is None:
            self.client.finish_weight_update()
        else:
            self.client.finish_weight_update(weight_version)


def vllm_source(weights: RolloutWeights) -> Any:
    """The weights as vLLM's own `WeightSource`, for `WeightTransferTrainerFactory.trainer_init`. Needs vLLM.

    vLLM's sender calls `metadata` and iterates on every rank of the trainer, as this source requires.
    """
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class Source(WeightSource):  # type: ignore[misc]
        def metadata(self) -> list[Any]:
            return [ParamMeta(tensor.name, tensor.dtype, tensor.shape) for tensor in weights.metadata()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(weights)

    return Source()


def _chunks(weights: Iterator[tuple[str, Tensor]], buffer_bytes: int) -> Iterator[list[Tensor]]:
    """Tensors of one broadcast each. Both sides of vLLM's protocol end one after the tensor that exceeds the buffer."""
    chunk: list[Tensor] = []
    size = 0
    for _, tensor in weights:
        chunk.append(tensor)
        size += tensor.nbytes
        if size > buffer_bytes:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk

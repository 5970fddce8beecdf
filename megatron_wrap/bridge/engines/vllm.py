"""Sends weights to vLLM, by its weight transfer (docs.vllm.ai, training/weight_transfer)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from megatron_wrap.bridge.engines.rollout_weights import (
    BUCKET_BYTES,
    Broadcast,
    Chunk,
    RolloutWeights,
    Transfer,
    during,
)


@dataclass
class VllmTransfer(Transfer):
    """The trainer's side of vLLM's dense NCCL transfer with packed broadcasts, over a group that the caller opens.

    A trainer in whose environment vLLM is installed can use vLLM's own sender instead, with `vllm_source`.

    Args:
        weights: from `wrap.weight_source()`.
        client: vLLM's `VLLMWeightSyncClient`, or an object with its four methods (`init_weight_transfer_engine`,
            `start_weight_update`, `update_weights`, `finish_weight_update`): they reach every replica, return when all
            of them are done, and raise on failure. Used by the sending rank alone.
        buffer_bytes: a broadcast ends with the tensor that makes it larger than this; vLLM learns the number here.
    """

    engine: ClassVar[str] = "vLLM"
    client: Any
    buffer_bytes: int = BUCKET_BYTES

    def connect(self, master_address: str, master_port: int, world_size: int, join: Callable[[], Broadcast]) -> None:
        """Set up the transfer once, before the first update. Collective over the trainer's ranks.

        Args:
            master_address, master_port: where the group meets.
            world_size: ranks of the group: the sender, which is rank 0, and all of vLLM's workers.
            join: opens the sender's end of the group, on the sending rank, while vLLM's workers join.

        Raises:
            CheckpointError: on every rank, if the client or `join` fails.
        """
        info = {
            "master_address": master_address,
            "master_port": master_port,
            "rank_offset": 1,
            "world_size": world_size,
            "packed": True,
            "packed_buffer_size_bytes": self.buffer_bytes,
            "packed_num_buffers": 2,
        }
        self.set_up([lambda: self.client.init_weight_transfer_engine(info)], join)

    def chunks(self) -> Generator[Chunk]:
        """The weights in chunks: both sides of vLLM's protocol end a broadcast after the tensor that exceeds the
        buffer."""
        chunk: Chunk = []
        size = 0
        for name, tensor in self.weights:
            chunk.append((name, tensor))
            size += tensor.nbytes
            if size > self.buffer_bytes:
                yield chunk
                chunk, size = [], 0
        if chunk:
            yield chunk

    def update(self, chunks: Generator[Chunk], weight_version: str | None) -> None:
        """Run one update, in which vLLM receives the tensors of all chunks."""
        metadata = self.weights.metadata()
        info = {
            "names": [tensor.name for tensor in metadata],
            "dtype_names": [tensor.dtype_name for tensor in metadata],
            "shapes": [list(tensor.shape) for tensor in metadata],
        }
        self.client.start_weight_update()
        with during([lambda: self.client.update_weights(info)]) as (call,):
            for chunk in chunks:
                if call.done():
                    call.result()  # raises if the call has failed
                self.broadcast(chunk)
        self.client.finish_weight_update(*(() if weight_version is None else (weight_version,)))


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

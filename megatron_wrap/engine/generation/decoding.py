"""One decoding pass with tensors of constant shapes, recorded as a CUDA graph. Without a graph, a pass of one token is
limited by the host's kernel launches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megatron_wrap.engine.generation.kv_cache import KeyValueCache
from megatron_wrap.utils.garbage import delayed_collection


class ConstantShapeDecoding:
    """Passes of one token per sequence, in which each layer attends to all slots of the cache with a mask.

    Args:
        run: (token ids [b, 1], position ids [b, 1]) -> logits [b, V], with `masked` as the masked slots of every layer.
        cache: filled up to slot `start`.
        masked: [b, max_length], True: no query attends to the slot; it is changed in place.
        padding: [b], number of slots on the left of each sequence to which no query attends.
        start: the slot of the next token.
    """

    def __init__(
        self, run: Callable[[Tensor, Tensor], Tensor], cache: KeyValueCache, masked: Tensor, padding: Tensor, start: int
    ) -> None:
        self._run, self._cache, self._masked, self._padding = run, cache, masked, padding
        self._slot = torch.tensor([start], device=padding.device)
        self._ids = torch.zeros((len(padding), 1), dtype=torch.long, device=padding.device)
        self._reset(start)
        self._replay: Callable[[], Tensor] = self._compute

    def capture(self) -> None:
        """Record the pass as a CUDA graph, which later calls replay. Only for a model whose pass has no data-dependent
        shape and asks the device for no value."""
        start = int(self._slot)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # kernels are loaded and workspaces allocated outside of the graph
                self._compute()
                self._reset(start)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # other threads, such as those that pin batches, continue; a collection of garbage could end an earlier graph or
        # a communicator of this thread, which CUDA refuses during a capture
        with delayed_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = self._compute()

        def replay() -> Tensor:
            graph.replay()
            return logits

        self._replay = replay

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Logits [b, V] after the tokens [b, 1]; the next call overwrites them."""
        self._ids.copy_(token_ids)
        return self._replay()

    def _compute(self) -> Tensor:
        self._masked.index_fill_(1, self._slot, False)
        self._cache.slot = self._slot
        logits = self._run(self._ids, self._slot - self._padding[:, None])
        self._slot += 1
        return logits

    def _reset(self, start: int) -> None:
        self._slot.fill_(start)
        slots = torch.arange(self._masked.shape[1], device=self._masked.device)
        self._masked.copy_((slots < self._padding[:, None]) | (slots >= start))

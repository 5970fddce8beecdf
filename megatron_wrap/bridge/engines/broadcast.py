"""What the adapters share: broadcasts of packed tensors, and requests that block until the broadcast is received."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

Broadcast = Callable[[Tensor], None]
"""Broadcasts a contiguous uint8 tensor [bytes] from this process to all ranks of the engine."""


class BackgroundCall:
    """A blocking call in its own thread. After an error nothing waits for the thread, because the engine may be blocked
    in a broadcast that never comes.

    Args:
        call: without arguments.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._future: Future[Any] = Future()

        def run() -> None:
            try:
                self._future.set_result(call())
            except BaseException as error:  # raised again by `result`
                self._future.set_exception(error)

        threading.Thread(target=run, daemon=True).start()

    def raise_failure(self) -> None:
        """Raise the call's exception if it has already failed; does not wait."""
        if self._future.done():
            self._future.result()

    def result(self) -> Any:
        """Wait for the call, and return what it returns or raise its exception."""
        return self._future.result()


def packed(tensors: list[Tensor]) -> Tensor:
    """The concatenated bytes of tensors, uint8 [bytes], on their device."""
    return torch.cat([tensor.contiguous().view(-1).view(torch.uint8) for tensor in tensors])


@contextmanager
def finished(weights: Iterator[Any]) -> Iterator[None]:
    """Iterate over the rest of a pass when the block ends or raises, because the other ranks gather the weights in
    lockstep."""
    try:
        yield
    finally:
        for _ in weights:
            pass

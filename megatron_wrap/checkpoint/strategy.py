"""Writing and reading with Megatron-Core's distributed format so that all ranks end alike, also when one fails.

Megatron-Core's own save agrees on failures of its writers, but what fails on global rank 0 alone (the common state, the
metadata) leaves the others waiting in the next collective. Here rank 0 then answers that collective first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from megatron_wrap.errors import CheckpointError
from megatron_wrap.parallel.agreement import FILE_FAILURES, agree, agreed, describe
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.platform import versions

FAILURES = (*FILE_FAILURES, CheckpointException, CheckpointingException)
"""How a disk that refuses or a damaged file shows. torch's CheckpointException is no Exception."""


def write(sharded_state: dict[str, Any], folder: Path, group: Any, device: torch.device, content: Any) -> None:
    """`dist_checkpointing.save` into an empty folder, the writing shared over `group`. Collective over the world.

    Raises:
        CheckpointError: on every rank, when any rank could not write.
    """
    strategy = _SharedSave(group)
    error: str | None = None
    cause: BaseException | None = None
    try:
        arguments = versions.save_arguments(async_save=True)
        request = dist_checkpointing.save(sharded_state, str(folder), strategy, content_metadata=content, **arguments)
        _execute(request, device)
    except (*FAILURES, CheckpointError) as failure:
        error, cause = describe(failure), failure
        if error and not isinstance(failure, OSError | CheckpointError):
            # torch's and Megatron-Core's writers do not pass on the system's own words
            error = f"not all data could be written; is the disk or the quota full? ({error})"
        if not strategy.entered:  # the others wait there, for this rank too
            with contextlib.suppress(CheckpointError):
                agree(error)
    errors = [text for text in gather_objects(error) if text is not None]
    if errors:  # a rank without a failure of its own has no words
        raise CheckpointError(cannot_write(folder.parent, next(filter(None, errors), "a rank failed"))) from cause


def cannot_write(folder: Path, cause: str) -> str:
    """The message for a failed save."""
    return f"no checkpoint could be written to {folder}: {cause}; earlier checkpoints there are as they were"


def read(sharded_state: dict[str, Any], folder: Path, group: Any) -> dict[str, Any]:
    """`dist_checkpointing.load`, the reading shared over `group`. Collective over the world.

    Returns:
        The state with tensors in place of their descriptions; tensors of the model are written in place.

    Raises:
        CheckpointError: on every rank, when any rank could not read.
    """
    # the factory refuses what is no such checkpoint; the class itself is the same in both Megatron-Cores
    get_default_load_sharded_strategy(str(folder))
    saying = f"checkpoint {folder} cannot be read: {{}}; restore it, or load an older one"
    strategy: Any = _AgreedRead(saying)
    if group.size() > 1:
        strategy = FullyParallelLoadStrategyWrapper(strategy, group)
    return dist_checkpointing.load(sharded_state, str(folder), strategy)


class _SharedSave(FullyParallelSaveStrategyWrapper):
    """Replicas share the writing; all ranks meet before the first collective of the planning."""

    def __init__(self, group: Any) -> None:
        super().__init__(versions.save_strategy(), group)
        self.entered = False

    def async_save(self, *arguments: Any, **named: Any) -> Any:
        self.entered = True
        agree(None)
        return super().async_save(*arguments, **named)


class _AgreedRead(TorchDistLoadShardedStrategy):
    """A rank that cannot read its part stops all of them."""

    def __init__(self, saying: str) -> None:
        super().__init__()
        self._saying = saying

    def load(self, *arguments: Any, **named: Any) -> Any:
        result = None
        with agreed(self._saying, FAILURES):
            result = super().load(*arguments, **named)
        return result


def _execute(request: Any, device: torch.device) -> None:
    """Run an asynchronous save's request here and now.

    Its parts end in a collective each (strategies/async_utils.py, state_dict_saver.py, serialization.py): a barrier
    after the writing, rank 0's word whether all succeeded, a barrier after the last file. A rank that fails before one
    takes part in it, so that none waits for ever.
    """
    written = None
    try:
        request._replace(finalize_fns=[]).execute_sync()
    except FAILURES as failure:
        written = failure
        dist.barrier()

    def rank_0_failed() -> None:
        dist.broadcast(torch.ones(1, dtype=torch.int, device=device), src=0)

    answers: list[Callable[[], Any]] = [rank_0_failed, dist.barrier]
    for finish, answer in zip(request.finalize_fns, answers, strict=True):
        try:
            finish()
        except CheckpointException:
            raise  # on all ranks
        except FAILURES:
            answer()
            raise
    if written is not None:
        raise written

"""Actions that may fail on some ranks: afterwards all ranks continue or all raise. Every function is collective."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch.distributed as dist

from megatron_wrap.errors import CheckpointError, ConfigError
from megatron_wrap.parallel.collectives import broadcast_object, gather_objects

FILE_FAILURES: tuple[type[BaseException], ...] = (
    OSError,
    RuntimeError,
    EOFError,
    ValueError,
    KeyError,
    pickle.UnpicklingError,
)
"""Exceptions that reading and writing files can raise."""


def agree(error: str | None, cause: BaseException | None = None) -> None:
    """Raise on all ranks if any rank failed, with the message of the first that failed. Collective over the world.

    Args:
        error: this rank's error message; None if it succeeded.

    Raises:
        CheckpointError: `error` is not None on some rank.
    """
    errors = [text for text in gather_objects(error) if text is not None]
    if errors:
        raise CheckpointError(errors[0]) from cause


@contextlib.contextmanager
def agreed(message: str, failures: tuple[type[BaseException], ...] = FILE_FAILURES) -> Iterator[None]:
    """Run the body on every rank; then all ranks continue or all raise. Collective over the world.

    A collective inside the body must fail on all ranks or on none.

    Args:
        message: error message with {} as placeholder for the cause.
        failures: exceptions that become a CheckpointError; others are bugs and are raised unchanged.

    Raises:
        CheckpointError: the body failed on some rank.
    """
    error: str | None = None
    cause: BaseException | None = None
    try:
        yield
    except CheckpointError as failure:
        error, cause = str(failure), failure
    except failures as failure:
        error, cause = message.replace("{}", describe(failure)), failure
    except Exception as bug:
        with contextlib.suppress(CheckpointError):
            agree(message.replace("{}", repr(bug)))
        raise
    agree(error, cause)


def on_rank_0(
    action: Callable[[], Any], message: str = "{}", failures: tuple[type[BaseException], ...] = FILE_FAILURES
) -> Any:
    """Run `action` on global rank 0 and return its result, or raise its error, on every rank. Collective.

    Args:
        message, failures: as for `agreed`.

    Raises:
        CheckpointError: on every rank, if the action failed.
    """
    result: Any = None
    error: str | None = None
    cause: BaseException | None = None
    if dist.get_rank() == 0:
        try:
            result = action()
        except (CheckpointError, ConfigError) as failure:
            error, cause = str(failure), failure
        except failures as failure:
            error, cause = message.replace("{}", describe(failure)), failure
        except Exception as bug:
            broadcast_object((None, message.replace("{}", repr(bug))), source_rank=0)
            raise
    result, error = broadcast_object((result, error), source_rank=0)
    if error is not None:
        raise CheckpointError(error) from cause
    return result


def describe(failure: BaseException) -> str:
    """The cause of a failure in one line; empty if only other ranks know the cause.

    torch.distributed.checkpoint's CheckpointException stores the causes by rank in `failures`.
    """
    by_rank = getattr(failure, "failures", None)
    if isinstance(by_rank, dict):
        causes = [cause for cause, _ in by_rank.values()]
        return describe(causes[0]) if causes else ""
    text = " ".join(str(failure).split())
    return text if isinstance(failure, OSError | CheckpointError) else f"{type(failure).__name__}: {text}"

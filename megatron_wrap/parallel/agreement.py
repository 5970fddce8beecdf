"""Actions that may fail on some ranks only: afterwards all ranks continue, or all raise. Everything is collective."""

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
"""What reading and writing files raises."""


def agree(error: str | None, cause: BaseException | None = None) -> None:
    """All ranks continue, or all raise with the message of the first failed rank. Collective over the world.

    Args:
        error: None where this rank succeeded.

    Raises:
        CheckpointError: `error` was given on some rank.
    """
    errors = [text for text in gather_objects(error) if text is not None]
    if errors:
        raise CheckpointError(errors[0]) from cause


@contextlib.contextmanager
def agreed(message: str, failures: tuple[type[BaseException], ...] = FILE_FAILURES) -> Iterator[None]:
    """The body runs on every rank; then all continue or all raise. Collective over the world.

    Collectives of the body must fail on all ranks or on none.

    Args:
        message: what failed, with {} in the place of the cause.
        failures: exceptions of the body that become a CheckpointError; any other is a defect and is raised as it is.

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
    except Exception as defect:
        with contextlib.suppress(CheckpointError):
            agree(message.replace("{}", repr(defect)))
        raise
    agree(error, cause)


def on_rank_0(
    action: Callable[[], Any], message: str = "{}", failures: tuple[type[BaseException], ...] = FILE_FAILURES
) -> Any:
    """The result of `action`, which only global rank 0 runs, on every rank; its failure too. Collective.

    Args:
        message, failures: as for `agreed`.

    Raises:
        CheckpointError: on every rank, when the action failed.
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
        except Exception as defect:
            broadcast_object((None, message.replace("{}", repr(defect))), source_rank=0)
            raise
    result, error = broadcast_object((result, error), source_rank=0)
    if error is not None:
        raise CheckpointError(error) from cause
    return result


def describe(failure: BaseException) -> str:
    """The cause of a failure in one line; empty where another rank knows it.

    torch.distributed.checkpoint's CheckpointException has the causes by rank in `failures`.
    """
    by_rank = getattr(failure, "failures", None)
    if isinstance(by_rank, dict):
        causes = [cause for cause, _ in by_rank.values()]
        return describe(causes[0]) if causes else ""
    text = " ".join(str(failure).split())
    return text if isinstance(failure, OSError | CheckpointError) else f"{type(failure).__name__}: {text}"

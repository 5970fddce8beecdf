"""The folders that only one training run writes at a time (its output folder and its checkpoint folder), and the number
of starts there without progress."""

from __future__ import annotations

import contextlib
import json
from contextlib import ExitStack
from pathlib import Path

from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema import derived
from megatron_wrap.errors import CheckpointError
from megatron_wrap.parallel.agreement import on_rank_0
from megatron_wrap.utils.atomic_write import write_atomically
from megatron_wrap.utils.file_lock import FolderInUse, held

_STARTS = ".starts.json"


def hold_folders(config: RunConfig) -> ExitStack:
    """Lock both folders until the returned stack is closed. Collective.

    Raises:
        CheckpointError: on every rank, if another run has locked one.
    """
    keys = {Path(derived.output_dir(config)): "megatron_wrap.logger.output_dir"}
    if config.train.save is not None:
        keys[Path(config.train.save).expanduser()] = "megatron_lm.train.common.save"
    with ExitStack() as stack:

        def hold() -> None:
            for folder, key in keys.items():
                try:
                    stack.enter_context(held(folder))
                except FolderInUse as error:
                    raise CheckpointError(f"{error}: wait until it has ended, or set another {key}") from None

        on_rank_0(hold)
        return stack.pop_all()


def count_start(config: RunConfig, iteration: int) -> None:
    """Record that training starts after `iteration` steps. Collective.

    Raises:
        CheckpointError: on every rank, if training has started there `max_starts_without_progress` times.
    """
    most = config.checkpoint.max_starts_without_progress
    if config.train.save is None or most is None:
        return
    path = Path(config.train.save).expanduser() / _STARTS

    def count() -> None:
        before: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError):
            before = json.loads(path.read_text(encoding="utf-8"))
        starts = before["starts"] if isinstance(before, dict) and before.get("iteration") == iteration else 0
        if starts >= most:
            raise CheckpointError(
                f"this run has started {starts} times from iteration {iteration}, and failed each time before it saved "
                f"a later one; {derived.output_dir(config)}/failure.json may have the cause; to start it again, delete "
                f"{path}, or raise megatron_wrap.checkpoint.max_starts_without_progress"
            )
        with contextlib.suppress(OSError):  # a folder that cannot be written is reported by a save
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps({"iteration": iteration, "starts": starts + 1}) + "\n")

    on_rank_0(count)


def forget_starts(config: RunConfig) -> None:
    """Forget the recorded starts, because the run has ended normally or was interrupted by its user. On global rank
    0."""
    if config.train.save is not None:
        with contextlib.suppress(OSError):
            (Path(config.train.save).expanduser() / _STARTS).unlink()

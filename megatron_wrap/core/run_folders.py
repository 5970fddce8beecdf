"""The folders that one training run at a time writes: its output folder and that of its checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from megatron_wrap.config import RunConfig
from megatron_wrap.config.schema import derived
from megatron_wrap.errors import CheckpointError
from megatron_wrap.parallel.agreement import on_rank_0
from megatron_wrap.utils.file_lock import FolderInUse, held


def hold_folders(config: RunConfig) -> ExitStack:
    """Hold both folders until the returned stack is closed. Collective.

    Raises:
        CheckpointError: on every rank, if another run holds one.
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

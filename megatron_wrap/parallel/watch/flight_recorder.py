"""torch's flight recorder: the last collectives of a process, those of them that have not ended, in torch's own files.

torch (2.10 and later) records the last 2,000 collectives of NCCL and gloo by default; gloo's sends and receives are not
among them. `python -m torch.distributed.flight_recorder.fr_trace` compares the files of NCCL's ranks; gloo's lack the
groups' ranks, which it needs.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = "collectives_{}"
"""Name of a rank's file in the launcher's folder, as NCCL writes it: a prefix and the rank."""
_PREFIX = FILE.removesuffix("{}")
_MAX_PENDING = 20


@contextlib.contextmanager
def written_into(folder: Path) -> Iterator[None]:
    """Processes that are started in the block write NCCL's record into the folder when a collective takes too long.
    Variables that are set are kept."""
    prefix = str(folder / _PREFIX)
    variables = {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
    }
    missing = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(missing)
    try:
        yield
    finally:
        for name in missing:
            os.environ.pop(name, None)


def record() -> bytes | None:
    """The record of this process, in torch's format; None: torch.distributed is not initialized."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch._C import _distributed_c10d as c10d

    return bytes(c10d._dump_fr_trace())  # type: ignore[attr-defined]


def pending(content: bytes) -> list[str]:
    """The collectives that have not ended, the oldest first, each as text.

    Raises:
        pickle.UnpicklingError: this is no record of torch's; nothing in it is executed.
    """
    try:
        entries = _PlainValues(io.BytesIO(content)).load()["entries"]
        return [_text(entry) for entry in entries if not entry["retired"]][:_MAX_PENDING]
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # a damaged pickle raises almost any exception
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from error


class _PlainValues(pickle.Unpickler):
    """Reads numbers, texts and their containers."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no plain value")


def _text(entry: dict[str, Any]) -> str:
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    shapes = ", ".join(str(list(shape)) for shape in entry["input_sizes"])
    group = next((name for name in reversed(entry["process_group"]) if name), "")
    return f"{entry['profiling_name']} of {shapes}, number {number} of group {group}, {entry['state']}"

"""Tensors of a safetensors file, from its header."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_wrap.errors import CheckpointError, special_file
from megatron_wrap.inside_folder import leaves_folder


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a folder."""

    file: Path
    name: str
    """Its name in the file."""
    dtype: str
    shape: tuple[int, ...]


def stored_tensors(file: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by their names, from its header.

    Raises:
        CheckpointError: truncated or corrupt, or a link out of its folder.
    """
    from safetensors import SafetensorError, safe_open

    if reason := special_file(file):
        raise CheckpointError(reason)
    if reason := leaves_folder(file.parent, file.name):
        raise CheckpointError(f"{file.parent} {reason}; give the folder that contains the file, or copy it")
    try:
        size = file.stat().st_size
        with safe_open(str(file), framework="np") as opened:  # compares the header's offsets with the file's size
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            return {
                name: StoredTensor(file, name, part.get_dtype(), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise CheckpointError(
            f"{file}: is truncated or not a safetensors file: {size} bytes ({error}); download it again"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); download it again") from error

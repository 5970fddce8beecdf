"""Names, shapes and positions of the tensors in a Hugging Face folder: headers of safetensors files, stacks of experts,
the language model beside a vision encoder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_wrap.errors import CheckpointError, special_file
from megatron_wrap.inside_folder import leaves_folder


@dataclass(frozen=True)
class FolderTensor:
    """One tensor of a folder."""

    file: Path
    name: str
    """Name of the tensor in its file."""
    dtype: str
    shape: tuple[int, ...]
    start: int | None = field(default=None, kw_only=True)
    """Position of the tensor's first byte in a safetensors file; None if it is in another kind of file, or computed
    from stored tensors."""


@dataclass(frozen=True)
class ExpertOfStack(FolderTensor):
    """A weight of one expert within a tensor of all experts of a layer. `name` and `shape` are those of the weight."""

    stack: FolderTensor
    index: int
    """Index of the expert in the stack."""
    first_row: int
    """First row of the weight in the expert's part of the stack."""


def without_stacks(folder_tensors: Mapping[str, FolderTensor]) -> dict[str, FolderTensor]:
    """The tensors of a folder by their names, in which each expert of `experts.gate_up_proj` [E, 2 f, h] and
    `experts.down_proj` [E, h, f] has separate tensors."""
    tensors: dict[str, FolderTensor] = {}
    for name, entry in folder_tensors.items():
        owner, _, part = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(part, ())
        if not parts or len(entry.shape) != 3 or not owner.endswith(".experts"):
            tensors[name] = entry
            continue
        experts, rows, columns = entry.shape[0], entry.shape[1] // len(parts), entry.shape[2]
        for index in range(experts):
            for number, weight in enumerate(parts):
                expert = f"{owner}.{index}.{weight}.weight"
                tensors[expert] = ExpertOfStack(
                    entry.file, expert, entry.dtype, (rows, columns), entry, index, number * rows
                )
    return tensors


def refuse_unless_in_folder(file: Path) -> None:
    """Refuse a pipe, socket or device, and a link out of the file's folder, with a CheckpointError."""
    if reason := special_file(file):
        raise CheckpointError(reason)
    if reason := leaves_folder(file.parent, file.name):
        raise CheckpointError(f"{file.parent} {reason}; give the folder that contains the file, or copy it")


def file_tensors(file: Path) -> dict[str, FolderTensor]:
    """The tensors of a safetensors file by their names, from its header.

    Raises:
        CheckpointError: truncated or corrupt, or a link out of its folder.
    """
    from safetensors import SafetensorError, safe_open

    refuse_unless_in_folder(file)
    try:
        size = file.stat().st_size
        with safe_open(str(file), framework="np") as opened:  # compares the header's offsets with the file's size
            slices = {name: opened.get_slice(name) for name in opened.offset_keys()}
            starts = _starts(file)
            return {
                name: FolderTensor(file, name, part.get_dtype(), tuple(part.get_shape()), start=starts[name])
                for name, part in slices.items()
            }
    except SafetensorError as error:
        raise CheckpointError(
            f"{file}: is truncated or not a safetensors file: {size} bytes ({error}); download it again"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error}); download it again") from error


def not_finite(tensor: FolderTensor) -> CheckpointError:
    """The error for a tensor with NaN or infinity."""
    return CheckpointError(
        f"{tensor.file}: {tensor.name} contains NaN or infinity; the model was damaged before it was saved, so take "
        "another one, or download the file again"
    )


def _starts(file: Path) -> dict[str, int]:
    """Position of each tensor's first byte in a safetensors file, whose header was compared with its size: 8 bytes with
    the length of the header, the header in JSON, and the tensors (https://github.com/huggingface/safetensors)."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
    return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}


_PUBLISHED, _TRANSFORMERS = PREFIXES = ("language_model.", "model.language_model.")
"""Prefixes of the language model's tensors, as Mistral publishes them and as transformers 5 names them."""
_VISION = r"(model\.)?(vision_tower|multi_modal_projector|visual)\..*"
LEFT_OUT: Mapping[str, str] = {
    _VISION: "the vision encoder and its projector are not loaded: the text model is trained, and exported alone, or "
    "with keep_vision together with the encoder"
}
"""Pattern (full match) of the vision encoder's tensors -> a warning for the user."""


def is_vision(name: str) -> bool:
    """Whether a tensor belongs to the vision encoder or its projector."""
    return re.fullmatch(_VISION, name) is not None


def prefix_of(names: Iterable[str]) -> str | None:
    """The prefix of the language model's tensors; None if the folder contains only a text model."""
    return next((prefix for name in names for prefix in PREFIXES if name.startswith(prefix)), None)


def text_name(name: str) -> str:
    """The name that a tensor of the folder has in a folder of the language model alone."""
    if name.startswith(_TRANSFORMERS):
        return "model." + name.removeprefix(_TRANSFORMERS)
    return name.removeprefix(_PUBLISHED)


def name_beside_vision(name: str, prefix: str) -> str:
    """The inverse of `text_name`, for the folder's prefix."""
    if prefix == _PUBLISHED:
        return _PUBLISHED + name
    return _TRANSFORMERS + name.removeprefix("model.") if name.startswith("model.") else name

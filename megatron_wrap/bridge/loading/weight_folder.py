"""The weight files of a Hugging Face folder: names, shapes and dtypes from their headers, and slices of the tensors.

Reading the headers detects a truncated or missing shard before anything starts.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.bridge.loading.folder_tensors import (
    LEFT_OUT,
    ExpertOfStack,
    FolderTensor,
    file_tensors,
    not_finite,
    prefix_of,
    refuse_unless_in_folder,
    text_name,
    without_stacks,
)
from megatron_wrap.bridge.loading.quantized_tensors import (
    QuantizedTensor,
    dequantized,
    file_slices,
    with_quantized,
)
from megatron_wrap.bridge.mapping.family import Family
from megatron_wrap.bridge.mapping.tensors import Region
from megatron_wrap.config.config_json import MAX_BYTES as JSON_BYTES
from megatron_wrap.config.config_json import Quantization, read_json
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import CheckpointError
from megatron_wrap.nearest_names import did_you_mean

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from megatron_wrap.bridge.loading.device_reader import DeviceReader

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json")
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""Files of a peft folder."""
PICKLE_FILES = ("pytorch_model*.bin", "pytorch_model.bin.index.json")

OUTPUTS = ("lm_head.weight", "score.weight")
"""Tensors outside transformers' base model."""
_MODEL_ADVICE = "check that the folder contains a complete model of the architecture in its config.json"
_UNUSED_ADVICE = "remove unused weights from the file, because an export would lose them"
_ADAPTER_ADVICE = (
    "set megatron_wrap.adapter.target_modules as in its adapter_config.json and megatron_wrap.model_provider.hf_path "
    "to its base, or save the adapter again"
)
_MAX_HEADER = 100_000_000
"""Largest size of the header of a safetensors file in bytes (its specification)."""
_FLOATS = ("F64", "F32", "BF16", "F16")


def folder_digest(folder: Path) -> str:
    """SHA-256 of config.json, the index, and the name, size and header of each safetensors file of a folder. It
    identifies a model without reading its weights."""
    folder, digest = folder.expanduser(), hashlib.sha256()
    for path in sorted([folder / "config.json", folder / INDEX, *folder.glob("*.safetensors")]):
        if not path.is_file():
            continue
        digest.update(f"{path.name}\0".encode())
        if path.suffix == ".json":
            with path.open("rb") as file:
                digest.update(file.read(JSON_BYTES))
            continue
        with path.open("rb") as file:
            length = min(int.from_bytes(file.read(8), "little"), _MAX_HEADER)
            digest.update(f"{path.stat().st_size}\0".encode() + file.read(length))
    return digest.hexdigest()


class WeightFolder:
    """The weights of one folder by their full names.

    Args:
        folder: contains model.safetensors, or its shards and index, or any single *.safetensors.
        family: of the model; its prefix is added if the files' names lack it.
        allow_pickle: read pytorch_model*.bin if there is no safetensors file.
        quantization: of the weights; None: they are not quantized.

    Raises:
        CheckpointError: there are no weights, a file is missing, truncated or corrupt, or scales of quantized weights
            are missing or have another shape.
    """

    def __init__(
        self, folder: Path, family: Family, allow_pickle: bool = False, quantization: Quantization | None = None
    ) -> None:
        self.folder, self.family, self.quantization = folder, family, quantization
        self._pickled: dict[Path, dict[str, Any]] = {}
        tensors = self._find(allow_pickle)
        if quantization is not None:
            tensors = with_quantized(tensors, quantization)
        if family.splits_stacks:
            tensors = without_stacks(tensors)
        prefix = family.base_prefix
        self.text_prefix = prefix_of(tensors)
        """Prefix of the language model's tensors in a folder with a vision encoder, which is not read; None if there is
        no vision encoder."""
        if self.text_prefix is not None:
            tensors = {text_name(name): entry for name, entry in tensors.items()}
        elif tensors and not any(name.startswith(prefix) for name in tensors):
            tensors = {name if name in OUTPUTS else prefix + name: entry for name, entry in tensors.items()}
        self.tensors: Mapping[str, FolderTensor] = tensors

    def read(self, name: str, region: Region, dtype: torch.dtype | None = None) -> Tensor:
        """A slice of a tensor, on the CPU. It may be memory-mapped, so the caller copies it and drops the reference.

        Args:
            dtype: in which the caller needs the values of a quantized tensor; they are in fp32, or in bf16 where that
                is exact.

        Raises:
            CheckpointError: the file cannot be read, or the slice contains NaN or infinity.
        """
        return self.assemble(name, region, self.slices(name, region), dtype=dtype)

    def slices(self, name: str, region: Region, device_reader: DeviceReader | None = None) -> list[Tensor]:
        """The slices of files from which `assemble` computes a slice of a tensor: on the CPU, or within `on_stream` of
        a reader on its device.

        Raises:
            CheckpointError: the file cannot be read.
        """
        entry = self.tensors[name]
        if isinstance(entry, QuantizedTensor):
            assert self.quantization is not None
            parts = file_slices(entry, region, self.quantization)
        elif isinstance(entry, ExpertOfStack):
            (start, stop), columns = region
            rows = slice(entry.first_row + start, entry.first_row + stop)
            parts = ((entry.stack, (slice(entry.index, entry.index + 1), rows, slice(*columns))),)
        else:
            parts = ((entry, tuple(slice(start, stop) for start, stop in region)),)
        if device_reader is None:
            return [self._slice(part, index) for part, index in parts]
        return [self._on_device(device_reader, part, index) for part, index in parts]

    def assemble(
        self,
        name: str,
        region: Region,
        slices: Sequence[Tensor],
        device_reader: DeviceReader | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """A slice of a tensor, computed from the result of `slices`; the other arguments as of `read` and `slices`.

        Raises:
            CheckpointError: the slice contains NaN or infinity; with a reader its `finish` raises that.
        """
        entry = self.tensors[name]
        if isinstance(entry, QuantizedTensor):
            assert self.quantization is not None
            values = dequantized(entry, region, slices, self.quantization, dtype)
        else:
            (values,) = slices
            values = values[0] if isinstance(entry, ExpertOfStack) else values
        if device_reader is not None:
            device_reader.check_later(entry, values)
            return values
        # propagates NaN, and is 25 times as fast as isfinite().all() in bf16: 2 ms for a block of 32 MiB
        extremes = values.aminmax() if values.numel() else ()
        if not all(extreme.isfinite() for extreme in extremes):
            raise not_finite(entry)
        return values

    def _on_device(self, reader: DeviceReader, entry: FolderTensor, index: tuple[slice, ...]) -> Tensor:
        try:
            values = reader.read(entry, index)
        except OSError as error:
            raise _cannot_be_read(entry, error) from error
        return self._slice(entry, index).to(device=reader.device) if values is None else values

    def _slice(self, entry: FolderTensor, index: tuple[slice, ...]) -> Tensor:
        if entry.file in self._pickled:
            pickled: Tensor = self._pickled[entry.file][entry.name][index]
            return pickled
        from safetensors import SafetensorError, safe_open

        try:
            # opened for each read: pages that were read stay mapped, and count as memory, until the file is closed
            with safe_open(str(entry.file), framework="pt", device="cpu") as file:
                return file.get_slice(entry.name)[index]
        except (SafetensorError, OSError) as error:
            raise _cannot_be_read(entry, error) from error

    def left_out(self, arch: ArchConfig) -> list[str]:
        """Warnings about tensors in the folder that are not read."""
        patterns = self._left_out(arch).items()
        return [text for pattern, text in patterns if any(re.fullmatch(pattern, name) for name in self.tensors)]

    def _left_out(self, arch: ArchConfig) -> dict[str, str]:
        return {**self.family.left_out(arch), **(LEFT_OUT if self.text_prefix is not None else {})}

    @property
    def omitted(self) -> list[str]:
        """Tensors that the folder may omit and omits."""
        return [name for name in self.family.new_if_missing if name not in self.tensors]

    def check(self, arch: ArchConfig) -> None:
        """Compare names, shapes and dtypes with those of the architecture, without reading tensors.

        Raises:
            CheckpointError: a tensor is missing, unexpected, or has another shape; the message names the first one and
                the number of further ones.
        """
        family = self.family
        if arch.num_layers > len(self.tensors) and not family.is_adapter:
            raise CheckpointError(
                f"{self.folder}: contains {len(self.tensors)} tensors, and the model has {arch.num_layers} layers; "
                f"{_MODEL_ADVICE}"
            )
        expected = family.shapes(arch)
        missing = [name for name in expected if name not in self.tensors and name not in family.new_if_missing]
        if missing:
            raise CheckpointError(
                f"{self.folder}: {missing[0]} is missing{_more(missing)}{did_you_mean(missing[0], self.tensors)}; "
                f"{_ADAPTER_ADVICE if family.is_adapter else _MODEL_ADVICE}"
            )
        for name in (name for name in expected if name in self.tensors):
            tensor, shape = self.tensors[name], expected[name]
            if tensor.shape != shape:
                raise CheckpointError(
                    f"{tensor.file}: {name} has shape {_shown(tensor.shape)}, but {_required_by(family)} requires "
                    f"{_shown(shape)}; check that both are of the same model"
                )
            if tensor.dtype not in _FLOATS:
                raise CheckpointError(
                    f"{tensor.file}: {name} has dtype {tensor.dtype}; weights must be bf16, fp16 or fp32"
                )
        tied = not arch.untie_embeddings_and_output_weights
        copies = map(re.escape, family.copies(arch))
        ignored = (*family.ignored, *copies, *self._left_out(arch), *((r"lm_head\.weight",) if tied else ()))
        unknown = [
            name
            for name in self.tensors
            if name not in expected and not any(re.fullmatch(pattern, name) for pattern in ignored)
        ]
        if unknown:
            raise CheckpointError(
                f"{self.tensors[unknown[0]].file}: {unknown[0]} is not a weight of {_kind(family)} of this "
                f"architecture{_more(unknown)}{did_you_mean(unknown[0], expected)}; "
                f"{_ADAPTER_ADVICE if family.is_adapter else _UNUSED_ADVICE}"
            )

    def _find(self, allow_pickle: bool) -> dict[str, FolderTensor]:
        folder = self.folder
        if (folder / INDEX).exists():
            return self._indexed(folder / INDEX)
        files = [folder / SINGLE] if (folder / SINGLE).exists() else sorted(folder.glob("*.safetensors"))
        if len(files) > 1:
            raise CheckpointError(
                f"{folder}: contains {len(files)} safetensors files and no {INDEX}; download the index too"
            )
        if files:
            return file_tensors(files[0])
        bins = sorted(folder.glob("pytorch_model*.bin"))
        if bins and allow_pickle:
            return self._unpickle(bins)
        if bins:
            raise CheckpointError(
                f"{folder}: contains {bins[0].name} and no safetensors file; set "
                "megatron_wrap.model_provider.hf_allow_pickle: true to read it (torch.load with weights_only)"
            )
        raise CheckpointError(f"{folder}: contains no weights; download {SINGLE}, or {INDEX} and its shards")

    def _indexed(self, index: Path) -> dict[str, FolderTensor]:
        content = read_json(index, "download it again", CheckpointError)
        files = content.get("weight_map") if isinstance(content, dict) else None
        if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
            raise CheckpointError(f"{index}: is not an index of safetensors files; download it again")
        tensors: dict[str, FolderTensor] = {}
        for file in sorted(set(files.values())):
            if os.path.basename(file) != file:
                raise CheckpointError(f"{index}: names {file!r}, which is not a file of this folder; download it again")
            if not os.path.exists(self.folder / file):  # Path.exists raises if a name is too long
                raise CheckpointError(f"{self.folder}: shard {file}, which {INDEX} names, is missing; download it")
            tensors.update(file_tensors(self.folder / file))
        for name, file in files.items():
            if name not in tensors or tensors[name].file.name != file:
                raise CheckpointError(
                    f"{self.folder / file}: lacks {name}, which {INDEX} lists for it; download both again"
                )
        return tensors

    def _unpickle(self, files: list[Path]) -> dict[str, FolderTensor]:
        import torch

        types = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
        tensors: dict[str, FolderTensor] = {}
        for file in files:
            _check_pickle(file)
            try:
                pickled = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            except Exception as error:  # the zip reader, the unpickler and torch raise different exceptions
                reason = " ".join(str(error).split())[:200]
                raise CheckpointError(f"{file}: cannot be read ({reason}); download the file again") from error
            if not isinstance(pickled, dict) or not all(isinstance(each, torch.Tensor) for each in pickled.values()):
                raise CheckpointError(f"{file}: is not a dictionary of tensors; save the model's state_dict")
            self._pickled[file] = pickled
            for name, tensor in pickled.items():
                kind = types.get(tensor.dtype, str(tensor.dtype))
                tensors[name] = FolderTensor(file, name, kind, tuple(tensor.shape))
        return tensors


def _cannot_be_read(entry: FolderTensor, error: Exception) -> CheckpointError:
    return CheckpointError(f"{entry.file}: {entry.name} cannot be read ({error}); download the file again")


def _check_pickle(file: Path) -> None:
    """Refuse a pickle that belongs to another user, or that is not a file of its folder."""
    refuse_unless_in_folder(file)
    owner = file.stat().st_uid
    if owner != os.geteuid():
        raise CheckpointError(
            f"{file}: belongs to another user (uid {owner}), and hf_allow_pickle reads your own files alone; copy the "
            "folder, or convert it to safetensors"
        )


def _required_by(family: Family) -> str:
    return "the adapter's base model" if family.is_adapter else "config.json"


def _kind(family: Family) -> str:
    return f"the run's adapter for a {family.model_type} model" if family.is_adapter else f"a {family.model_type} model"


def _more(names: list[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""


def _shown(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "()"

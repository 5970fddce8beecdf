"""Writes a run's model as a Hugging Face folder, on request with the vision encoder of the folder that the run started
from, copied unchanged; adapters as folders of peft; uploads. Collective over all ranks."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor

from megatron_wrap.bridge.export.export_format import WEIGHT_KEYS, ExportFormat
from megatron_wrap.bridge.export.weight_stream import WeightStream, WholeTensor, dtype_name
from megatron_wrap.bridge.loading.folder_tensors import FolderTensor, is_vision, name_beside_vision
from megatron_wrap.bridge.loading.quantized_tensors import QuantizedTensor
from megatron_wrap.bridge.loading.weight_folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    INDEX,
    SINGLE,
    WeightFolder,
)
from megatron_wrap.config.hugging_face import read_generation_config
from megatron_wrap.errors import CheckpointError, ConfigError
from megatron_wrap.parallel.agreement import agreed, on_rank_0
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.utils.atomic_write import atomic_file, write_atomically
from megatron_wrap.utils.progress import WorkProgress

VISION_FILE = "model-vision.safetensors"
_PROCESSORS = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class KeptVision:
    """The parts of an export besides its language model."""

    folder: Path
    tensors: Mapping[str, FolderTensor]
    """Tensors of the vision encoder and its projector, by name."""
    prefix: str
    """Prefix of the names of the language model's tensors in the folder."""
    config: Mapping[str, Any]
    """The folder's config.json."""

    @classmethod
    def of(cls, hf_format: ExportFormat) -> KeptVision:
        """The vision encoder of the run's hf_path.

        Raises:
            ConfigError: it has none, or the model is exported as another family.
        """
        original = hf_format.original
        if original is None or original.with_vision is None:
            raise ConfigError("keep_vision needs a run that started from a folder with a vision encoder (hf_path)")
        if original.family.model_type != hf_format.family.model_type:
            raise ConfigError(f"keep_vision exports the {original.family.model_type} of hf_path; name no other family")
        weights = WeightFolder(original.folder, original.family, quantization=original.quantization)
        assert weights.text_prefix is not None
        tensors = {name: entry for name, entry in weights.tensors.items() if is_vision(name)}
        if any(isinstance(entry, QuantizedTensor) for entry in tensors.values()):
            raise ConfigError("keep_vision copies a vision encoder as it is stored, and this one is quantized")
        return cls(original.folder, tensors, weights.text_prefix, original.with_vision)

    def name(self, text_name: str) -> str:
        """The name that a tensor of the language model has in a model with a vision encoder."""
        return name_beside_vision(text_name, self.prefix)

    def config_json(self, text: Mapping[str, Any]) -> dict[str, Any]:
        """Content of config.json for both, from that of the language model alone."""
        kept = {key: value for key, value in self.config.items() if key not in WEIGHT_KEYS}
        inner = {key: value for key, value in text.items() if key not in ("architectures", "dtype")}
        return {**kept, "text_config": {**inner, "dtype": text["dtype"]}, "dtype": text["dtype"]}

    def write(self, target: Path) -> dict[str, int]:
        """Copy the tensors and the files of the processors; returns the size of each tensor in bytes."""
        from safetensors import safe_open
        from safetensors.torch import save

        values = {}
        for entry in self.tensors.values():
            with safe_open(str(entry.file), framework="pt", device="cpu") as file:
                values[entry.name] = file.get_tensor(entry.name)
        with atomic_file(target / VISION_FILE) as written:
            written.write(save(values, metadata={"format": "pt"}))
        for file_name in _PROCESSORS:
            if (self.folder / file_name).is_file():
                shutil.copyfile(self.folder / file_name, target / file_name)
        return {name: tensor.nbytes for name, tensor in values.items()}


_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SHARDS = re.compile(r"model(-language)?-\d{5}-of-\d{5}\.safetensors(\.part)?")
_BESIDE_VISION = "model-language{suffix}.safetensors"
"""Names of the language model's files beside a vision encoder; transformers would take a file model.safetensors for the
whole model."""


def save_pretrained(
    stream: WeightStream,
    hf_format: ExportFormat,
    parallel: ParallelState,
    folder: str | os.PathLike[str],
    tokenizer: Any = None,
    max_shard_size: str | int = "5GB",
    vision: KeptVision | None = None,
) -> Path:
    """Write a folder that transformers loads. Collective.

    Each shard is written by one rank, different shards by different ranks. The other ranks send their parts block by
    block, so the writer needs memory for one more block. A file gets its name when it is complete; config.json is
    written last.

    Args:
        folder: on a file system that all ranks share; shards of an earlier export in it are replaced.
        tokenizer: saved with the weights; None: no tokenizer.
        max_shard_size: bytes, or text such as "5GB"; a tensor is never split.
        vision: written in addition to the language model; None: nothing.

    Raises:
        CheckpointError: on every rank, if any rank could not write.
    """
    target = Path(folder).expanduser()
    original = None if hf_format.original is None else hf_format.original.folder
    values = hf_format.config_json(dtype_name(stream.dtype))
    written_name: Callable[[str], str] = (lambda name: name) if vision is None else vision.name
    tensors = {written_name(tensor.name): tensor for tensor in stream.tensors}
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    split = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=int,
        filename_pattern="model{suffix}.safetensors" if vision is None else _BESIDE_VISION,
        max_shard_size=_size(max_shard_size),
    )
    message = f"no Hugging Face folder could be written to {target}: {{}}"
    with agreed(message):
        _prepare(target, original)
    with agreed(message):
        _write_shards(stream, tensors, sizes, split.filename_to_tensors, target, parallel.world.size)
    with agreed(message):
        if parallel.world.rank == 0:
            _finish(target, split, values, tokenizer, original, vision)
    return target


def save_adapter(
    stream: WeightStream,
    peft_values: dict[str, Any],
    parallel: ParallelState,
    folder: str | os.PathLike[str],
    tokenizer: Any = None,
    copies: Mapping[str, str] | None = None,
) -> Path:
    """Write adapter_model.safetensors, then adapter_config.json, on rank 0. Collective.

    Args:
        stream: of the factors, under peft's names.
        peft_values: content of adapter_config.json.
        folder: on a file system that all ranks share.
        tokenizer: saved with the adapter; None: no tokenizer.
        copies: name of a further tensor -> name of the tensor that it equals.

    Raises:
        CheckpointError: on every rank, if rank 0 could not write.
    """
    target = Path(folder).expanduser()
    # collective; an adapter is small enough for the memory of rank 0
    whole: dict[str, Any] = {name: tensor.cpu() if parallel.world.rank == 0 else None for name, tensor in stream}
    with agreed(f"no adapter could be written to {target}: {{}}"):
        if parallel.world.rank == 0:
            from safetensors.torch import save

            whole |= {copy: whole[name].clone() for copy, name in (copies or {}).items()}
            target.mkdir(parents=True, exist_ok=True)
            with atomic_file(target / ADAPTER_WEIGHTS) as file:
                file.write(save(whole, metadata={"format": "pt"}))
            if tokenizer is not None:
                tokenizer.save_pretrained(str(target))
            _write_json(target / ADAPTER_CONFIG, peft_values)
    return target


def upload(folder: Path, repo_id: str, private: bool | None, commit_message: str) -> str:
    """Upload a folder to the Hugging Face hub from global rank 0; returns the commit's URL on every rank. Collective.

    Raises:
        CheckpointError: on every rank, if the upload fails.
    """

    def push() -> str:
        from huggingface_hub import HfApi

        api = HfApi()
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit = api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message=commit_message)
        except Exception as error:  # the hub, the network and the login raise different exceptions
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise CheckpointError(
                f"{folder} could not be uploaded to {repo_id}: {reason}; the folder is complete and can be uploaded "
                "later"
            ) from error
        return str(commit.commit_url)

    return on_rank_0(push)


def _write_shards(
    stream: WeightStream,
    tensors: Mapping[str, WholeTensor],
    sizes: Mapping[str, int],
    members_of: Mapping[str, Sequence[str]],
    target: Path,
    world: int,
) -> None:
    """Write each shard by one of the `world` ranks. Collective.

    Args:
        sizes: of the tensors, in bytes.
        members_of: file name of a shard -> names of its tensors.
    """
    writers: dict[int, _ShardWriter] = {}
    # a rank that cannot write continues to receive, so that the senders do not hang; the error is raised at the end
    with WorkProgress("export", sum(sizes.values()), "B") as progress:
        failure: OSError | None = None
        for number, (name, members) in enumerate(members_of.items()):
            for member in members:
                for _, block in stream.blocks(tensors[member], number % world):
                    if block is not None and failure is None:
                        try:
                            if number not in writers:
                                writers[number] = _ShardWriter(target / name, members, tensors, sizes)
                            writers[number].write(block)
                        except OSError as error:
                            failure = error
                progress.advance(sizes[member])
        if failure is not None:
            raise failure
        for open_writer in writers.values():
            open_writer.close()


def prune_exports(folder: Path, keep: int | None, parallel: ParallelState, best: int | None = None) -> None:
    """Remove all `hf_ITERATION` folders except the `keep` newest and that of the iteration `best`, on global rank 0;
    None keeps all."""
    if keep is None or parallel.world.rank != 0:
        return
    exports = sorted(path for path in folder.glob("hf_*") if re.fullmatch(r"hf_\d{7,}", path.name))
    for old in exports[: -max(1, keep)]:
        if best is None or old.name != f"hf_{best:07d}":
            shutil.rmtree(old, ignore_errors=True)


class _ShardWriter:
    """Writes one safetensors file (huggingface.co/docs/safetensors, format), tensor by tensor."""

    def __init__(
        self, path: Path, names: Sequence[str], tensors: Mapping[str, WholeTensor], sizes: Mapping[str, int]
    ) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in names:
            tensor, end = tensors[name], offset + sizes[name]
            header[name] = {
                "dtype": _CODES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begins aligned
        self._open = contextlib.ExitStack()
        self._file = self._open.enter_context(atomic_file(path))
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, block: Tensor) -> None:
        """Append rows of the current tensor."""
        self._file.write(block.contiguous().view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Publish the file under its name."""
        self._open.close()


def _size(text: str | int) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(f"max_shard_size {text!r} is not a size; use a number of bytes, or text such as 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _prepare(target: Path, original: Path | None) -> None:
    if original is not None and target.exists() and target.samefile(original):
        raise CheckpointError(f"{target} is the folder that the run started from (hf_path); choose another folder")
    target.mkdir(parents=True, exist_ok=True)


def _finish(
    target: Path,
    split: Any,
    values: dict[str, Any],
    tokenizer: Any,
    original: Path | None,
    vision: KeptVision | None,
) -> None:
    """Complete an export on rank 0 when all shards are written: index, tokenizer and configuration files."""
    single_beside_vision = _BESIDE_VISION.format(suffix="")
    for old in target.iterdir():  # an earlier export with another number of shards
        stale = _SHARDS.fullmatch(old.name) or old.name in (SINGLE, INDEX, VISION_FILE, single_beside_vision)
        if stale and old.name not in split.filename_to_tensors:
            old.unlink()
    metadata, files = split.metadata, split.tensor_to_filename
    if vision is not None:
        sizes, values = vision.write(target), vision.config_json(values)
        metadata = {**metadata, "total_size": metadata["total_size"] + sum(sizes.values())}
        files = {**files, **dict.fromkeys(sizes, VISION_FILE)}
    if split.is_sharded or vision is not None:
        _write_json(target / INDEX, {"metadata": metadata, "weight_map": files})
    if tokenizer is not None:
        tokenizer.save_pretrained(str(target))
    _write_json(target / "generation_config.json", generation_config(original, values, tokenizer))
    _write_json(target / "config.json", values)


def generation_config(original: Path | None, values: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Content of generation_config.json: that of the original folder, else the special tokens of config.json or the
    tokenizer."""
    content = {} if original is None else read_generation_config(original)
    if content:
        return content
    special: dict[str, Any] = {"_from_model_config": True}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = values.get(key)
        if value is None and tokenizer is not None:  # config.json of a model that is trained from scratch has null
            value = getattr(tokenizer, key)
        if value is not None:
            special[key] = value
    return special


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_atomically(path, json.dumps(values, indent=2, ensure_ascii=False) + "\n")

"""Export of a run's model as a Hugging Face folder. Everything here is collective over all ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_wrap.bridge.family import Family
from megatron_wrap.bridge.source import INDEX, SINGLE
from megatron_wrap.bridge.stream import WeightStream, WholeTensor
from megatron_wrap.config.schema import ArchConfig
from megatron_wrap.errors import CheckpointError, ConfigError
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.parallel.agreement import agreed, on_rank_0

if TYPE_CHECKING:
    from megatron_wrap.parallel.state import ParallelState

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CODES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SHARDS = re.compile(r"model-\d{5}-of-\d{5}\.safetensors(\.part)?")


def weight_stream(
    chunks: Sequence[Any],
    family: Family,
    arch: ArchConfig,
    parallel: ParallelState,
    device: torch.device,
    dtype: str | torch.dtype | None = None,
) -> WeightStream:
    """A model's weights as Hugging Face tensors. Collective.

    Args:
        chunks: this process's model chunks, with or without Megatron-Core's wrappers.
        dtype: "float32", "bfloat16" or "float16"; None: that of the parameters.
    """
    return WeightStream([bare_model(chunk) for chunk in chunks], family, arch, parallel, device, as_dtype(dtype))


def export_weights(stream: WeightStream) -> Iterator[tuple[str, Tensor]]:
    """(name, full tensor) of each Hugging Face tensor on every rank, on the model's device, one at a time. Collective:
    every rank must iterate over all of them."""
    for tensor in stream.tensors:
        yield tensor.name, stream.whole(tensor)


def save_pretrained(
    stream: WeightStream,
    values: dict[str, Any],
    parallel: ParallelState,
    folder: str | os.PathLike[str],
    hf_path: str | None = None,
    tokenizer: Any = None,
    max_shard_size: str | int = "5GB",
) -> Path:
    """Write a folder that transformers loads. Collective.

    Each shard is written by one rank, different shards by different ranks. The other ranks send their parts block by
    block, so the writer needs memory for one more block. A file is renamed once it is complete; config.json
    is written last.

    Args:
        values: content of config.json.
        folder: on a file system that all ranks share; shards of an earlier export in it are replaced.
        hf_path: folder or hub id that the run started from.
        tokenizer: saved too, unless it is None.
        max_shard_size: bytes, or text such as "5GB"; a tensor is never split.

    Raises:
        CheckpointError: on every rank, if any rank could not write.
    """
    target = Path(folder).expanduser()
    shards = _shards(stream, _size(max_shard_size))
    rank, world = parallel.world.rank, parallel.world.size
    names = [SINGLE] if len(shards) == 1 else [_shard_name(number, len(shards)) for number in range(len(shards))]
    with agreed(f"no Hugging Face folder could be written to {target}: {{}}"):
        _prepare(target, hf_path)
    writers: dict[int, _ShardWriter] = {}
    # a rank that cannot write continues to receive, so that the senders do not hang; the error is raised at the end
    with agreed(f"no Hugging Face folder could be written to {target}: {{}}"):
        failure: OSError | None = None
        for number, (name, tensors) in enumerate(zip(names, shards, strict=True)):
            writer = number % world
            if writer == rank and failure is None:
                try:
                    writers[number] = _ShardWriter(target / name, tensors)
                except OSError as error:
                    failure = error
            for tensor in tensors:
                for block in stream.blocks(tensor, writer):
                    if block is not None and failure is None:
                        try:
                            writers[number].write(block)
                        except OSError as error:
                            failure = error
        if failure is not None:
            raise failure
        for open_writer in writers.values():
            open_writer.close()
    with agreed(f"no Hugging Face folder could be written to {target}: {{}}"):
        if rank == 0:
            _finish(target, names, shards, values, tokenizer, hf_path)
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


def prune_exports(folder: Path, keep: int | None, parallel: ParallelState, best: int | None = None) -> None:
    """Remove all but the `keep` newest `hf_ITERATION` folders and that of the iteration `best`, on global rank 0; None
    keeps all."""
    if keep is None or parallel.world.rank != 0:
        return
    exports = sorted(path for path in folder.glob("hf_*") if re.fullmatch(r"hf_\d{7,}", path.name))
    for old in exports[: -max(1, keep)]:
        if best is None or old.name != f"hf_{best:07d}":
            shutil.rmtree(old, ignore_errors=True)


def as_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    """A torch dtype from its name.

    Raises:
        ConfigError: weights cannot be exported in this dtype.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    name = dtype.removeprefix("torch.")
    short = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    if short.get(name, name) not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known; choose {', '.join(DTYPES)}")
    return DTYPES[short.get(name, name)]


class _ShardWriter:
    """Writes one safetensors file (huggingface.co/docs/safetensors, format), tensor by tensor."""

    def __init__(self, path: Path, tensors: Sequence[WholeTensor]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for tensor in tensors:
            end = offset + tensor.nbytes
            about = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
            header[tensor.name], offset = about, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begins aligned
        self._path, self._part = path, path.with_name(path.name + ".part")
        self._file = self._part.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)

    def write(self, block: Tensor) -> None:
        """Append rows of the current tensor."""
        self._file.write(block.contiguous().view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Flush the file and rename it to its final name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self._path)


def _shards(stream: WeightStream, limit: int) -> list[list[WholeTensor]]:
    shards: list[list[WholeTensor]] = [[]]
    size = 0
    for tensor in stream.tensors:
        if shards[-1] and size + tensor.nbytes > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards


def _shard_name(number: int, count: int) -> str:
    return f"model-{number + 1:05d}-of-{count:05d}.safetensors"


def _size(text: str | int) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].upper() not in _UNITS or float(match[1]) <= 0:
        raise ConfigError(f"max_shard_size {text!r} is not a size; use a number of bytes, or text such as 5GB or 500MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def _prepare(target: Path, hf_path: str | None) -> None:
    origin = None if hf_path is None else Path(hf_path).expanduser()
    if origin is not None and origin.exists() and target.exists() and target.samefile(origin):
        raise CheckpointError(f"{target} is the folder that the run started from (hf_path); choose another folder")
    target.mkdir(parents=True, exist_ok=True)


def _finish(
    target: Path,
    names: list[str],
    shards: list[list[WholeTensor]],
    values: dict[str, Any],
    tokenizer: Any,
    hf_path: str | None,
) -> None:
    """The last part of an export, on rank 0 after all shards are written: index, tokenizer and configuration files."""
    for old in target.iterdir():  # an earlier export with another number of shards
        stale = _SHARDS.fullmatch(old.name) or old.name in (SINGLE, INDEX)
        if stale and old.name not in names:
            old.unlink()
    if len(names) > 1:
        total = sum(tensor.nbytes for tensors in shards for tensor in tensors)
        weight_map = {tensor.name: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        _write_json(target / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    if tokenizer is not None:
        tokenizer.save_pretrained(str(target))
    _write_json(target / "generation_config.json", generation_values(hf_path, values, tokenizer))
    _write_json(target / "config.json", values)


def generation_values(hf_path: str | None, values: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Content of generation_config.json: that of hf_path, else the special tokens of config.json or the tokenizer."""
    if hf_path is not None:
        from megatron_wrap.config.hugging_face import resolve_folder

        original = resolve_folder(hf_path) / "generation_config.json"
        if original.is_file():
            found = json.loads(original.read_text(encoding="utf-8"))
            if isinstance(found, dict):
                return found
    chosen: dict[str, Any] = {"_from_model_config": True}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = values.get(key)
        if value is None:  # config.json of a model that is trained from scratch leaves them null
            value = getattr(tokenizer, key, None)
        if value is not None:
            chosen[key] = value
    return chosen


def _write_json(path: Path, values: dict[str, Any]) -> None:
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)

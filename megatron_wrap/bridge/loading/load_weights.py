"""Loads a Hugging Face folder into the parameters of this process, slice by slice."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.bridge.loading.device_reader import DeviceReader
from megatron_wrap.bridge.loading.weight_folder import WeightFolder
from megatron_wrap.bridge.mapping.model_parameters import BLOCK_BYTES, blocks, local_pieces, mapped_parameters, view_of
from megatron_wrap.bridge.mapping.tensors import Piece, Region
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.data.chat.tokenizer import NewTokens
from megatron_wrap.model.fp8_parameters import writable
from megatron_wrap.parallel.collectives import reduce_in_place
from megatron_wrap.parallel.state import Axis, ParallelState
from megatron_wrap.utils.pools.threads import map_ahead, threads_of_rank

READERS = 8
"""Largest number of threads that read the next blocks for a GPU; most of the time is the copy from the system's
cache."""
_GPU_BLOCKS = 4
"""Number of blocks of `BLOCK_BYTES` that are read at once for a GPU from a tensor of all experts, for fewer and larger
kernels."""


@dataclass(frozen=True)
class _Part:
    """A block of a parameter."""

    name: str
    """Name of the parameter."""
    parameter: Tensor
    is_padded: bool
    piece: Piece
    block: Region
    is_whole: bool
    """Whether it is the whole parameter, for one expert of a tensor of all experts."""


_Parts = list[_Part]


@torch.no_grad()
def load_weights(chunk: torch.nn.Module, arch: ArchConfig, folder: WeightFolder, parallel: ParallelState) -> None:
    """Load every parameter of a bare model chunk; reads only this rank's slices. A parameter that the folder may omit
    and omits keeps its value.

    Needs memory for one read of `BLOCK_BYTES` in addition to the parameters, on a GPU for `READERS` more, of
    `_GPU_BLOCKS` times as much where experts are stacked; of quantized tensors in fp32 unless they are exact in bf16;
    and for a copy of one parameter where they are in FP8.

    Raises:
        CheckpointError: a file cannot be read, or it is of another model, or contains NaN or infinity.
    """
    device = next(chunk.parameters()).device
    reader = DeviceReader(device) if device.type == "cuda" else None

    def slices(parts: _Parts) -> list[Tensor]:
        with contextlib.nullcontext() if reader is None else reader.on_stream():
            return folder.slices(parts[0].piece.name, _region(parts), reader)

    most, threads = (1, 1) if reader is None else (_GPU_BLOCKS, threads_of_rank(READERS))
    reads = _reads(_parts(chunk, arch, folder, parallel), most * BLOCK_BYTES)
    # threads only read, since they would wait for each other's calls to queue what the device computes
    reads_with_slices = map_ahead(slices, reads, threads)
    for _, of_parameter in itertools.groupby(reads_with_slices, key=lambda entry: entry[0][0].name):
        with contextlib.ExitStack() as stack:
            written: dict[str, Tensor] = {}
            for parts, slices_of_files in of_parameter:
                dtype = parts[0].parameter.dtype
                block = folder.assemble(parts[0].piece.name, _region(parts), slices_of_files, reader, dtype)
                for part in parts:
                    if part.name not in written:
                        written[part.name] = stack.enter_context(writable(part.parameter))
                        if part.is_padded:
                            written[part.name].zero_()
                _copy(block, parts, [view_of(written[part.name], part.piece, part.block) for part in parts])
    if reader is not None:
        reader.finish()


def _parts(chunk: torch.nn.Module, arch: ArchConfig, folder: WeightFolder, parallel: ParallelState) -> Iterator[_Part]:
    omitted = folder.omitted
    for name, parameter, mapping in mapped_parameters(chunk, folder.family, arch):
        if omitted and any(tensor in omitted for tensor in mapping.shapes()):
            continue
        pieces = local_pieces(name, parameter, mapping, parallel)
        if not pieces:  # this rank has padding alone
            parameter.zero_()
        for piece in pieces:
            for block in blocks(piece.region, parameter.element_size()):
                yield _Part(name, parameter, mapping.padded, piece, block, is_whole=len(pieces) == 1 and piece.stacked)


def _reads(parts: Iterable[_Part], most: int) -> list[_Parts]:
    """The parts in groups, each of which one read returns: consecutive rows of a tensor for one parameter, of at most
    `BLOCK_BYTES`, or consecutive experts of the same slice of a tensor of all experts, of at most `most` bytes. A
    parameter's parts stay together, and parts keep the order of the tensors."""
    by_slice: dict[Any, _Parts] = {}
    for part in parts:
        parameter = None if part.is_whole else part.name
        by_slice.setdefault((part.piece.name, part.block[1:], part.parameter.dtype, parameter), []).append(part)
    reads: list[_Parts] = []
    for group in by_slice.values():
        group.sort(key=lambda part: part.block[0])
        limit = most if group[0].is_whole else min(most, BLOCK_BYTES)
        size = 0
        for part in group:
            bytes_ = math.prod(stop - start for start, stop in part.block) * part.parameter.element_size()
            last = reads[-1] if part is not group[0] else []
            if last and last[-1].block[0][1] == part.block[0][0] and size + bytes_ <= limit:
                last.append(part)
                size += bytes_
            else:
                reads.append([part])
                size = bytes_
    return reads


def _region(parts: _Parts) -> Region:
    return ((parts[0].block[0][0], parts[-1].block[0][1]), *parts[0].block[1:])


def _copy(block: Tensor, parts: _Parts, views: list[Tensor]) -> None:
    """Copy what was read for parts into their views of the parameters."""
    if (together := _as_one(views)) is not None:  # a kernel for all, such as the experts of a stack
        together.copy_(block.reshape(together.shape))
        return
    rows = [stop - start for (start, stop), *_ in (part.block for part in parts)]
    for view, values in zip(views, block.split(rows), strict=True):
        view.copy_(values.reshape(view.shape))


def _as_one(views: list[Tensor]) -> Tensor | None:
    """Views of equal shape at equal distances in one memory as one tensor [views, ...]; None if they are not such
    views."""
    first = views[0]
    alike = all(
        view.shape == first.shape
        and view.stride() == first.stride()
        and view.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for view in views
    )
    steps = {later.storage_offset() - view.storage_offset() for view, later in itertools.pairwise(views)}
    if not alike or len(steps) != 1 or min(steps) <= 0:
        return None
    return first.as_strided((len(views), *first.shape), (steps.pop(), *first.stride()))


@torch.no_grad()
def fill_new_rows(weights: Iterable[Tensor], tokens: NewTokens, tp: Axis) -> None:
    """Set the rows of new tokens to the mean of the rows of the others, summed in fp64. Collective over tensor-parallel
    ranks.

    transformers' `resize_token_embeddings` adds to the mean a random number whose covariance is 1e-9 times that of the
    rows (`mean_resizing`, modeling_utils.py), 3e-5 of their deviation; without it all layouts start equal.

    Args:
        weights: this rank's shards of embedding and output layer, [V/tp, hidden_size].
    """
    for weight in weights:
        new, trained = (_local_rows(ids, weight, tp.rank) for ids in (tokens.ids, tokens.trained))
        total = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
        for rows in trained.split(max(1, BLOCK_BYTES // (total.element_size() * weight.shape[1]))):
            total += weight[rows].double().sum(0)
        reduce_in_place(total, "sum", tp.group)
        weight[new] = (total / len(tokens.trained)).to(weight.dtype)


def _local_rows(ids: Sequence[int], weight: Tensor, rank: int) -> Tensor:
    local = torch.tensor(ids, device=weight.device) - rank * len(weight)
    return local[(local >= 0) & (local < len(weight))]

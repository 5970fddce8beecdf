"""Loads a Hugging Face folder into the parameters of this process, slice by slice."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_wrap.bridge.loading.device_reader import DeviceReader
from megatron_wrap.bridge.loading.weight_folder import WeightFolder
from megatron_wrap.bridge.mapping.model_parameters import BLOCK_BYTES, blocks, local_pieces, mapped_parameters, view_of
from megatron_wrap.bridge.mapping.tensors import Piece, Region
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.model.fp8_parameters import writable
from megatron_wrap.utils.pools.threads import map_ahead, threads_of_rank

if TYPE_CHECKING:
    from megatron_wrap.parallel.state import ParallelState


READERS = 8
"""Threads that read the next blocks for a GPU, at most; most of the time is the copy from the system's cache."""
_GPU_BLOCKS = 4
"""Of `BLOCK_BYTES`, which are read at once for a GPU from a tensor of all experts: fewer and larger kernels."""


@dataclass(frozen=True)
class _Part:
    """A block of a parameter."""

    name: str
    """Of the parameter."""
    parameter: Tensor
    is_padded: bool
    piece: Piece
    block: Region
    is_whole: bool
    """It is the whole parameter, of one expert of a tensor of all experts."""


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

    def read(parts: _Parts) -> Tensor:
        name, region, dtype = parts[0].piece.name, _region(parts), parts[0].parameter.dtype
        if reader is None:
            return folder.read(name, region, dtype=dtype)
        with reader.on_stream():
            return folder.read(name, region, reader, dtype)

    most, threads = (1, 1) if reader is None else (_GPU_BLOCKS, threads_of_rank(READERS))
    reads = _reads(_parts(chunk, arch, folder, parallel), most * BLOCK_BYTES)
    blocks_read = _each(map_ahead(read, reads, threads))
    for _, of_parameter in itertools.groupby(blocks_read, key=lambda entry: entry[0].name):
        first = next(of_parameter)
        with writable(first[0].parameter) as values:
            if first[0].is_padded:
                values.zero_()
            for part, block in itertools.chain([first], of_parameter):
                view = view_of(values, part.piece, part.block)
                view.copy_(block.reshape(view.shape))
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
    """The parts that one read returns: consecutive experts of the same slice of a tensor of all experts, of at most
    `most` bytes; each other part alone. A parameter's parts stay together, and parts keep the order of the tensors."""
    by_slice: dict[Any, _Parts] = {}
    for number, part in enumerate(parts):
        of_expert = (part.piece.name, part.block[1:], part.parameter.dtype)
        by_slice.setdefault(of_expert if part.is_whole else number, []).append(part)
    reads: list[_Parts] = []
    for group in by_slice.values():
        group.sort(key=lambda part: part.block[0])
        size = group[0].piece.numel * group[0].parameter.element_size()
        for part in group:
            last = reads[-1] if part is not group[0] else []
            if last and last[-1].block[0][1] == part.block[0][0] and (len(last) + 1) * size <= most:
                last.append(part)
            else:
                reads.append([part])
    return reads


def _region(parts: _Parts) -> Region:
    return ((parts[0].block[0][0], parts[-1].block[0][1]), *parts[0].block[1:])


def _each(reads: Iterable[tuple[_Parts, Tensor]]) -> Iterator[tuple[_Part, Tensor]]:
    for parts, values in reads:
        yield from zip(parts, values.split(len(values) // len(parts)), strict=True)


@torch.no_grad()
def fill_new_rows(
    chunk: torch.nn.Module, arch: ArchConfig, vocab_size: int, folder: WeightFolder, parallel: ParallelState
) -> None:
    """Set the rows of embedding and output layer that the folder's model lacks to the mean of its rows, in fp32.

    transformers' `resize_token_embeddings` adds to the mean a random number whose covariance is 1e-9 times that of the
    rows (`mean_resizing`, modeling_utils.py), 3e-5 of their deviation; without it all layouts start equal.

    Args:
        arch: with the folder's vocabulary.
        vocab_size: of the model, without padding.
    """
    old = arch.vocab_size
    if old is None or vocab_size <= old:
        return
    for name, parameter, mapping in mapped_parameters(chunk, folder.family, replace(arch, vocab_size=vocab_size)):
        if not mapping.padded:
            continue
        for piece in local_pieces(name, parameter, mapping, parallel):
            (first, last), columns = piece.region
            if last > old:
                rows = ((max(first, old), last), columns)
                view_of(parameter, piece, rows).copy_(_mean_row(folder, piece.name, old, columns))


def _mean_row(folder: WeightFolder, name: str, rows: int, columns: tuple[int, int]) -> torch.Tensor:
    """The mean of a tensor's rows, [columns]."""
    parts = blocks(((0, rows), columns), torch.float32.itemsize)
    total = sum(folder.read(name, block).double().sum(0) for block in parts)
    return (torch.as_tensor(total) / rows).float()

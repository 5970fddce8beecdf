"""Loads a Hugging Face folder into the parameters of this process, slice by slice."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_wrap.bridge.loading.device_reader import DeviceReader
from megatron_wrap.bridge.loading.weight_folder import WeightFolder
from megatron_wrap.bridge.mapping.model_parameters import blocks, local_pieces, mapped_parameters, view_of
from megatron_wrap.bridge.mapping.tensors import Piece, Region
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.model.fp8_parameters import writable
from megatron_wrap.utils.pools.threads import map_ahead, threads_of_rank

if TYPE_CHECKING:
    from megatron_wrap.parallel.state import ParallelState


READERS = 8
"""Threads that read the next blocks for a GPU, at most; most of the time is the copy from the system's cache."""


@dataclass(frozen=True)
class _Part:
    """A block of a parameter."""

    name: str
    """Of the parameter."""
    parameter: Tensor
    is_padded: bool
    piece: Piece
    block: Region


@torch.no_grad()
def load_weights(chunk: torch.nn.Module, arch: ArchConfig, folder: WeightFolder, parallel: ParallelState) -> None:
    """Load every parameter of a bare model chunk; reads only this rank's slices. A parameter that the folder may omit
    and omits keeps its value.

    Needs memory for one block of `BLOCK_BYTES` in addition to the parameters, on a GPU for `READERS` more, of quantized
    tensors in fp32 unless they are exact in bf16; and for a copy of one parameter where they are in FP8.

    Raises:
        CheckpointError: a file cannot be read, or it is of another model, or contains NaN or infinity.
    """
    device = next(chunk.parameters()).device
    reader = DeviceReader(device) if device.type == "cuda" else None

    def read(part: _Part) -> Tensor:
        if reader is None:
            return folder.read(part.piece.name, part.block, dtype=part.parameter.dtype)
        with reader.on_stream():
            return folder.read(part.piece.name, part.block, reader, part.parameter.dtype)

    parts = map_ahead(read, _parts(chunk, arch, folder, parallel), 1 if reader is None else threads_of_rank(READERS))
    for _, of_parameter in itertools.groupby(parts, key=lambda entry: entry[0].name):
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
    for name, parameter, mapping in mapped_parameters(chunk, folder.family, arch):
        if any(tensor in folder.omitted for tensor in mapping.shapes()):
            continue
        pieces = local_pieces(name, parameter, mapping, parallel)
        if not pieces:  # this rank has padding alone
            parameter.zero_()
        for piece in pieces:
            for block in blocks(piece.region, parameter.element_size()):
                yield _Part(name, parameter, mapping.padded, piece, block)


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

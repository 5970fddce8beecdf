"""Loads a Hugging Face folder into the parameters of this process, slice by slice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_wrap.bridge.loading.weight_folder import WeightFolder
from megatron_wrap.bridge.mapping.model_parameters import blocks, local_pieces, mapped_parameters, view_of
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.model.fp8_parameters import writable

if TYPE_CHECKING:
    from megatron_wrap.parallel.state import ParallelState


@torch.no_grad()
def load_weights(chunk: torch.nn.Module, arch: ArchConfig, folder: WeightFolder, parallel: ParallelState) -> None:
    """Load every parameter of a bare model chunk; reads only this rank's slices. A parameter that the folder may omit
    and omits keeps its value.

    Needs memory for one block of `BLOCK_BYTES` in addition to the parameters, and for a copy of one parameter where
    they are in FP8.

    Raises:
        CheckpointError: a file cannot be read, or it is of another model.
    """
    for name, parameter, mapping in mapped_parameters(chunk, folder.family, arch):
        if any(tensor in folder.omitted for tensor in mapping.shapes()):
            continue
        with writable(parameter) as values:
            if mapping.padded:
                values.zero_()
            for piece in local_pieces(name, parameter, mapping, parallel):
                for block in blocks(piece.region, parameter.element_size()):
                    view_of(values, piece, block).copy_(folder.read(piece.name, block))

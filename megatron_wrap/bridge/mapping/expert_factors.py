"""The factors of one expert in peft's files, which have a pair of matrices for the experts of a layer. Needs no torch.

A is [experts * rank, inputs], expert after expert; B is [outputs, rank * experts], whose column k * experts + e is
column k of expert e (peft 0.19 and later, tuners/lora/layer.py, ParamWrapper.get_delta_weight). In gpt-oss, rows of
gate and up alternate in B.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_wrap.bridge.mapping.tensors import Mapping, Piece, Run

EXPERTS = ("gate_up_proj", "down_proj")
"""transformers' names of the fused tensors of a layer's experts; peft wraps the first one first."""


@dataclass(frozen=True)
class FactorOfExpert(Mapping):
    """One factor of one expert, [rank, inputs] or [outputs, rank]; `other` is the rank."""

    expert: int = 0
    experts: int = 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of the tensor of all experts."""
        rank_dim = 1 - self.along
        return {
            name: tuple(size * self.experts if dim == rank_dim else size for dim, size in enumerate(shape))
            for name, shape in super().shapes().items()
        }

    def pieces(self, local_shape: Sequence[int], rank: int, size: int) -> list[Piece]:
        """See `Mapping.pieces`; a B has one piece for each of its columns."""
        assert self.other is not None
        pieces = []
        for piece in super().pieces(local_shape, rank, size):
            if self.along == 1:
                first = self.expert * self.other
                pieces.append(replace(piece, region=((first, first + self.other), piece.region[1])))
                continue
            for column in range(self.other):
                position = column * self.experts + self.expert
                region = (piece.region[0], (position, position + 1))
                pieces.append(replace(piece, region=region, local=(piece.local[0], (column, column + 1))))
        return pieces


def expert_factors(weight: Mapping, stem: str, rank: int, expert: int, experts: int) -> tuple[Mapping, Mapping]:
    """The mappings of A and B of one expert.

    Args:
        weight: mapping of the expert's own weight.
        stem: name of the factors in the file without `.lora_A.weight`.
    """
    file_a, file_b = (f"{stem}.lora_{letter}.weight" for letter in "AB")
    assert weight.other is not None
    lengths = [sum(run.stop - run.start for run in part) for part in weight.parts]
    inputs, outputs = (sum(lengths), [weight.other]) if weight.along == 1 else (weight.other, lengths)
    ends = list(itertools.accumulate(outputs))
    parts = tuple((Run(file_b, end - length, end),) for end, length in zip(ends, outputs, strict=True))
    split_a, split_b = weight.along == 1, weight.along == 0
    return (
        FactorOfExpert(((Run(file_a, 0, inputs),),), rank, split_a, along=1, expert=expert, experts=experts),
        FactorOfExpert(parts, rank, split_b, interleaved=weight.interleaved, expert=expert, experts=experts),
    )

"""The factors of one expert in peft's files, which have a pair of matrices for the experts of a layer. Needs no torch.

A is [experts * rank, inputs], expert after expert; B is [outputs, rank * experts], whose column k * experts + e is
column k of expert e (peft/tuners/lora/layer.py, ParamWrapper.get_delta_weight). Before 0.19 peft took the fused tensors
as [experts, inputs, outputs]: its A is the transposed B of today and the reverse, in the same arrangement of experts.
gpt-oss stores them so, and its factors are those of today in every version; rows of gate and up alternate in its B.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_wrap.bridge.mapping.tensors import Mapping, Piece, Run

EXPERTS = ("gate_up_proj", "down_proj")
"""transformers' names of the fused tensors of a layer's experts; peft wraps the first one first."""


@dataclass(frozen=True)
class FactorOfExpert(Mapping):
    """One factor of one expert, [rank, inputs] or [outputs, rank]; `other` is the rank. If `transposed`, the file has
    peft's form before 0.19, with A as B and B as A."""

    expert: int = 0
    experts: int = 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of the tensor of all experts."""
        rank_dim = 0 if self._contiguous else 1
        return {
            name: tuple(size * self.experts if dim == rank_dim else size for dim, size in enumerate(shape))
            for name, shape in super().shapes().items()
        }

    @property
    def _contiguous(self) -> bool:
        """Whether the tensor in the file is an A, in which an expert's rows follow each other."""
        return (self.along == 1) != self.transposed

    def pieces(self, local_shape: Sequence[int], rank: int, size: int) -> list[Piece]:
        """See `Mapping.pieces`; a B has one piece for each of its columns."""
        assert self.other is not None
        pieces = []
        for piece in super().pieces(local_shape, rank, size):
            if self._contiguous:
                first = self.expert * self.other
                pieces.append(replace(piece, region=((first, first + self.other), piece.region[1])))
                continue
            for column in range(self.other):
                position = column * self.experts + self.expert
                region = (piece.region[0], (position, position + 1))
                columns = (column, column + 1)
                local = (columns, piece.local[1]) if self.along == 1 else (piece.local[0], columns)
                pieces.append(replace(piece, region=region, local=local))
        return pieces


def expert_factors(
    weight: Mapping, stem: str, rank: int, expert: int, experts: int, before_019: bool
) -> tuple[Mapping, Mapping]:
    """The mappings of A and B of one expert.

    Args:
        weight: of the expert's own weight.
        stem: name of the factors in the file without `.lora_A.weight`.
        before_019: the file has the form that peft had before 0.19.
    """
    before_019 = before_019 and not weight.transposed
    file_a, file_b = (f"{stem}.lora_{letter}.weight" for letter in ("BA" if before_019 else "AB"))
    form = {"transposed": before_019, "expert": expert, "experts": experts}
    assert weight.other is not None
    if weight.along == 1:
        inputs, outputs = sum(run.stop - run.start for run in weight.parts[0]), weight.other
        parts: tuple[tuple[Run, ...], ...] = ((Run(file_b, 0, outputs),),)
    else:
        inputs, rows, parts = weight.other, 0, ()
        for part in weight.parts:
            length = sum(run.stop - run.start for run in part)
            parts = (*parts, (Run(file_b, rows, rows + length),))
            rows += length
    return (
        FactorOfExpert(((Run(file_a, 0, inputs),),), rank, weight.along == 1, along=1, **form),  # type: ignore[arg-type]
        FactorOfExpert(parts, rank, weight.along == 0, interleaved=weight.interleaved, **form),  # type: ignore[arg-type]
    )

"""Mapping between a Megatron-Core parameter and Hugging Face tensors, one description for both directions.

Along one dimension (the one that tensor parallelism splits, if any) a parameter is a concatenation of `Run`s, each a
contiguous range of a Hugging Face tensor. A `Mapping` describes the unsharded parameter; `pieces` restricts it to the
shard of one tensor-parallel rank. Loading copies each piece from the file into the parameter, exporting copies it back.
This module computes with integers only and needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

Region = tuple[tuple[int, int], ...]
"""(start, stop) for each dimension."""


@dataclass(frozen=True)
class Run:
    """Rows (or columns) start to stop of a Hugging Face tensor, which are contiguous in the parameter."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """A part of a Hugging Face tensor and its position in one rank's shard of a parameter."""

    name: str
    """Name of the Hugging Face tensor."""
    region: Region
    """The part, as indices of the Hugging Face tensor."""
    local: Region
    """The part's position, as indices of the local parameter."""
    transposed: bool
    """Whether the Hugging Face tensor is stored transposed."""
    stacked: bool = False
    """Whether the Hugging Face tensor has a further first dimension, of which `region` has one index."""
    interleaved: bool = False
    """Whether rows of the first and the second half of the local parameter alternate in the Hugging Face tensor."""
    depthwise: bool = False
    """Whether the Hugging Face tensor has a dimension of size 1 between its rows and columns, which `region` has as
    well."""


@dataclass(frozen=True)
class Mapping:
    """One unsharded parameter as runs of Hugging Face tensors.

    Args:
        parts: each tensor-parallel rank's shard is the concatenation of an equal slice of each part. One part for a
            plain split; two for a gated projection, whose shard is a slice of the gate followed by a slice of up.
        other: size of the other dimension, which the runs cover fully; None for a vector.
        split: tensor parallelism splits the dimension of the runs; otherwise the parameter is replicated.
        along: dimension of the parameter along which the runs are concatenated.
        transposed: Hugging Face stores the matrix transposed (GPT-2's Conv1D).
        padded: the parameter may be longer than its runs (vocabulary); the padding is zero and is not exported.
        fp32: Megatron-Core and transformers keep it in fp32 for every model dtype.
        other_start: index of the Hugging Face tensors' other dimension at which the parameter begins.
        index: of the parameter in a further first dimension of the Hugging Face tensors, which stack all experts.
        interleaved: of a gated projection of a stack, gate and up alternate in the Hugging Face tensor.
        depthwise: the Hugging Face tensor is the weight [rows, 1, columns] of a convolution of each channel.
    """

    parts: tuple[tuple[Run, ...], ...]
    other: int | None
    split: bool = True
    along: int = 0
    transposed: bool = False
    padded: bool = False
    fp32: bool = False
    other_start: int = 0
    index: int | None = None
    interleaved: bool = False
    depthwise: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each Hugging Face tensor of this parameter, as far as its runs cover the tensor."""
        ends: dict[str, int] = {}
        for part in self.parts:
            for run in part:
                ends[run.name] = max(ends.get(run.name, 0), run.stop)
        return {name: tuple([stop for _, stop in self._region(0, end)]) for name, end in ends.items()}

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Shape of one rank's shard with tensor-parallel size `size`, without padding."""
        length = sum([run.stop - run.start for part in self.parts for run in part])
        return tuple([stop for _, stop in self._local_region(0, length // size if self.split else length)])

    def pieces(self, local_shape: Sequence[int], rank: int, size: int) -> list[Piece]:
        """The pieces of the shard of `rank` out of `size` tensor-parallel ranks, in the shard's order. If the local
        shape is the unsharded one, the parameter is taken as replicated: some layers are split in one implementation
        and replicated in another.

        Args:
            local_shape: shape of the parameter on this rank, including padding.

        Raises:
            ValueError: the parameter is not padded and has another shape.
        """
        if not self.split or (tuple(local_shape) == self.local_shape(1) and not self.padded):
            rank, size = 0, 1
        if tuple(local_shape) != self.local_shape(size) and not self.padded:
            raise ValueError(
                f"shape {tuple(local_shape)} is not the {self.local_shape(size)} of {self.parts[0][0].name}"
            )
        share = local_shape[self.along] // len(self.parts)
        pieces: list[Piece] = []
        for number, part in enumerate(self.parts):
            before = 0  # length of the part's earlier runs
            for run in part:
                length = run.stop - run.start
                first, last = max(rank * share, before), min((rank + 1) * share, before + length)
                if first < last:
                    offset, target = run.start - before, number * share - rank * share
                    region = self._region(first + offset, last + offset)
                    local = self._local_region(first + target, last + target)
                    stacked = self.index is not None
                    how = (self.transposed, stacked, self.interleaved, self.depthwise)
                    pieces.append(Piece(run.name, region, local, *how))
                before += length
        return pieces

    def _local_region(self, start: int, stop: int) -> Region:
        if self.other is None:
            return ((start, stop),)
        return ((start, stop), (0, self.other)) if self.along == 0 else ((0, self.other), (start, stop))

    def _region(self, start: int, stop: int) -> Region:
        region = self._local_region(start, stop)
        if self.other_start:
            region = tuple(
                (low + self.other_start, high + self.other_start) if dim != self.along else (low, high)
                for dim, (low, high) in enumerate(region)
            )
        region = region[::-1] if self.transposed else region
        if self.depthwise:
            region = (region[0], (0, 1), region[1])
        return region if self.index is None else ((self.index, self.index + 1), *region)


def tensor_shapes(parameters: dict[str, Mapping]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every Hugging Face tensor of a table of parameters, in its order."""
    shapes: dict[str, tuple[int, ...]] = {}
    for mapping in parameters.values():
        for name, shape in mapping.shapes().items():
            shapes[name] = tuple(map(max, shapes.get(name, shape), shape))
    return shapes


def replicated(name: str, *shape: int) -> Mapping:
    """A parameter that is replicated over tensor-parallel ranks: norms, biases added after an all-reduce."""
    return Mapping(((Run(name, 0, shape[0]),),), shape[1] if len(shape) > 1 else None, split=False)


def column(name: str, rows: int, columns: int | None = None) -> Mapping:
    """A column-parallel layer: each rank holds rows of the weight [rows, columns], or a slice of the bias [rows]."""
    return Mapping(((Run(name, 0, rows),),), columns)


def row(name: str, rows: int, columns: int) -> Mapping:
    """A row-parallel layer: each rank holds columns of the weight [rows, columns]."""
    return Mapping(((Run(name, 0, columns),),), rows, along=1)


def vocabulary(name: str, vocab_size: int, columns: int) -> Mapping:
    """Vocabulary-parallel embedding or output layer: each rank holds rows; the last rows are padding."""
    return Mapping(((Run(name, 0, vocab_size),),), columns, padded=True)


def gated(gate: str, up: str, rows: int, columns: int | None = None) -> Mapping:
    """A gated projection, from two tensors [rows, columns], or from one tensor that contains the gate before up."""
    first = rows if gate == up else 0
    return Mapping(((Run(gate, 0, rows),), (Run(up, first, first + rows),)), columns)


def query_key_value(
    query: str, key: str, value: str, heads: int, groups: int, width: int, columns: int | None = None
) -> Mapping:
    """The fused projection, whose rows are ordered by group: the group's queries, its key, its value (Megatron-Core's
    transformer/attention.py, get_query_key_value_tensors).

    Args:
        query, key, value: names of the tensors; the same name for one tensor of all queries, keys and values, in this
            order.
        heads: number of query heads.
        groups: number of key and value heads.
        width: size of one head.
        columns: hidden size; None for a bias.
    """
    fused = query == key == value
    key_start = heads * width if fused else 0
    value_start = key_start + groups * width if fused else 0
    queries = heads // groups * width
    first_key, first_value = Run(key, key_start, key_start + width), Run(value, value_start, value_start + width)
    parts = [(Run(query, 0, queries), queries), (first_key, width), (first_value, width)]
    return by_head(parts, groups, columns)


def gated_query_key_value(
    query: str, key: str, value: str, heads: int, groups: int, width: int, columns: int | None = None
) -> Mapping:
    """The mapping of `query_key_value` with a gate for each query head. In the tensor `query` a head's query precedes
    its gate; the rows of a group are its queries, their gates, its key, its value."""
    rows_of_group = heads // groups * 2 * width
    starts = [*range(0, rows_of_group, 2 * width), *range(width, rows_of_group, 2 * width)]  # queries, then gates
    parts = [(Run(query, start, start + width), rows_of_group) for start in starts]
    parts += [(Run(name, 0, width), width) for name in (key, value)]
    return by_head(parts, groups, columns)


def by_head(parts: Sequence[tuple[Run, int]], heads: int, columns: int | None = None) -> Mapping:
    """Rows ordered by head: those of each part for head 0, then those of each part for head 1, and so on.

    Args:
        parts: the run of head 0, and the rows from a head's run to that of the next head.
    """
    runs = [
        Run(run.name, run.start + head * step, run.stop + head * step) for head in range(heads) for run, step in parts
    ]
    return Mapping((tuple(runs),), columns)


def depthwise(mapping: Mapping) -> Mapping:
    """The mapping with Hugging Face tensors that are weights [rows, 1, columns] of a convolution by channel."""
    return replace(mapping, depthwise=True)


def transposed(mapping: Mapping) -> Mapping:
    """The mapping with Hugging Face tensors stored transposed; the mapping of a vector is unchanged."""
    return mapping if mapping.other is None else replace(mapping, transposed=True)


def stacked(mapping: Mapping, index: int) -> Mapping:
    """The mapping to one index of a further first dimension of its Hugging Face tensors."""
    return replace(mapping, index=index)


def interleaved(mapping: Mapping) -> Mapping:
    """The mapping of a gated projection of a stack whose Hugging Face tensor has the rows gate 0, up 0, gate 1, up 1,
    ..."""
    return replace(mapping, interleaved=True)


def in_fp32(mapping: Mapping) -> Mapping:
    """The mapping of a parameter that is kept in fp32."""
    return replace(mapping, fp32=True)

"""Where each part of a parameter of ours lies in Hugging Face tensors: one description for both directions.

Along one dimension (the one that tensor parallelism splits, where it splits one) a parameter is a sequence of `Run`s,
each a range of a Hugging Face tensor. A `Mapping` says this of the whole parameter; `pieces` cuts it to what one
tensor-parallel rank holds. Reading copies each piece's region of the file to its place, exporting copies it back.
Only integers here: no tensor, no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

Region = tuple[tuple[int, int], ...]
"""(start, stop) for each dimension."""


@dataclass(frozen=True)
class Run:
    """Rows (or columns) start to stop of a Hugging Face tensor, in our parameter's order."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class Piece:
    """A part of a Hugging Face tensor and its place in one rank's parameter."""

    name: str
    """The Hugging Face tensor."""
    region: Region
    """The part of it, in its own dimensions."""
    place: Region
    """Where it stands in the local parameter, in the parameter's dimensions."""
    transposed: bool
    """The tensor is stored with its two dimensions exchanged."""

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        size = 1
        for start, stop in self.region:
            size *= stop - start
        return size


@dataclass(frozen=True)
class Mapping:
    """One parameter of ours, whole, as runs of Hugging Face tensors.

    Args:
        parts: each tensor-parallel rank holds an equal share of each part, one after the other. One part for a plain
            split; two for a gated projection, whose rank holds its share of the gate and then its share of up.
        other: size of the dimension that runs do not go along; None for a vector.
        split: whether tensor parallelism splits the dimension of the runs; else every rank holds all.
        along: dimension of our parameter that the runs go along.
        transposed: Hugging Face stores the matrices with their dimensions exchanged (GPT-2's Conv1D).
        padded: the parameter may be longer than its runs (vocabulary); what is left is zero and is not exported.
        fp32: ours and theirs keep it in fp32 whatever the type of the model.
    """

    parts: tuple[tuple[Run, ...], ...]
    other: int | None
    split: bool = True
    along: int = 0
    transposed: bool = False
    padded: bool = False
    fp32: bool = False

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shape of each Hugging Face tensor that the parameter is made of, as far as this parameter knows."""
        ends: dict[str, int] = {}
        for run in (run for part in self.parts for run in part):
            ends[run.name] = max(ends.get(run.name, 0), run.stop)
        return {name: tuple(stop for _, stop in self._region(0, end)) for name, end in ends.items()}

    def local_shape(self, size: int) -> tuple[int, ...]:
        """Shape of one rank's parameter on a split of `size` ranks, without padding."""
        length = sum(run.stop - run.start for part in self.parts for run in part)
        return self._shape(length // size if self.split else length)

    def pieces(self, local_shape: Sequence[int], rank: int, size: int) -> list[Piece]:
        """What `rank` of `size` tensor-parallel ranks holds, in the order of its parameter. A split that the
        parameter's shape does not show was not made: some layers are cut in one implementation, whole in another.

        Args:
            local_shape: shape of the parameter on this rank; with `padded` it says how much padding there is.

        Raises:
            ValueError: a parameter that is not padded has another shape.
        """
        if not self.split or (tuple(local_shape) == self.local_shape(1) and not self.padded):
            rank, size = 0, 1
        if tuple(local_shape) != self.local_shape(size) and not self.padded:
            raise ValueError(
                f"shape {tuple(local_shape)} is not the {self.local_shape(size)} of {self.parts[0][0].name}"
            )
        share = local_shape[self.along] // len(self.parts)
        found: list[Piece] = []
        for number, part in enumerate(self.parts):
            before = 0  # elements of the part ahead of the run
            for run in part:
                length = run.stop - run.start
                first, last = max(rank * share, before), min((rank + 1) * share, before + length)
                if first < last:
                    offset, target = run.start - before, number * share - rank * share
                    region = self._region(first + offset, last + offset)
                    place = self._place(first + target, last + target)
                    found.append(Piece(run.name, region, place, self.transposed))
                before += length
        return found

    def _shape(self, length: int) -> tuple[int, ...]:
        if self.other is None:
            return (length,)
        return (length, self.other) if self.along == 0 else (self.other, length)

    def _place(self, start: int, stop: int) -> Region:
        if self.other is None:
            return ((start, stop),)
        return ((start, stop), (0, self.other)) if self.along == 0 else ((0, self.other), (start, stop))

    def _region(self, start: int, stop: int) -> Region:
        place = self._place(start, stop)
        return place[::-1] if self.transposed else place


def replicated(name: str, *shape: int) -> Mapping:
    """A parameter that every tensor-parallel rank holds whole: norms, biases added after a reduction."""
    return Mapping(((Run(name, 0, shape[0]),),), shape[1] if len(shape) > 1 else None, split=False)


def column(name: str, rows: int, columns: int | None = None) -> Mapping:
    """A column-parallel layer: ranks hold rows of the weight [rows, columns], or parts of the bias [rows]."""
    return Mapping(((Run(name, 0, rows),),), columns)


def row(name: str, rows: int, columns: int) -> Mapping:
    """A row-parallel layer: ranks hold columns of the weight [rows, columns]."""
    return Mapping(((Run(name, 0, columns),),), rows, along=1)


def vocabulary(name: str, vocab_size: int, columns: int) -> Mapping:
    """Embedding or output layer: ranks hold rows, the last ones padding."""
    return Mapping(((Run(name, 0, vocab_size),),), columns, padded=True)


def gated(gate: str, up: str, rows: int, columns: int | None = None) -> Mapping:
    """A gated projection from two tensors [rows, columns] each, or from one that holds the gate before up."""
    first = rows if gate == up else 0
    return Mapping(((Run(gate, 0, rows),), (Run(up, first, first + rows),)), columns)


def query_key_value(
    query: str, key: str, value: str, heads: int, groups: int, width: int, columns: int | None = None
) -> Mapping:
    """The fused projection, whose rows go group by group: queries of the group, its key, its value (Megatron-Core's
    transformer/attention.py, get_query_key_value_tensors). One name thrice: a tensor that holds all queries, then all
    keys, then all values.

    Args:
        heads, groups: query heads, and key and value heads; width: of one head.
    """
    fused = query == key == value
    key_start = heads * width if fused else 0
    value_start = key_start + groups * width if fused else 0
    queries = heads // groups * width
    runs: list[Run] = []
    for group in range(groups):
        runs.append(Run(query, group * queries, (group + 1) * queries))
        for name, start in ((key, key_start), (value, value_start)):
            runs.append(Run(name, start + group * width, start + (group + 1) * width))
    return Mapping((tuple(runs),), columns)


def transposed(mapping: Mapping) -> Mapping:
    """The same parameter of Hugging Face tensors that are stored transposed; a vector stays as it is."""
    return mapping if mapping.other is None else replace(mapping, transposed=True)


def in_fp32(mapping: Mapping) -> Mapping:
    """The same parameter, kept in fp32."""
    return replace(mapping, fp32=True)

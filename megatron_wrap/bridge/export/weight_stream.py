"""Gathers the parameters of all processes into whole Hugging Face tensors, block by block, and merges adapters into
the weights for which they were trained. Everything here is collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.bridge.mapping.family import Family
from megatron_wrap.bridge.mapping.model_parameters import blocks, local_pieces, mapped_parameters, view_of
from megatron_wrap.bridge.mapping.tensors import Piece, Region
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import CheckpointError, ConfigError
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.model.fp8_parameters import in_high_precision
from megatron_wrap.model.initial_weights import global_names, is_expert
from megatron_wrap.nn.layers.quantized_weights import quantized_of
from megatron_wrap.parallel.collectives import broadcast, gather_objects, receive, send
from megatron_wrap.parallel.state import ParallelState

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class OwnedPiece:
    """A piece and the rank that provides it."""

    rank: int
    """Global rank that provides the piece."""
    parameter: str
    """Key of the parameter on the providing rank."""
    piece: Piece


@dataclass(frozen=True)
class WeightMetadata:
    """One Hugging Face tensor, before it is gathered."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def dtype_name(self) -> str:
        """Name of the dtype without the module, such as "bfloat16"."""
        return dtype_name(self.dtype)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class WholeTensor(WeightMetadata):
    """One Hugging Face tensor and the ranks that provide its parts; the same on every rank."""

    parts: list[OwnedPiece] = field(default_factory=list)


class WeightStream:
    """The model as whole Hugging Face tensors, gathered on demand. Collective over all ranks.

    Args:
        chunks: this process's model chunks, with or without Megatron-Core's wrappers.
        arch: with all sizes set.
        dtype: of the tensors, such as "bfloat16"; None: that of the parameters.
        merge: fold adapters into the weights for which they were trained.

    Raises:
        CheckpointError: the family lacks a parameter of this model, or the model lacks one of the family.
        ConfigError: weights cannot be exported in this dtype, or are kept quantized.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        family: Family,
        arch: ArchConfig,
        parallel: ParallelState,
        device: torch.device,
        dtype: str | torch.dtype | None = None,
        merge: bool = False,
    ) -> None:
        self._rank = parallel.world.rank
        self._device = device
        self._parameters: dict[str, Tensor] = {}
        self._folded: dict[str, Callable[[Tensor], Tensor]] = {}
        self._value: tuple[str, Tensor] | None = None
        local_parts: list[OwnedPiece] = []
        dtypes: set[torch.dtype] = set()
        for number, model in enumerate(map(bare_model, chunks)):
            dtypes |= {parameter.dtype for parameter in model.parameters()}
            folded = _merges(model, arch) if merge else {}
            for name, parameter, mapping in mapped_parameters(model, family, arch):
                _refuse_quantized(parameter)
                fold = folded.pop(name, None)
                replicas, axis = (parallel.dp_cp, parallel.tp)
                if is_expert(name):
                    replicas, axis = (parallel.expert_dp, parallel.expert_tp)
                if replicas.rank or not (mapping.split or axis.rank == 0):
                    continue
                key = f"{number}/{name}"
                self._parameters[key] = parameter.detach()
                if fold is not None:
                    self._folded[key] = fold
                pieces = local_pieces(name, parameter, mapping, parallel)
                local_parts += [OwnedPiece(self._rank, key, piece) for piece in pieces]
            if folded:
                raise CheckpointError(f"the adapter of {min(folded)} cannot be merged: the family has no such weight")
        parts_of_ranks, dtypes_of_ranks = zip(*gather_objects((local_parts, dtypes)), strict=True)
        self.dtype = _torch_dtype(dtype) or _model_dtype(set().union(*dtypes_of_ranks))
        self.tensors = _whole_tensors([part for parts in parts_of_ranks for part in parts], family, arch, self.dtype)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """(name, whole tensor) of each Hugging Face tensor on every rank, on the model's device, one at a time.
        Collective: every rank must iterate to the end."""
        for tensor in self.tensors:
            yield tensor.name, self.whole(tensor)

    def blocks(self, tensor: WholeTensor, to_rank: int) -> Iterator[tuple[int, Tensor | None]]:
        """(index of the first row, block of rows) of a tensor, first to last; the block is on the CPU of global rank
        `to_rank`, None on the others."""
        for region in blocks(tuple((0, size) for size in tensor.shape), tensor.dtype.itemsize):
            yield region[0][0], self._gather(tensor, region, to_rank)

    def whole(self, tensor: WholeTensor) -> Tensor:
        """A whole tensor on every rank, on the model's device."""
        region = tuple((0, size) for size in tensor.shape)
        result = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        for owned, part in _overlaps(tensor, region):
            here = owned.rank == self._rank
            values = self._local_values(owned, part, tensor.dtype) if here else self._buffer(part, tensor.dtype)
            broadcast(values, owned.rank)
            _put(result, region, part, values)
        return result

    def _gather(self, tensor: WholeTensor, region: Region, to_rank: int) -> Tensor | None:
        here = to_rank == self._rank
        result = torch.empty([stop - start for start, stop in region], dtype=tensor.dtype) if here else None
        for owned, part in _overlaps(tensor, region):
            if owned.rank == self._rank:
                values = self._local_values(owned, part, tensor.dtype)
                if not here:
                    send(values, to_rank)
            elif here:
                values = self._buffer(part, tensor.dtype)
                receive(values, owned.rank)
            if result is not None:
                _put(result, region, part, values)
        return result

    def _local_values(self, owned: OwnedPiece, part: Region, dtype: torch.dtype) -> Tensor:
        """A part of a local parameter, with its adapter folded in; the whole value of one parameter is kept, since
        blocks come in their order."""
        key = owned.parameter
        if self._value is None or self._value[0] != key:
            value = in_high_precision(self._parameters[key])
            if key in self._folded:
                with torch.no_grad():
                    value = self._folded[key](value.float())
            self._value = key, value
        sizes = [stop - start for start, stop in part]
        return view_of(self._value[1], owned.piece, part).to(dtype).reshape(sizes).contiguous()

    def _buffer(self, part: Region, dtype: torch.dtype) -> Tensor:
        return torch.empty([stop - start for start, stop in part], dtype=dtype, device=self._device)


def _merges(model: torch.nn.Module, arch: ArchConfig) -> dict[str, Callable[[Tensor], Tensor]]:
    """Global name of each weight with an adapter -> the function that merges the adapter into the weight's fp32
    values."""
    from megatron_wrap.nn.adapters.embedding_rows import embedding_rows_of
    from megatron_wrap.nn.adapters.lora import adapters_by_weight
    from megatron_wrap.nn.experts.grouped import ExpertAdapter

    adapters, rows = adapters_by_weight(model), {id(rows.base_weight()): rows for rows in embedding_rows_of([model])}
    folded: dict[str, Callable[[Tensor], Tensor]] = {}
    for name, parameter, index in global_names(model, tied=not arch.untie_embeddings_and_output_weights):
        adapter = adapters.get(id(parameter))
        if isinstance(adapter, ExpertAdapter):
            assert index is not None
            folded[name] = partial(_sum, partial(adapter.delta, index))
        elif adapter is not None:
            folded[name] = partial(_sum, adapter.delta)
        elif id(parameter) in rows:
            folded[name] = rows[id(parameter)].merged
    return folded


def _sum(delta: Callable[[], Tensor], values: Tensor) -> Tensor:
    return values + delta()


def _refuse_quantized(parameter: Tensor) -> None:
    """Raise a ConfigError about a weight in 4 or 8 bits, into which no adapter can be merged."""
    quantized = quantized_of(parameter)
    if quantized is not None:
        raise ConfigError(
            f"megatron_wrap.adapter.base_weights: an adapter cannot be merged into a base in {quantized.kind}; export "
            "the adapter alone (save_pretrained(FOLDER), export-hf without --merge, weight_source(adapter=True)), and "
            "merge it into the model's own weights: MegatronWrap.from_pretrained(FOLDER, CONFIG, "
            "['megatron_wrap.adapter.base_weights=bf16']), then save_pretrained(..., merge=True)"
        )


def _overlaps(tensor: WholeTensor, region: Region) -> Iterator[tuple[OwnedPiece, Region]]:
    """The pieces that contain rows of `region`, each with the part of the tensor that it provides. `region` covers the
    other dimensions fully."""
    start, stop = region[0]
    for owned in tensor.parts:
        (low, high), *rest = owned.piece.region
        first, last = max(low, start), min(high, stop)
        if first < last:
            yield owned, ((first, last), *rest)


def _put(result: Tensor, region: Region, part: Region, values: Tensor) -> None:
    index = tuple(slice(low - start, high - start) for (low, high), (start, _) in zip(part, region, strict=True))
    result[index].copy_(values)


def dtype_name(dtype: torch.dtype) -> str:
    """Name of the dtype without the module, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _torch_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    name = dtype.removeprefix("torch.")
    name = _SHORT_NAMES.get(name, name)
    if name not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known; choose {', '.join(DTYPES)}")
    return DTYPES[name]


def _model_dtype(kinds: set[torch.dtype]) -> torch.dtype:
    """The half-precision dtype if there is one, else fp32. A half-precision model may keep a router in fp32."""
    return next((kind for kind in (torch.bfloat16, torch.float16) if kind in kinds), torch.float32)


def _whole_tensors(owned: list[OwnedPiece], family: Family, arch: ArchConfig, dtype: torch.dtype) -> list[WholeTensor]:
    """Every tensor of the architecture with its parts, in model order, and copies at the end.

    Raises:
        CheckpointError: a part is missing on all ranks, or parts overlap.
    """
    fp32 = {name for mapping in family.parameters(arch).values() if mapping.fp32 for name in mapping.shapes()}
    whole = {
        name: WholeTensor(name, torch.float32 if name in fp32 else dtype, shape)
        for name, shape in family.shapes(arch).items()
    }
    seen: set[tuple[str, Region]] = set()
    for part in owned:
        # tied embeddings are on the first and the last stage, and some layers are replicated instead of split
        if (part.piece.name, part.piece.region) not in seen:
            seen.add((part.piece.name, part.piece.region))
            whole[part.piece.name].parts.append(part)
    for tensor in whole.values():
        gathered = sum([math.prod([stop - start for start, stop in part.piece.region]) for part in tensor.parts])
        if gathered != tensor.numel:
            raise CheckpointError(
                f"{tensor.name} cannot be gathered: the ranks have {gathered} of its {tensor.numel} elements; check "
                "that the model provider builds the model of the configuration"
            )
    copies = [replace(whole[original], name=copy) for copy, original in family.copies(arch).items()]
    return [*whole.values(), *copies]

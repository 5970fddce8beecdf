"""Adapters of linear layers and of experts, and the tensors in peft's files of their factors. Needs no torch.

For the experts of a layer, peft's files have a pair of matrices: A is [experts * rank, inputs], expert after expert; B
is [outputs, rank * experts], whose column k * experts + e is column k of expert e (peft 0.19 and later,
tuners/lora/layer.py, ParamWrapper.get_delta_weight). In gpt-oss, rows of gate and up alternate in B.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_wrap.bridge.mapping.family import ADAPTER
from megatron_wrap.bridge.mapping.tensors import Mapping, Piece, Run

PEFT_PREFIX = "base_model.model."
"""Prefix of the names in adapter_model.safetensors."""
EXPERTS = ("gate_up_proj", "down_proj")
"""transformers' names of the fused tensors of a layer's experts; peft wraps the first one first."""


@dataclass(frozen=True)
class TargetModule:
    """A module of Hugging Face's model that gets an adapter."""

    name: str
    """Name of the module, such as model.layers.0.self_attn.q_proj."""
    rank: int
    scale: float
    """Factor of the adapter's output: alpha / rank, or alpha / sqrt(rank)."""
    is_parameter: bool = False
    """Whether target_parameters names the module's weight."""

    @property
    def key(self) -> str:
        """The last part of the name."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class AdaptedLayer:
    """A linear layer of Megatron-Core with adapters, or the stack of this layer over all experts."""

    name: str
    """Global name, such as decoder.layers.0.self_attention.linear_qkv."""
    weight: Mapping
    """Mapping of the layer's weight; for a stack, that of the first expert."""
    modules: tuple[TargetModule, ...]
    """Hugging Face modules of the layer; for a stack, the fused tensor, such as
    model.layers.0.mlp.experts.gate_up_proj."""
    experts: int = 0
    """Number of experts of the stack; 0: one linear layer."""
    nested: bool = False
    """Whether peft wraps a further tensor of the same experts around this one."""
    dora: bool = False
    """Whether the norms of the adapted rows are trained as well."""
    decomposed: bool = False
    """Whether the initial factors, whose product is subtracted from the base, are kept in addition to the trained
    ones."""

    @property
    def is_row_parallel(self) -> bool:
        """Whether tensor parallelism splits the layer's inputs."""
        return self.weight.split and self.weight.along == 1

    def file_stem(self, module: TargetModule) -> str:
        """Name of the module's factors in peft's file, without `.lora_A.weight`."""
        if not self.experts:
            return PEFT_PREFIX + module.name
        return PEFT_PREFIX + module.name.rpartition(".")[0] + (".base_layer" if self.nested else "")

    def runs_of(self, module: TargetModule) -> list[tuple[int, tuple[Run, ...]]]:
        """(index of the part of the layer's weight, the part's runs of this module) where there are any."""
        name = f"{module.name}.weight"
        parts = [tuple(run for run in part if run.name == name) for part in self.weight.parts]
        return [(index, runs) for index, runs in enumerate(parts) if runs]

    def factors(self) -> dict[str, Mapping]:
        """Global name of each trained factor -> its tensor in peft's file."""
        table: dict[str, Mapping] = {}
        for module in self.modules:
            table |= self._factors_of_experts(module) if self.experts else self._factors_of(module)
        return table

    def all_factors(self) -> dict[str, Mapping]:
        """The table of `factors`. With `decomposed` it also contains the initial factors, which follow the trained ones
        along the rank of the tensors, as peft's LoraModel.subtract_mutated_init makes them for an adapter of the
        original base."""
        table = self.factors()
        if not self.decomposed:
            return table
        initial = {
            name.replace(".lora_", ".initial_"): replace(mapping, other_start=mapping.other or 0)
            for name, mapping in table.items()
        }
        return {**table, **initial}

    def _factors_of(self, module: TargetModule) -> dict[str, Mapping]:
        """The factors of one linear layer; of each, `other` is the rank."""
        weight, runs = self.weight, self.runs_of(module)
        assert weight.other is not None, "a linear layer's weight has two dimensions"
        stem, file = f"{self.name}{ADAPTER}.lora_", f"{self.file_stem(module)}.lora_"
        if weight.along == 1:
            inputs = sum(run.stop - run.start for _, part in runs for run in part)
            parts: list[tuple[Run, ...]] = [(Run(f"{file}B.weight", 0, weight.other),)]
        else:
            inputs = weight.other
            parts = [tuple(replace(run, name=f"{file}B.weight") for run in part) for _, part in runs]
        a = Mapping(((Run(f"{file}A.weight", 0, inputs),),), module.rank, split=self.is_row_parallel, along=1)
        table = {f"{stem}A_{module.key}": a}
        for number, part in enumerate(parts):
            key = module.key if len(parts) == 1 else f"{module.key}_{number}"
            b = Mapping((part,), module.rank, split=weight.split and weight.along == 0)
            table[f"{stem}B_{key}"] = b
            if self.dora:
                norms = with_runs(b, lambda run: replace(run, name=f"{file}magnitude_vector"))
                table[f"{stem}magnitude_{key}"] = replace(norms, other=None)
        return table

    def _factors_of_experts(self, module: TargetModule) -> dict[str, Mapping]:
        owner, _, layer = self.name.rpartition(".")
        table: dict[str, Mapping] = {}
        for expert in range(self.experts):
            first, second = expert_factors(self.weight, self.file_stem(module), module.rank, expert, self.experts)
            stem = f"{owner}.{expert}.{layer}{ADAPTER}"
            table |= {f"{stem}.lora_A_{module.key}": first, f"{stem}.lora_B_{module.key}": second}
        return table


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


def with_runs(mapping: Mapping, changed: Callable[[Run], Run]) -> Mapping:
    """The mapping with a function of each of its runs."""
    return replace(mapping, parts=tuple(tuple(map(changed, part)) for part in mapping.parts))

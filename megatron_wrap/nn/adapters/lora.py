"""Low-rank adapters (LoRA, Hu et al., arXiv:2106.09685) for a linear layer of Megatron-Core.

One factor is whole and the other is sharded, so the rank need not be a multiple of the tensor-parallel size, and each
factor is one tensor of peft's files. The rule: an adapter's output is in the same parallel state as its base's output.

| base | A | product of A and the input | B | output |
|---|---|---|---|---|
| column-parallel | whole | gathered over the sequence under sequence parallelism | rows | a rank's columns |
| row-parallel | columns | summed over ranks, scattered over the sequence | whole | whole |
| replicated | whole | | whole | whole |

Under sequence parallelism the exchanged product has width r, and a whole factor has seen only this rank's tokens, so
its attribute `sequence_parallel` makes Megatron-Core add up the ranks' gradients (finalize_model_grads.py).
Import this module only after the platform is installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    get_cuda_rng_tracker,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megatron_wrap.nn.adapters.embedding_rows import embedding_rows_of
from megatron_wrap.nn.adapters.matmuls import InputMatmul, LayerPart, OutputMatmul, assembled
from megatron_wrap.nn.adapters.trained_copies import originals_in_place
from megatron_wrap.nn.experts.grouped import ExpertAdapter

ParallelKind = Literal["column", "row", "replicated"]

TRAINED = "default"
"""Name of the trained adapter, as in peft."""


@dataclass(frozen=True)
class AdaptedModule:
    """One module of Hugging Face's model that is adapted, a part of a linear layer of ours."""

    name: str
    """Key of the module's factors, such as q_proj."""
    rank: int
    scale: float
    """Factor of the product B A."""
    parts: tuple[Tensor, ...]
    """Row indices in the base's local weight to which the rows of B on this rank are added, int64 [rows] for each part.
    There are several parts, each with its own B, where the base's shard is a concatenation of slices (gate and up)."""

    @property
    def b_names(self) -> tuple[str, ...]:
        """Names of the module's B factors, one for each part."""
        if len(self.parts) == 1:
            return (self.name,)
        return tuple(f"{self.name}_{number}" for number in range(len(self.parts)))


class LinearAdapter(torch.nn.Module):
    """The adapters of the modules of one linear layer; its factors are the parameters `lora_A_NAME` and `lora_B_NAME`.

    The modules of a fused layer are computed together: their A are stacked, and each B has its own rows of the base.
    The factors are parameters of the adapter itself, not of a submodule: before a module's forward pass, Megatron-Core
    waits until the module's own parameters are gathered (overlap_param_gather).

    With `dora` the norm of each adapted row is trained as well, the parameter `lora_magnitude_NAME` (DoRA, Liu et al.,
    arXiv:2402.09353, equation 5); no gradient flows through the norm that it replaces (section 4.3).

    With `decomposed` the initial factors are kept as the frozen parameters `initial_A_NAME` and `initial_B_NAME`, the
    latter negative, and their product is added as well: the base is W - B0 A0 (PiSSA, Meng et al., arXiv:2404.02948)
    while its weight stays W.

    Args:
        base: the linear layer; its `weight` is [outputs, inputs] on this rank.
        kind: how the base's weight is sharded over tensor-parallel ranks.
        modules: at least one.
        dropout: probability of dropping an input in training.
        layer: index of the transformer layer in the model, for names in checkpoints.
        sequence_parallel: the layer's replicated inputs or outputs are scattered along the first dimension.
    """

    def __init__(
        self,
        base: torch.nn.Module,
        kind: ParallelKind,
        modules: Sequence[AdaptedModule],
        dropout: float,
        layer: int,
        sequence_parallel: bool,
        dora: bool = False,
        decomposed: bool = False,
    ) -> None:
        super().__init__()
        weight: Any = base.weight
        self.kind = kind
        self.modules_of = tuple(modules)
        self.dropout = dropout
        self.layer = layer
        self.sequence_parallel = sequence_parallel
        self.dora = dora
        self.decomposed = decomposed
        self.enabled = True
        self.adapter_name = TRAINED
        self._outputs = weight.shape[0]
        self.base_weight = lambda: base.weight  # not a submodule, which would list the base twice
        for module in self.modules_of:
            new = {"dtype": weight.dtype, "device": weight.device}
            for beginning in self._kinds:
                self._add_factor(f"{beginning}_A_{module.name}", torch.empty(module.rank, weight.shape[1], **new))
            for name, rows in zip(module.b_names, module.parts, strict=True):
                for beginning in self._kinds:
                    self._add_factor(f"{beginning}_B_{name}", torch.empty(len(rows), module.rank, **new))
                self.register_buffer(f"rows_of_{name}", rows.to(weight.device), persistent=False)
                if dora:
                    self._add_factor(f"lora_magnitude_{name}", torch.empty(len(rows), **new))
        self._product: Tensor | None = None
        base.register_forward_pre_hook(self._before_base)
        base.register_forward_hook(self._after_base)

    @property
    def _kinds(self) -> tuple[str, ...]:
        """Prefixes of the factors' names, in stacking order."""
        return ("lora", "initial") if self.decomposed else ("lora",)

    def _add_factor(self, name: str, values: Tensor) -> None:
        parameter: Any = torch.nn.Parameter(values, requires_grad=not name.startswith("initial_"))
        dim = self.sharded_dim(name)
        set_tensor_model_parallel_attributes(parameter, dim is not None, -1 if dim is None else dim, 1)
        parameter.sequence_parallel = self.sequence_parallel and dim is None
        self.register_parameter(name, parameter)

    def keep_as(self, name: str) -> None:
        """Turn this into a frozen adapter called `name`, switched off. Its factors become buffers outside of
        checkpoints."""
        self.adapter_name, self.enabled, self.dropout = name, False, 0.0
        for factor, parameter in list(self.named_parameters(recurse=False)):
            delattr(self, factor)
            self.register_buffer(factor, parameter.detach(), persistent=False)

    def sharded_dim(self, factor: str) -> int | None:
        """Dimension of a factor, such as `lora_A_NAME`, that is sharded over tensor-parallel ranks; None: it is
        whole."""
        sharded = {("column", "B"): 0, ("column", "magnitude"): 0, ("row", "A"): 1}
        return sharded.get((self.kind, factor.split("_")[1]))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The inputs for the base, and their product with A, [..., sum of ranks], for `add_to`. That call needs no wait
        of its own: all factors are gathered before this forward pass."""
        if not inputs.requires_grad or (self.training and self.dropout):
            return inputs, self._times_a(inputs)
        # one function, so that its backward pass adds up both gradients of the inputs
        both: tuple[Tensor, Tensor] = InputMatmul.apply(inputs, self._stacked_a())  # type: ignore[no-untyped-call]
        return both

    def add_to(self, output: Tensor, product: Tensor, bias: Tensor | None) -> Tensor:
        """The sum of the outputs of the base and of the adapters, in the base's parallel state.

        Args:
            output: the base's output; it is overwritten.
            product: second result of `forward`.
            bias: the base's bias, if `output` contains it.
        """
        if self.kind == "column":
            if self.sequence_parallel:
                product = gather_from_sequence_parallel_region(product)
            else:
                product = copy_to_tensor_model_parallel_region(product)
        elif self.kind == "row":
            if self.sequence_parallel:
                product = reduce_scatter_to_sequence_parallel_region(product)
            else:
                product = reduce_from_tensor_model_parallel_region(product)
        if not self.dora:
            parts, factors = self._parts_of_b()
            added: Tensor = OutputMatmul.apply(output, product, parts, *factors)  # type: ignore[no-untyped-call]
            return added
        added = torch.nn.functional.linear(product, self._whole_b())
        scales = self._scales_of_rows().to(output.dtype)
        return output + (scales - 1) * (output if bias is None else output - bias) + scales * added

    def _factor(self, name: str) -> Tensor:
        factor: Tensor = getattr(self, name)
        return factor

    def delta(self) -> Tensor:
        """Merged weight minus the base's weight, fp32 [outputs, inputs] on this rank: the scaled products B A. With
        `dora` rows are also scaled, and the call is collective over tensor-parallel ranks."""
        product = self._whole_b(torch.float32) @ self._stacked_a().float()
        if not self.dora:
            return product
        weight = self._base_weight().float()
        return self._scales_of_rows().detach()[:, None] * (weight + product) - weight

    def initialize_magnitudes(self) -> None:
        """Set the magnitudes to the norms of the rows. Collective over tensor-parallel ranks."""
        norms = self._norms_of_rows()
        for name, rows in self._rows():
            self._factor(f"lora_magnitude_{name}").data.copy_(norms[rows])

    def _rows(self) -> Iterator[tuple[str, Tensor]]:
        """Name of each B, and its rows of the base's local weight."""
        for module in self.modules_of:
            for name in module.b_names:
                yield name, self.get_buffer(f"rows_of_{name}")

    def _scales_of_rows(self) -> Tensor:
        """Magnitude over norm of each row, fp32 [outputs]; 1 in rows without an adapter."""
        norms = self._norms_of_rows()
        scales = torch.ones_like(norms)
        for name, rows in self._rows():
            scales = scales.index_copy(0, rows, self._factor(f"lora_magnitude_{name}").float() / norms[rows])
        return scales

    @torch.no_grad()
    def _norms_of_rows(self) -> Tensor:
        """Norm of each row of W, the base's weight, plus the scaled products B A, fp32 [outputs]. Its square is
        |W|^2 + 2 <W A^T, B> + <B A A^T, B>, so no other matrix of the size of W is computed."""
        weight, a, b = self._base_weight(), self._stacked_a(), self._whole_b(torch.float32)
        crossed = torch.nn.functional.linear(weight, a).float()
        squares = torch.linalg.vector_norm(weight, dim=1, dtype=torch.float32).square()
        squares += ((2 * crossed + b @ (a.float() @ a.float().t())) * b).sum(dim=1)
        if self.kind == "row":
            squares = reduce_from_tensor_model_parallel_region(squares)
        return squares.clamp(min=0).sqrt()

    def _base_weight(self) -> Tensor:
        weight: Any = self.base_weight()
        return weight.detach()

    def _stacked_a(self) -> Tensor:
        """The stacked A of all modules, [sum of ranks, inputs]."""
        factors = [self._factor(f"{kind}_A_{module.name}") for module in self.modules_of for kind in self._kinds]
        return factors[0] if len(factors) == 1 else torch.cat(factors)

    def _times_a(self, inputs: Tensor) -> Tensor:
        """The inputs times the stacked A, [..., sum of ranks]. Each module has its own dropout, as in peft; initial
        factors have none."""
        if not (self.training and self.dropout):
            return torch.nn.functional.linear(inputs, self._stacked_a())
        # random numbers differ between tensor-parallel ranks if the inputs do
        differs = self.kind == "row" or self.sequence_parallel
        with get_cuda_rng_tracker().fork() if differs else contextlib.nullcontext():
            dropped = [torch.nn.functional.dropout(inputs, self.dropout) for _ in self.modules_of]
        products = []
        for module, values in zip(self.modules_of, dropped, strict=True):
            products.append(torch.nn.functional.linear(values, self._factor(f"lora_A_{module.name}")))
            if self.decomposed:
                products.append(torch.nn.functional.linear(inputs, self._factor(f"initial_A_{module.name}")))
        return torch.cat(products, dim=-1)

    def _parts_of_b(self) -> tuple[list[LayerPart], list[Tensor]]:
        """Each B with its rows of the base, its columns among the stacked ranks, and its scale."""
        parts, factors, first = [], [], 0
        for module, kind in ((module, kind) for module in self.modules_of for kind in self._kinds):
            columns = slice(first, first + module.rank)
            first += module.rank
            for name in module.b_names:
                parts.append(LayerPart(self.get_buffer(f"rows_of_{name}"), columns, module.scale))
                factors.append(self._factor(f"{kind}_B_{name}"))
        return parts, factors

    def _whole_b(self, dtype: torch.dtype | None = None) -> Tensor:
        """B of all modules, [outputs, sum of ranks]: each scaled B in its rows and columns, zero elsewhere."""
        parts, factors = self._parts_of_b()
        rank = sum(module.rank for module in self.modules_of) * len(self._kinds)
        return assembled(parts, [factor.to(dtype or factor.dtype) for factor in factors], self._outputs, rank)

    def _before_base(self, _base: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        self._product = None
        if not self.enabled:
            return None
        of_base, self._product = self(inputs[0])
        return of_base, *inputs[1:]

    def _after_base(self, base: Any, _inputs: tuple[Tensor, ...], output: Any) -> Any:
        product, self._product = self._product, None
        if product is None:
            return output
        bias = base.bias if self.dora and not base.skip_bias_add else None
        if isinstance(output, tuple):
            return self.add_to(output[0], product, bias), *output[1:]
        return self.add_to(output, product, bias)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Megatron-Core's description of the factors for checkpoints. Each layer has tensors of its own, because layers
        may differ in ranks and modules; those of other parameters have an axis of layers (`sharded_offsets`)."""
        state = self.state_dict(prefix="", keep_vars=True)
        axes = {name: self.sharded_dim(name) for name in state}
        sharded = {name: axis for name, axis in axes.items() if axis is not None}
        entries = make_sharded_tensors_for_checkpoint(state, prefix, sharded)
        keys = {f"{prefix}{name}": f"{prefix}{self.layer}.{name}" for name in state}
        return {name: replace(entries[name], key=key) for name, key in keys.items()}


def adapters_of(chunks: Sequence[torch.nn.Module]) -> list[LinearAdapter | ExpertAdapter]:
    """The adapters in a process's model chunks."""
    return [
        module for chunk in chunks for module in chunk.modules() if isinstance(module, (LinearAdapter, ExpertAdapter))
    ]


def compute_bias_gradients(model: torch.nn.Module) -> None:
    """Let the trained biases of column-parallel layers with frozen weights get a gradient: Megatron-Core computes none
    for them (tensor_parallel/layers.py, LinearWithFrozenWeight). The outputs stay the same, bit for bit."""
    for module in model.modules():
        if not isinstance(module, ColumnParallelLinear) or module.skip_bias_add or module.bias is None:
            continue
        if module.bias.requires_grad and not module.weight.requires_grad:
            module.register_forward_hook(_add_zero_with_gradient)


def _add_zero_with_gradient(layer: Any, _inputs: Any, output: Any) -> Any:
    if not torch.is_grad_enabled():
        return output
    return output[0] + (layer.bias - layer.bias.detach()), *output[1:]


def adapters_by_weight(model: torch.nn.Module) -> dict[int, LinearAdapter | ExpertAdapter]:
    """id of a base's weight -> its trained adapter."""
    trained = [adapter for adapter in adapters_of([model]) if adapter.adapter_name == TRAINED]
    return {id(adapter.base_weight()): adapter for adapter in trained}


@contextlib.contextmanager
def only_adapter(chunks: Sequence[torch.nn.Module], name: str | None) -> Iterator[None]:
    """Within the context the model computes with the adapter called `name`, or without adapter if `name` is None; the
    parameters must be synchronized. Parameters that are trained whole belong to `TRAINED`."""
    adapters = [*adapters_of(chunks), *embedding_rows_of(chunks)]
    before = [adapter.enabled for adapter in adapters]
    for adapter in adapters:
        adapter.enabled = adapter.adapter_name == name
    try:
        with contextlib.nullcontext() if name == TRAINED else originals_in_place(chunks):
            yield
    finally:
        for adapter, enabled in zip(adapters, before, strict=True):
            adapter.enabled = enabled

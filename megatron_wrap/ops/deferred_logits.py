"""Logits that are not stored: hidden states and the output weight, whose product is computed where it is needed.

The operations of this package multiply them chunk by chunk (`token_chunks.py`), so that a loss needs the logits of one
chunk of tokens at a time. Any other use of a `DeferredLogits` as a tensor computes all logits, once, with a warning
that names the line; values and gradients are those of stored logits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from megatron_wrap.ops.vocabulary import token_blocks
from megatron_wrap.platform.megatron_core.added_gradients import placeholder
from megatron_wrap.utils.dist_logger import logger

CHUNK_BYTES = 512 * 2**20
"""Memory of the logits of one chunk of tokens, in bytes: at a vocabulary of 128,256 in bf16 about 2,000 tokens, whose
matmuls still use a GPU fully, and 1 / 32 of the logits of 65,536 tokens."""
CHUNK_SHARE = 0.01
"""Share of a GPU's memory for the logits of one chunk, where it is more than `CHUNK_BYTES`: the fewer chunks, the less
often the gradient buffer is read and written."""
MIN_CHUNK_TOKENS = 1024
"""Minimum number of tokens of a chunk: with fewer, reading and writing the gradient buffer [V/tp, H] for each chunk
would take longer than the matmul that is added to it."""

_NOT_THE_USERS = tuple(str(path) for path in (Path(torch.__file__).parent, Path(__file__).parent))


def add_weight_gradient(inputs: Tensor, grad_output: Tensor, total: Tensor) -> None:
    """total += grad_output^T inputs, in place: [n, H] and [n, C] to [C, H]."""
    if total.dtype == inputs.dtype:
        total.addmm_(grad_output.t(), inputs)
        return
    for (rows,) in token_blocks(total.shape[:1], inputs.shape[-1] * 4):  # bounds the product before its conversion
        total[rows].add_(grad_output[:, rows].t() @ inputs)


@dataclass(frozen=True)
class OutputProjection:
    """The output layer of a model on this rank."""

    weight: Tensor
    """Weight of the output layer, [V/tp, H]. If it has the gradient buffer `main_grad` of Megatron-Core's
    DistributedDataParallel, gradients are added to that."""
    unpadded: int
    """Columns of this rank that are not padding of the vocabulary; the others get probability 0."""
    add_gradient: Callable[[Tensor, Tensor, Tensor], None] = add_weight_gradient
    """Function that adds the weight's gradient to a buffer, with the arguments of `add_weight_gradient`."""
    softcap: float | None = None
    """Logits x become softcap * tanh(x / softcap); None: unlimited."""
    reported: set[str] = field(default_factory=set)
    """Source lines that a warning has named."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states, [..., H] -> [..., V/tp], without a graph."""
        with torch.no_grad():
            result = torch.matmul(hidden, self.weight.t())
            if self.softcap is not None:
                result.div_(self.softcap).tanh_().mul_(self.softcap)
            if self.unpadded < result.shape[-1]:
                result[..., self.unpadded :] = torch.finfo(result.dtype).min / 2
        return result

    def add_product(self, hidden: Tensor, logits: Tensor, grad: Tensor, weight_gradient: Tensor | None) -> Tensor:
        """Return the gradient of hidden states [n, H] from that of their logits [n, V/tp], which is overwritten, and
        add the weight's gradient to `weight_gradient`. `logits` are read only where there is a soft cap."""
        product = self.product(logits, grad)
        if weight_gradient is not None:
            self.add_gradient(hidden, grad, weight_gradient)
        return product

    def product(self, logits: Tensor, grad: Tensor) -> Tensor:
        """`add_product` without the weight's gradient; afterwards `grad` is the argument for `add_gradient`."""
        if self.softcap is not None:
            grad.mul_(1 - (logits.detach() / self.softcap).square_())
        grad[:, self.unpadded :] = 0.0
        return grad @ self.weight

    def gradient_buffer(self) -> Tensor:
        """The buffer to which gradients of the weight are added: Megatron-Core's, or zeros [V/tp, H] in fp32 (float64
        for a float64 weight)."""
        weight: Any = self.weight
        if getattr(weight, "main_grad", None) is not None:
            return weight.main_grad
        return torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))

    @property
    def has_buffer(self) -> bool:
        """Whether the weight has a gradient buffer of Megatron-Core."""
        return getattr(self.weight, "main_grad", None) is not None

    def returned_gradient(self, buffer: Tensor) -> Tensor | None:
        """Value that an autograd function returns as the gradient of the weight after adding it to `buffer`. With it
        autograd calls the hook that marks the gradient as complete, in the backward pass."""
        return placeholder(self.weight) if self.has_buffer else buffer.to(self.weight.dtype)


class DeferredLogits(Tensor):
    """Logits [B, S, V/tp] as the hidden states [B, S, H] and the output layer that they are computed from. With tensor
    parallelism the gradient of `hidden` is this rank's part of a sum over ranks."""

    hidden: Tensor
    projection: OutputProjection
    loss_factor: float | None
    """Derivative of the differentiated scalar with respect to the flow's `loss_sum`; None: not known."""
    computed: list[Tensor]
    """List with all logits once they were needed, else empty; detached copies share the list."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, hidden: Tensor, projection: OutputProjection) -> DeferredLogits:
        """Create deferred logits without a graph; see `deferred_logits`."""
        shape = (*hidden.shape[:-1], projection.weight.shape[0])
        result: DeferredLogits = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=hidden.dtype, device=hidden.device
        )
        return result._with(hidden, projection, None, [])

    def _with(
        self, hidden: Tensor, projection: OutputProjection, loss_factor: float | None, computed: list[Tensor]
    ) -> DeferredLogits:
        self.hidden, self.projection, self.loss_factor, self.computed = hidden, projection, loss_factor, computed
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape and type, without computing the logits."""
        return f"DeferredLogits({list(self.shape)}, {self.dtype}, {self.device})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, named = func._schema.name, kwargs or {}
        if name in ("aten::detach", "aten::alias"):
            return args[0]._copy()
        if name.startswith("aten::new_"):  # only dtype and device are used
            return func(torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:], **named)
        stored_args, stored_named = tree_map_only(DeferredLogits, DeferredLogits._all, (args, named))
        result = func(*stored_args, **stored_named)
        return args[0] if result is stored_args[0] and name.endswith("_") else result  # in place

    def _copy(self) -> DeferredLogits:
        hidden = self.hidden.detach()
        return DeferredLogits(hidden, self.projection)._with(hidden, self.projection, None, self.computed)

    def _all(self) -> Tensor:
        if not self.computed:
            self._warn()
            self.computed.append(self.projection.logits(self.hidden.detach()))
        return self.computed[0]

    def _warn(self) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
            frame = frame.f_back
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        if where not in self.projection.reported:
            self.projection.reported.add(where)
            logger.warning_all_ranks(
                f"{where} uses the logits {list(self.shape)} as a tensor, so all of them are stored, "
                f"{self.numel() * self.element_size() / 2**30:.2g} GiB; operations of megatron_wrap.ops need only a "
                "chunk of them"
            )


class _Deferred(torch.autograd.Function):
    """Connects deferred logits with the graph: its backward takes a gradient of all logits."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, projection: OutputProjection, deferred: bool) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.projection = projection
        return DeferredLogits(hidden, projection) if deferred else projection.logits(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (hidden,) = ctx.saved_tensors
        projection = ctx.projection
        buffer = projection.gradient_buffer() if ctx.needs_input_grad[1] else None
        grad = grad_outputs[0].reshape(-1, grad_outputs[0].shape[-1]).clone()
        rows = hidden.reshape(-1, hidden.shape[-1])
        logits = grad if projection.softcap is None else projection.logits(rows)
        grad_hidden = projection.add_product(rows, logits, grad, buffer)
        grad_weight = None if buffer is None else projection.returned_gradient(buffer)
        return grad_hidden.view(hidden.shape), grad_weight, None, None


def deferred_logits(hidden: Tensor, projection: OutputProjection, loss_factor: float | None = None) -> DeferredLogits:
    """Logits of hidden states [B, S, H] that are computed where they are needed."""
    result: DeferredLogits = _Deferred.apply(hidden, projection.weight, projection, True)
    return result._with(hidden, projection, loss_factor, result.computed)  # hidden states with their graph


def chunk_bytes(device: torch.device) -> int:
    """Memory that the logits of one chunk may take on a device."""
    if device.type != "cuda":
        return CHUNK_BYTES
    return max(CHUNK_BYTES, int(CHUNK_SHARE * torch.cuda.get_device_properties(device).total_memory))


def is_deferred(value: Any) -> bool:
    """Whether a value is deferred logits that no operation changed in place, themselves or through a view. Whether they
    are stored by now does not matter: code of one rank may print them, and all ranks must take the same path."""
    return isinstance(value, DeferredLogits) and value._version == 0


def chunks_of(logits: DeferredLogits) -> Iterator[Tensor]:
    """All logits [n, V/tp] in parts, one at a time, without a graph and without communication."""
    for part in logits.hidden.detach().flatten(0, -2).split(MIN_CHUNK_TOKENS):
        yield logits.projection.logits(part)


def with_loss_factor(logits: Tensor, factor: float | None) -> Tensor:
    """The same logits; deferred ones record the derivative of the differentiated scalar with respect to the flow's
    `loss_sum`."""
    if factor is None or not isinstance(logits, DeferredLogits) or not is_deferred(logits):
        return logits
    return deferred_logits(logits.hidden, logits.projection, factor)


def whole_logits(logits: Tensor) -> Tensor:
    """All logits, for code that needs them; tensors that are not deferred are returned as they are."""
    if not isinstance(logits, DeferredLogits):
        return logits
    if logits.computed:
        return logits.view(logits.shape)
    return _Deferred.apply(logits.hidden, logits.projection.weight, logits.projection, False)


def one_token_logits(logits: Tensor) -> Tensor:
    """Logits of at least the first token, with the graph of all."""
    if not isinstance(logits, DeferredLogits) or not is_deferred(logits):
        return logits
    hidden = logits.hidden.flatten(0, -2)[:1]
    return _Deferred.apply(hidden, logits.projection.weight, logits.projection, False)

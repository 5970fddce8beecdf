"""Operations on deferred logits, chunk by chunk of tokens: a linear layer and a loss without the logits between them.

Forward, each chunk of tokens is multiplied by the output weight, the operation reads these logits, and they are freed.
Backward, they are computed again, the operation's own backward gives their gradient, and that is multiplied into the
gradients of the hidden states and of the weight. Where the derivative of the loss is known before the forward pass,
as that of a cross-entropy is, both gradients are computed in the forward chunk instead, without a second product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron_wrap.ops.deferred_logits import (
    MIN_CHUNK_TOKENS,
    DeferredLogits,
    OutputProjection,
    chunk_bytes,
    is_deferred,
    whole_logits,
)
from megatron_wrap.platform.base.read_on_host import start_host_copy

_SAME = 1e-6
"""Largest relative difference between the upstream and the known gradient that counts as equal, a few roundings in
fp32."""

Operation = TypeVar("Operation", bound=Callable[..., Any])


def chunked(operation: Operation) -> Operation:
    """Make an operation on logits [B, S, V/tp] accept deferred ones. Its tensors have the leading dimensions [B, S],
    arguments and results; a result of a token depends on that token's arguments only."""

    @functools.wraps(operation)
    def chunk_by_chunk(*args: Any, **named: Any) -> Any:
        if not any(is_deferred(value) for value in (*args, *named.values())):
            return operation(*args, **named)
        return _in_chunks(operation, args, named)

    return chunk_by_chunk  # type: ignore[return-value]


def log_probs_of_loss(
    log_probs: Callable[[Tensor, Tensor], Tensor], logits: DeferredLogits, ids: Tensor, loss_gradient: Tensor | None
) -> Tensor:
    """Log-probabilities [B, S], whose gradients are computed in the forward pass if `logits.loss_factor` is known.

    Args:
        log_probs: (logits, ids) -> log-probabilities [B, S]; its backward may overwrite the logits
            where they have no soft cap.
        loss_gradient: [B, S], the derivative of the flow's `loss_sum`; None: not known. Another upstream gradient is
            also correct: the difference is passed back by computing the logits again.
    """
    known = None
    if torch.is_grad_enabled() and loss_gradient is not None and logits.loss_factor is not None:
        known = loss_gradient.detach().to(torch.promote_types(logits.dtype, torch.float32)) * logits.loss_factor
    return _in_chunks(log_probs, (logits, ids), {}, known)


@dataclass
class _Call:
    """An operation with its arguments: which of them are deferred logits, and which have a row for each token."""

    operation: Callable[..., Any]
    leaves: list[Any]
    """The arguments without the tensors that have a row for each token."""
    tree: TreeSpec
    projections: list[OutputProjection]
    deferred: list[int]
    """Indices of the deferred logits among the leaves."""
    of_tokens: list[int]
    """Indices of the tensors with a row for each token."""
    shape: tuple[int, ...]
    """Leading dimensions of the logits, [B, S]."""
    known: Tensor | None = None
    """Gradient that the only result is expected to get, [B, S]; None: not known."""
    result_tree: TreeSpec | None = field(default=None)
    constants: list[Any] = field(default_factory=list)
    """Results that are no tensors."""

    def chunks(self) -> Iterator[slice]:
        """Slices of all tokens, of equal length but for the last one, so that no chunk is much smaller than the
        others."""
        tokens = 1
        for size in self.shape:
            tokens *= size
        row = sum(p.weight.shape[0] * p.weight.element_size() for p in self.projections)
        device = self.projections[0].weight.device
        count = max(1, -(-tokens // max(MIN_CHUNK_TOKENS, chunk_bytes(device) // row)))
        step = max(1, -(-tokens // count))
        for start in range(0, max(1, tokens), step):
            yield slice(start, min(start + step, tokens))

    def __call__(self, logits: Sequence[Tensor], of_tokens: Sequence[Tensor]) -> list[Tensor]:
        """The results [1, n, ...] for a chunk of n tokens, in the order of the flattened result."""
        leaves = list(self.leaves)
        for index, value in zip((*self.deferred, *self.of_tokens), (*logits, *of_tokens), strict=True):
            leaves[index] = value.unsqueeze(0)
        args, named = tree_unflatten(leaves, self.tree)
        results, self.result_tree = tree_flatten(self.operation(*args, **named))
        return results


def _in_chunks(
    operation: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any], known: Tensor | None = None
) -> Any:
    leaves, tree = tree_flatten((args, named))
    deferred = [index for index, leaf in enumerate(leaves) if is_deferred(leaf)]
    shape = tuple(leaves[deferred[0]].shape[:-1])
    others = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and index not in deferred]
    if any(leaves[index].shape[: len(shape)] != shape for index in (*deferred, *others)):
        whole_args, whole_named = tree_unflatten([whole_logits(leaf) for leaf in leaves], tree)
        return operation(*whole_args, **whole_named)  # raises its error about the shapes
    projections = [leaves[index].projection for index in deferred]
    hidden = [leaves[index].hidden for index in deferred]
    of_tokens = [leaves[index] for index in others]
    for index in (*deferred, *others):
        leaves[index] = None
    if not projections[0].has_buffer and projections[0].weight.requires_grad:
        known = None  # there would be a buffer for each micro-batch
    call = _Call(operation, leaves, tree, projections, deferred, others, shape, known)
    flat = _InChunks.apply(call, *hidden, *(projection.weight for projection in projections), *of_tokens)
    assert call.result_tree is not None
    return tree_unflatten(list(flat), call.result_tree)


class _InChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(call.projections)
        needed = ctx.needs_input_grad[1:]
        hidden = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors[:count]]
        of_tokens = [_rows(tensor, call.shape) for tensor in tensors[2 * count :]]
        known = call.known if any(needed) else None
        early = None if known is None else _Early(torch.empty_like(hidden[0]) if needed[0] else None, known.reshape(-1))
        chunks = list(call.chunks())
        parts: list[list[Tensor]] = []
        differentiable: list[bool] = []
        for chunk in chunks:
            logits = [projection.logits(h[chunk]) for projection, h in zip(call.projections, hidden, strict=True)]
            rows = [tensor[chunk] for tensor in of_tokens]
            if early is not None:
                results = _with_known_gradient(call, logits[0], rows, hidden[0], chunk, early, needed[count])
                differentiable = [True]
                if chunk is not chunks[-1]:
                    early.finish()
            elif any(needed) and chunk is chunks[-1]:  # with a graph, which shows the results that have a gradient
                with torch.enable_grad():
                    results = call([part.requires_grad_() for part in logits], rows)
                differentiable = [result.requires_grad for result in results]
            else:
                results = call(logits, rows)
            parts.append([result.detach() for result in results])
            del logits, rows, results  # free the memory before the next chunk
        merged = tuple(torch.cat(of_result, dim=1) for of_result in zip(*parts, strict=True))
        merged = tuple(result.reshape(*call.shape, *result.shape[2:]) for result in merged)
        ctx.mark_non_differentiable(
            *(result for result, has_gradient in zip(merged, differentiable, strict=False) if not has_gradient)
        )
        ctx.set_materialize_grads(False)
        ctx.call, ctx.early = call, early
        ctx.save_for_backward(*tensors)
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        call, needed, tensors = ctx.call, ctx.needs_input_grad[1:], ctx.saved_tensors
        count = len(call.projections)
        upstream = [None if grad is None else _rows(grad, call.shape) for grad in grad_outputs]
        early, ctx.early = ctx.early, None  # a second backward through the same graph computes all of it
        if early is not None:
            upstream, is_as_expected = _difference(upstream[0], early.known)
            early.finish()
            if is_as_expected():
                weight_gradients = _returned(call, [call.projections[0].gradient_buffer() if needed[count] else None])
                shaped = None if early.of_hidden is None else early.of_hidden.view(tensors[0].shape)
                return None, shaped, *weight_gradients, *(None for _ in tensors[2:])
        gradients, buffers = _recomputed(call, tensors, upstream, needed)
        if early is not None and early.of_hidden is not None:
            gradients[0] = early.of_hidden.view(tensors[0].shape).add_(gradients[0])
        weight_gradients = _returned(call, buffers)
        return None, *gradients[:count], *weight_gradients, *gradients[count:]


@dataclass
class _Early:
    """Gradients that are computed in the forward pass."""

    of_hidden: Tensor | None
    """Gradient of the hidden states, [B * S, H]; None: not needed."""
    known: Tensor
    """Gradient of the result, from which they are computed, [B * S]."""
    unfinished: list[Callable[[], None]] = field(default_factory=list)
    """Functions that add the remaining matmuls to the weight's gradient."""

    def finish(self) -> None:
        """Call the functions of `unfinished`. The last chunk's matmul runs in the backward pass, while the host waits
        for the comparison of the gradient and queues further kernels; the device would be idle otherwise."""
        while self.unfinished:
            self.unfinished.pop()()


def _with_known_gradient(
    call: _Call,
    logits: Tensor,
    rows: list[Tensor],
    hidden: Tensor,
    chunk: slice,
    early: _Early,
    weight_needed: bool,
) -> list[Tensor]:
    """The results for a chunk. The gradient of its hidden states is written to `early.of_hidden`, and the matmul for
    the weight's gradient is appended to `early.unfinished`."""
    projection = call.projections[0]
    with torch.enable_grad():
        results = call([logits.requires_grad_()], rows)
    (grad,) = torch.autograd.grad(results[0], logits, early.known[chunk].view(results[0].shape))
    product = projection.product(logits, grad)
    if early.of_hidden is not None:
        early.of_hidden[chunk] = product
    if weight_needed:
        buffer = projection.gradient_buffer()
        early.unfinished.append(lambda: projection.add_gradient(hidden[chunk], grad, buffer))
    return results


def _difference(upstream: Tensor | None, known: Tensor) -> tuple[list[Tensor | None], Callable[[], bool]]:
    """Gradients to be passed back in addition to the known one, and a function that waits for the device and returns
    whether they are negligible."""
    if upstream is None:
        return [-known], lambda: False
    difference = upstream - known
    is_nothing = (difference.abs() <= _SAME * known.abs()).all()
    wait = start_host_copy(is_nothing)
    return [difference], lambda: bool(wait())


def _recomputed(
    call: _Call, tensors: Sequence[Tensor], upstream: Sequence[Tensor | None], needed: Sequence[bool]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of the hidden states and of the tensors with a row for each token; and the buffers with the weights'
    gradients."""
    count = len(call.projections)
    hidden = [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors[:count]]
    of_tokens = [_rows(tensor, call.shape) for tensor in tensors[2 * count :]]
    inputs, are_needed = [*hidden, *of_tokens], [*needed[:count], *needed[2 * count :]]
    gradients = [torch.empty_like(t) if need else None for t, need in zip(inputs, are_needed, strict=True)]
    buffers = [
        projection.gradient_buffer() if need else None
        for projection, need in zip(call.projections, needed[count : 2 * count], strict=True)
    ]
    for chunk in call.chunks():
        logits = [
            projection.logits(h[chunk]).requires_grad_() for projection, h in zip(call.projections, hidden, strict=True)
        ]
        rows = [
            tensor[chunk].detach().requires_grad_(need)
            for tensor, need in zip(of_tokens, are_needed[count:], strict=True)
        ]
        with torch.enable_grad():
            results = call(logits, rows)
        pairs = [
            (result, grad[chunk].unsqueeze(0))
            for result, grad in zip(results, upstream, strict=True)
            if grad is not None and result.requires_grad
        ]
        sources = [*logits, *(row for row in rows if row.requires_grad)]
        of_sources = iter(
            torch.autograd.grad([p[0] for p in pairs], sources, [p[1] for p in pairs], materialize_grads=True)
            if pairs
            else [torch.zeros_like(source) for source in sources]
        )
        del results, pairs, sources
        for index, projection in enumerate(call.projections):
            grad = next(of_sources)
            product = projection.add_product(hidden[index][chunk], logits[index], grad, buffers[index])
            of_hidden = gradients[index]
            if of_hidden is not None:
                of_hidden[chunk] = product
            del grad, product
        for of_rows in gradients[count:]:
            if of_rows is not None:
                of_rows[chunk] = next(of_sources)
        del logits, rows, of_sources  # free the memory before the next chunk
    shapes = [tensor.shape for tensor in (*tensors[:count], *tensors[2 * count :])]
    return [None if g is None else g.view(shape) for g, shape in zip(gradients, shapes, strict=True)], buffers


def _returned(call: _Call, buffers: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return values of the backward pass for the projections' weights, whose gradients are in `buffers`."""
    pairs = zip(call.projections, buffers, strict=True)
    return [None if buffer is None else projection.returned_gradient(buffer) for projection, buffer in pairs]


def _rows(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Flatten tokens: [B, S, ...] -> [B * S, ...]."""
    return tensor.reshape(-1, *tensor.shape[len(shape) :])

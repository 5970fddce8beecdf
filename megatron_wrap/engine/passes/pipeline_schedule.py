"""Megatron-Core's forward and backward schedule over a replica's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_wrap.engine.batches.micro_batch import PADDING_MASK, MicroBatch
from megatron_wrap.engine.passes.loss import ModelOutput
from megatron_wrap.engine.passes.router_replay import RoutingReplay
from megatron_wrap.engine.passes.stragglers import ForwardClock
from megatron_wrap.errors import DataError
from megatron_wrap.flow.contract.prediction import INPUT_IDS
from megatron_wrap.flow.contract.routing import ROUTED_EXPERTS
from megatron_wrap.parallel.collectives import gather_objects
from megatron_wrap.parallel.state import ParallelState

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig


@dataclass(frozen=True)
class PipelineSchedule:
    """Runs model chunks of one shape on this layout; used for the policy and for the reference model.

    Local micro-batches come from `Localization.localize`; with several pipeline stages all of a run have the same
    number of rows.
    """

    parallel: ParallelState
    sequence_parallel: bool
    half_precision: bool
    """Whether activations are bf16 or fp16."""
    equal_tokens: bool = False
    """Whether each micro-batch needs the same number of tokens on all processes that share the experts."""
    routing: RoutingReplay | None = None
    """Routers of the policy, with `router_replay`; None without it."""
    clock: ForwardClock | None = None
    """Clock of the forward passes of training; None: they are not measured."""

    def forward_backward(
        self, chunks: list[Any], local: list[MicroBatch], loss: Callable[[MicroBatch, ModelOutput], Tensor]
    ) -> None:
        """Add the gradients of the micro-batches to the gradient buffers. Collective over the replica.

        Args:
            chunks: this process's model chunks.
            loss: returns the scalar to differentiate for a micro-batch, from the output of the last stage. The schedule
                divides it by the number of micro-batches.
        """
        self._run(chunks, local, lambda micro_batch, output: (loss(micro_batch, output), None), forward_only=False)

    def forward(
        self,
        chunks: list[Any],
        local: list[MicroBatch],
        compute: Callable[[MicroBatch, Any], Any],
        with_predictions: bool = False,
    ) -> list[Any]:
        """A forward pass without a graph. Collective over the replica.

        Args:
            chunks: this process's model chunks.
            compute: called with a micro-batch and the output of the last stage, on that stage.
            with_predictions: also compute the layers for multi-token prediction; the output is then a tuple, the
                model's output followed by theirs.

        Returns:
            What `compute` returned for each micro-batch, on the last pipeline stage; an empty list on other stages.
        """

        def zero_loss(micro_batch: MicroBatch, output: ModelOutput) -> tuple[Tensor, Any]:
            logits = output[0] if isinstance(output, tuple) else output
            return logits.new_zeros(()), compute(micro_batch, output)

        if not with_predictions:
            local = [micro_batch.without_model_inputs((INPUT_IDS,)) for micro_batch in local]
        with torch.no_grad():
            return self._run(chunks, local, zero_loss, forward_only=True)

    def _run(
        self,
        chunks: list[Any],
        local: list[MicroBatch],
        loss_and_result: Callable[[MicroBatch, ModelOutput], tuple[Tensor, Any]],
        forward_only: bool,
    ) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        # keep half-precision logits: the loss operations compute in fp32 internally, and an fp32 copy of all logits
        # would be the largest tensor of the step (Megatron-Core's Float16Module makes one by default)
        options = {"fp32_output": False} if self.half_precision else {}
        measured = nullcontext if self.clock is None or forward_only else self.clock.measured

        def three_values(micro_batch: MicroBatch, output: ModelOutput) -> tuple[Tensor, Tensor, Any]:
            with measured():
                loss, result = loss_and_result(micro_batch, output)
            return loss, torch.ones((), dtype=torch.int), result  # a count of one token: the loss is normalized

        def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            micro_batch = next(iterator)
            inputs = dict(micro_batch.model_inputs)
            routed_experts = inputs.pop(ROUTED_EXPERTS, None)
            if model is not chunks[0] or self.parallel.pp.rank > 0:
                inputs = self._later_stage_inputs(inputs)
            with measured(), nullcontext() if self.routing is None else self.routing.of_pass(model, routed_experts):
                output = model(**inputs, **options)
            return output, partial(three_values, micro_batch)

        if self.equal_tokens:
            self._refuse_unequal_tokens(local)
        # one iterator for each model chunk: an interleaved schedule runs the chunks on different micro-batches
        iterators = [iter(local) for _ in chunks]
        interleaved = len(chunks) > 1
        width = max(micro_batch.padded_width for micro_batch in local)
        try:
            return get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if interleaved else iterators[0],
                model=chunks if interleaved else chunks[0],
                num_microbatches=len(local),
                seq_length=width,
                micro_batch_size=local[0].num_rows,
                decoder_seq_length=width,
                forward_only=forward_only,
            )
        finally:
            if self.routing is not None:
                self.routing.end_of_run()

    def _later_stage_inputs(self, inputs: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The inputs of a later stage. With sequence parallelism Megatron-Core splits the padding mask over
        tensor-parallel ranks on the first stage only (models/gpt/gpt_model.py, _preprocess), so it is split here on the
        other stages."""
        mask, tp = inputs.get(PADDING_MASK), self.parallel.tp
        if mask is None or not self.sequence_parallel:
            return inputs
        return {**inputs, PADDING_MASK: mask.chunk(tp.size, dim=1)[tp.rank]}

    def _refuse_unequal_tokens(self, local: list[MicroBatch]) -> None:
        """Raise a DataError, on all processes that share the experts, if their numbers of tokens differ. Collective."""
        counts = gather_objects([part.num_rows * part.padded_width for part in local], self.parallel.ep.group)
        for number, of_processes in enumerate(zip(*counts, strict=True), 1):
            if len(set(of_processes)) > 1:
                raise DataError(
                    f"micro-batch {number} of {len(local)} has {sorted(set(of_processes))} tokens with padding on the "
                    "processes that share the experts, and moe_token_dispatcher_type: allgather needs equal numbers; "
                    "set megatron_lm.model.arch.moe_token_dispatcher_type: alltoall, or collate to equal lengths "
                    "(megatron_wrap.flow.collate_type: fixed_length)"
                )


@contextmanager
def deferred_reduction(chunks: Sequence[Any], config: TransformerConfig, share: float) -> Iterator[None]:
    """Context in which runs of the schedule leave this rank's gradients in its buffers, as between micro-batches.

    Args:
        chunks, config: the model chunks of this process, and their configuration.
        share: micro-batches of the run, as a share of those of the step. The schedule divides losses, and those of the
            routers, by the micro-batches of a run (schedules.py, forward_step_calc_loss).
    """
    before = config.finalize_model_grads_func, config.no_sync_func, config.grad_sync_func, config.grad_scale_func
    scale = config.grad_scale_func

    def scaled(loss: Tensor) -> Tensor:
        return (loss if scale is None else scale(loss)) * share

    try:
        config.finalize_model_grads_func = lambda *arguments, **keywords: None
        config.no_sync_func = config.grad_sync_func = None
        config.grad_scale_func = scaled
        with ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        finalize, no_sync, grad_sync, grad_scale = before
        config.finalize_model_grads_func = finalize
        config.no_sync_func, config.grad_sync_func, config.grad_scale_func = no_sync, grad_sync, grad_scale

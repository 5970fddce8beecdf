"""Megatron-Core's forward and backward schedule over a replica's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.engine.batches.localize import PADDING_MASK
from megatron_wrap.engine.batches.micro_batch import MicroBatch
from megatron_wrap.parallel.state import ParallelState


@dataclass(frozen=True)
class PipelineSchedule:
    """Runs model chunks of one shape on this layout; used for the policy and for the reference model.

    Local micro-batches come from `Localization.localize`; with several pipeline stages all of a run have the same
    number of rows.
    """

    parallel: ParallelState
    sequence_parallel: bool
    half_precision: bool
    """Activations are bf16 or fp16."""

    def forward_backward(
        self, chunks: list[Any], local: list[MicroBatch], loss: Callable[[MicroBatch, Tensor], Tensor]
    ) -> None:
        """Add the gradients of the micro-batches to the gradient buffers. Collective over the replica.

        Args:
            chunks: this process's model chunks.
            loss: returns the scalar to differentiate for a micro-batch, from the output of the last stage. The schedule
                divides it by the number of micro-batches.
        """
        self._run(chunks, local, lambda micro_batch, output: (loss(micro_batch, output), None), forward_only=False)

    def forward(
        self, chunks: list[Any], local: list[MicroBatch], compute: Callable[[MicroBatch, Tensor], Any]
    ) -> list[Any]:
        """A forward pass without a graph. Collective over the replica.

        Args:
            chunks: this process's model chunks.
            compute: called with a micro-batch and the output of the last stage, on that stage.

        Returns:
            What `compute` returned for each micro-batch, on the last pipeline stage; an empty list on other stages.
        """

        def zero_loss(micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Any]:
            return output.new_zeros(()), compute(micro_batch, output)

        with torch.no_grad():
            return self._run(chunks, local, zero_loss, forward_only=True)

    def _run(
        self,
        chunks: list[Any],
        local: list[MicroBatch],
        loss_and_result: Callable[[MicroBatch, Tensor], tuple[Tensor, Any]],
        forward_only: bool,
    ) -> list[Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        # keep half-precision logits: the loss operations compute in fp32 internally, and an fp32 copy of all logits
        # would be the largest tensor of the step (Megatron-Core's Float16Module makes one by default)
        options = {"fp32_output": False} if self.half_precision else {}

        def three_values(micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Any]:
            loss, result = loss_and_result(micro_batch, output)
            return loss, torch.ones((), dtype=torch.int), result  # a count of one token: the loss is normalized

        def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            micro_batch = next(iterator)
            inputs = micro_batch.model_inputs
            if model is not chunks[0] or self.parallel.pp.rank > 0:
                inputs = self._later_stage_inputs(inputs)
            return model(**inputs, **options), partial(three_values, micro_batch)

        # one iterator for each model chunk: an interleaved schedule runs the chunks on different micro-batches
        iterators = [iter(local) for _ in chunks]
        interleaved = len(chunks) > 1
        width = max(micro_batch.padded_width for micro_batch in local)
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

    def _later_stage_inputs(self, inputs: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
        """With sequence parallelism Megatron-Core splits the padding mask over tensor-parallel ranks on the first stage
        only (models/gpt/gpt_model.py, _preprocess); split it here on the other stages."""
        mask, tp = inputs.get(PADDING_MASK), self.parallel.tp
        if mask is None or not self.sequence_parallel:
            return inputs
        return {**inputs, PADDING_MASK: mask.chunk(tp.size, dim=1)[tp.rank]}

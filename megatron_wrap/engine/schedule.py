"""Megatron-Core's forward and backward schedule over a replica's micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.engine.localize import PADDING_MASK, padded_width, shard, to_device
from megatron_wrap.engine.micro_batch import MicroBatch
from megatron_wrap.metrics.phases import COMPUTED_TOKENS, DATA, phase
from megatron_wrap.parallel.state import ParallelState

LossFunction = Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor, Any]]
"""(local micro-batch, output of the last stage) -> (loss to differentiate, a token count of one, value to store)."""


@dataclass(frozen=True)
class Schedule:
    """Runs model chunks of one shape on this layout; used for the policy and for the reference model."""

    parallel: ParallelState
    device: torch.device
    sequence_parallel: bool
    half_precision: bool
    """Activations are bf16 or fp16."""
    has_experts: bool
    """The model takes PADDING_MASK."""
    token_multiple: int = 1
    """Each context-parallel rank has a multiple of it of each sequence's tokens."""

    def shard(self, micro_batches: Sequence[MicroBatch], extra_padding: int = 0) -> list[MicroBatch]:
        """Pad the micro-batches and take this context-parallel rank's shard of each, on the CPU.

        With pipeline parallelism all micro-batches are padded to one length: if stages exchanged shapes, each
        micro-batch would synchronize with the device.

        Args:
            extra_padding: tokens of padding beyond the layout's divisor.
        """
        lengths = [micro_batch.width + extra_padding for micro_batch in micro_batches]
        if self.parallel.pp.size > 1:
            lengths = [max(lengths)] * len(lengths)
        layout = (self.parallel, self.sequence_parallel, self.token_multiple)
        widths = [padded_width(length, *layout) for length in lengths]
        return [
            shard(micro_batch, width, self.parallel.cp, with_padding_mask=self.has_experts)
            for micro_batch, width in zip(micro_batches, widths, strict=True)
        ]

    def localize(self, micro_batches: Sequence[MicroBatch], extra_padding: int = 0) -> list[MicroBatch]:
        """`shard`, unless that was done ahead, and copy to the device."""
        with phase(DATA):
            if not all(micro_batch.padded_width for micro_batch in micro_batches):
                micro_batches = self.shard(micro_batches, extra_padding)
            tokens = sum(micro_batch.num_rows * micro_batch.padded_width for micro_batch in micro_batches)
            with phase(f"{COMPUTED_TOKENS}{tokens}"):
                return [to_device(micro_batch, self.device) for micro_batch in micro_batches]

    def run(
        self, chunks: list[Any], local: list[MicroBatch], loss_function: LossFunction, forward_only: bool
    ) -> list[Any]:
        """Run a model's chunks over micro-batches. Collective over the replica.

        Args:
            chunks: this process's model chunks.
            local: from `localize`; all with the same number of rows if there are several pipeline stages.

        Returns:
            On the last pipeline stage, the third value that `loss_function` returned for each micro-batch; an empty
            list on other stages.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        # keep half-precision logits: the loss operations compute in fp32 internally, and an fp32 copy of all logits
        # would be the largest tensor of the step (Megatron-Core's Float16Module makes one by default)
        options = {"fp32_output": False} if self.half_precision else {}

        def forward_step(iterator: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
            micro_batch = next(iterator)
            inputs = micro_batch.model_inputs
            if model is not chunks[0] or self.parallel.pp.rank > 0:
                inputs = self._later_stage_inputs(inputs)
            return model(**inputs, **options), partial(loss_function, micro_batch)

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

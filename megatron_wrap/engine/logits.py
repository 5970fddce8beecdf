"""Full logits of token ids, on any layout, for comparison with another implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_wrap.engine.batches.micro_batch import MicroBatch, of_token_ids
from megatron_wrap.engine.batches.sample_sharing import rows_in_order
from megatron_wrap.engine.state.evaluation_mode import evaluation_mode
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.ops.deferred_logits import whole_logits
from megatron_wrap.parallel import context
from megatron_wrap.parallel.collectives import gather_tensors


def sequence_logits(state: TrainingState, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits [S, V] of each sequence of token ids, V without padding, on the CPU of every rank. Collective.

    The state is unchanged. Every rank needs device memory for the full logits of one sequence.
    """
    parallel, vocab_size = state.parallel, state.shape.vocab_size
    multiple = state.micro_batching.num_microbatches_multiple

    def whole(micro_batch: MicroBatch, output: Tensor) -> Tensor | None:
        """Logits gathered over tensor- and context-parallel ranks, without padding; [S, V] on the CPU."""
        if not micro_batch.counted:
            return None
        logits = torch.cat(gather_tensors(whole_logits(output.detach()), parallel.tp.group), dim=-1)[
            ..., :vocab_size
        ].contiguous()
        merged = context.merge(gather_tensors(logits, parallel.cp.group), 1)
        return merged[0, : micro_batch.width].cpu()

    rows: list[Tensor] = []
    with evaluation_mode(state):
        # one sequence per replica at a time; a replica without one runs a filler, and an interleaved pipeline needs a
        # multiple of its group size (schedules.py, forward_backward_pipelining_with_interleaving)
        for first in range(0, len(sequences), parallel.dp.size):
            index = first + parallel.dp.rank
            is_counted = index < len(sequences)
            micro_batch = replace(of_token_ids([sequences[index if is_counted else first]]), counted=is_counted)
            fillers = [replace(micro_batch, counted=False)] * (multiple - 1)
            local = state.localization.localize([micro_batch, *fillers])
            rows += [row for row in state.pipeline_schedule.forward(state.chunks, local, whole) if row is not None]
    return rows_in_order(rows, len(sequences), 1, parallel)

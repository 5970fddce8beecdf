"""Full logits of token ids, on any layout, for comparison with another implementation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_wrap.engine.forward import evaluation_mode, in_order
from megatron_wrap.engine.micro_batch import MicroBatch
from megatron_wrap.engine.state import TrainingState
from megatron_wrap.parallel import context
from megatron_wrap.parallel.collectives import gather_tensors


def sequence_logits(state: TrainingState, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits [S, V] of each sequence of token ids, V without padding, on the CPU of every rank. Collective.

    The state is unchanged. Every rank needs device memory for the full logits of one sequence.
    """
    parallel, vocab_size, schedule = state.parallel, state.shape.vocab_size, state.schedule
    one_token = torch.ones((), dtype=torch.int)

    def whole(micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Logits gathered over tensor- and context-parallel ranks, without padding; [S, V] on the CPU."""
        if not micro_batch.counted:
            return output.new_zeros(()), one_token, None
        logits = torch.cat(gather_tensors(output.detach(), parallel.tp.group), dim=-1)[..., :vocab_size].contiguous()
        merged = context.merge(gather_tensors(logits, parallel.cp.group), 1)
        return output.new_zeros(()), one_token, merged[0, : micro_batch.width].cpu()

    interleaved = len(state.chunks) > 1
    group_size = state.transformer_config.microbatch_group_size_per_vp_stage if interleaved else 1
    rows: list[Tensor] = []
    with evaluation_mode(state):
        # one sequence per replica at a time; a replica without one runs a filler, and an interleaved pipeline needs a
        # multiple of its group size (schedules.py, forward_backward_pipelining_with_interleaving)
        for first in range(0, len(sequences), parallel.dp.size):
            place = first + parallel.dp.rank
            mine = _micro_batch(sequences[place if place < len(sequences) else first])
            counted = [replace(mine, counted=place < len(sequences))]
            local = schedule.localize(counted + [replace(mine, counted=False)] * (group_size - 1))
            rows += [row for row in schedule.run(state.chunks, local, whole, forward_only=True) if row is not None]
    return in_order(rows, len(sequences), 1, parallel)


def _micro_batch(ids: Sequence[int]) -> MicroBatch:
    """A micro-batch of one sequence, without loss inputs."""
    tokens = torch.tensor([list(map(int, ids))])
    width = tokens.shape[1]
    inputs = {"input_ids": tokens, "position_ids": torch.arange(width)[None], "attention_mask": None}
    seqdims = dict.fromkeys(("input_ids", "position_ids"), 1)
    return MicroBatch(inputs, {}, {}, 1, torch.tensor([width]), width, seqdims=seqdims)

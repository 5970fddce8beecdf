"""Log-probabilities of continuations, and full logits for comparison with another implementation, on any layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_wrap.engine.batches.collation import of_token_ids
from megatron_wrap.engine.batches.global_batch import rows_in_order
from megatron_wrap.engine.batches.micro_batch import MicroBatch
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.ops.deferred_logits import whole_logits
from megatron_wrap.ops.log_probs import token_log_probs
from megatron_wrap.ops.token_values import top_k
from megatron_wrap.parallel import zigzag
from megatron_wrap.parallel.collectives import gather_objects, gather_tensors
from megatron_wrap.utils.progress import WorkProgress


class Score(NamedTuple):
    """The log-probability of a continuation."""

    log_prob: float
    """Sum of the log-probabilities of its tokens, each given all tokens before it, in nats."""
    is_greedy: bool
    """Whether each of its tokens is the most probable one."""


def score_continuations(
    state: TrainingState, sequences: Sequence[tuple[Sequence[int], int]], batch_size: int
) -> list[Score]:
    """The score of the last tokens of each sequence; the state is unchanged. Collective over all ranks.

    Sequences of similar length are computed together. The logits stay on their tensor-parallel ranks.

    Args:
        sequences: (token ids, number of tokens of the continuation at their end, at least 1 and fewer than all), the
            same on every rank.
        batch_size: sequences in one forward pass of a replica.

    Returns:
        One score for each sequence, in order, the same on every rank.
    """
    parallel = state.parallel
    by_length = sorted(range(len(sequences)), key=lambda index: -len(sequences[index][0]))
    batches = [by_length[start : start + batch_size] for start in range(0, len(sequences), batch_size)]
    # pipeline stages compute different micro-batches at the same time
    multiple = state.micro_batching.num_microbatches_multiple
    in_flight = -(-parallel.pp.size // multiple) * multiple
    scores: list[tuple[int, Score]] = []

    def score(micro_batch: MicroBatch, output: Tensor) -> list[tuple[int, Score]]:
        labels = micro_batch.loss_inputs["labels"]
        log_probs = token_log_probs(output, labels, parallel.tp.group)
        matches = top_k(output, 1, parallel.tp.group).ids[..., 0] == labels
        local = torch.stack([log_probs, matches.to(log_probs)])  # [2, B, S/cp]
        merged = zigzag.merge(gather_tensors(local, parallel.cp.group), 2).cpu()
        rows = []
        for row, index in enumerate(micro_batch.sample_indices):
            ids, count = sequences[index]
            values, are_greedy = merged[:, row, len(ids) - 1 - count : len(ids) - 1]
            rows.append((index, Score(float(values.double().sum()), bool(are_greedy.all()))))
        return rows

    with state.evaluation_mode(), WorkProgress("scoring", len(sequences), "sequence") as progress:
        for start in range(0, len(batches), parallel.dp.size * in_flight):
            group = batches[start : start + parallel.dp.size * in_flight]
            num_microbatches = -(-len(group) // (parallel.dp.size * multiple)) * multiple
            share = [
                _micro_batch(sequences, batch, len(batches[0])) for batch in group[parallel.dp.rank :: parallel.dp.size]
            ]
            filler = replace(_micro_batch(sequences, group[0], len(batches[0])), sample_indices=(), counted=False)
            local = state.localization.localize([*share, *[filler] * (num_microbatches - len(share))])
            for rows in state.pipeline_schedule.forward(state.chunks, local, score):
                scores += rows
            progress.advance(sum(len(batch) for batch in group))
    contributed = scores if parallel.counts_once and parallel.cp.rank == 0 else []
    of_index = dict(pair for of_rank in gather_objects(contributed) for pair in of_rank)
    return [of_index[index] for index in range(len(sequences))]


def _micro_batch(sequences: Sequence[tuple[Sequence[int], int]], indices: Sequence[int], num_rows: int) -> MicroBatch:
    """A micro-batch of the sequences `indices`, without their last tokens, which are only labels.

    Args:
        num_rows: pipeline stages exchange tensors of one shape, so the last micro-batch repeats its first sequence.
    """
    rows = [sequences[index][0] for index in indices]
    rows += [rows[0]] * (num_rows - len(rows))
    micro_batch = of_token_ids([row[:-1] for row in rows])
    return replace(
        micro_batch,
        loss_inputs={"labels": of_token_ids([row[1:] for row in rows]).model_inputs["input_ids"]},
        seqdims={**micro_batch.seqdims, "labels": 1},
        sample_indices=tuple(indices),
    )


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
        logits = torch.cat(gather_tensors(whole_logits(output.detach()), parallel.tp.group), dim=-1)
        merged = zigzag.merge(gather_tensors(logits[..., :vocab_size].contiguous(), parallel.cp.group), 1)
        return merged[0, : micro_batch.width].cpu()

    rows: list[Tensor] = []
    with state.evaluation_mode():
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

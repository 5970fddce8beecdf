"""What ranks compute from packed rows, token by token, for `test_packed_against_transformers.py`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import _bridge_runs


def packed_logits_and_loss(
    folder: str, overrides: Sequence[str], samples: Sequence[Any], outputs: str
) -> tuple[list[tuple[int, int, Any]], list[int], float]:
    """Start from a Hugging Face folder with packing, run the samples forward as one step cuts them, then train on them.

    Returns:
        on the last pipeline stage (sample, position, logits [V]) of each of this rank's tokens, without padding; the
        number of sequences in each row; the loss of the step.
    """
    import torch

    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.engine.batches.context_parallel_shard import PACKED
    from megatron_wrap.engine.state.evaluation_mode import evaluation_mode
    from megatron_wrap.engine.step_inputs import replica_micro_batches
    from megatron_wrap.flow.contract.base import SEQUENCE_LENGTHS

    settings = [*overrides, "megatron_wrap.flow.packing=true", f"megatron_wrap.logger.output_dir={outputs}"]
    with MegatronWrap.from_pretrained(folder, _bridge_runs.CONFIG, settings) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        state = wrap.state
        micro_batches = replica_micro_batches(state, samples).training

        def stored(micro_batch: Any, output: Any) -> Any:
            lengths = micro_batch.loss_inputs[SEQUENCE_LENGTHS]
            sequences = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            positions = micro_batch.model_inputs[PACKED].positions
            return [
                (int(sequence), int(position), logits[: _bridge_runs.VOCAB].numpy())
                for sequence, position, logits in zip(sequences, positions, output[0].float(), strict=True)
                if sequence < len(micro_batch.lengths) and position < micro_batch.lengths[sequence]
            ]

        with evaluation_mode(state):
            local = state.localization.localize(micro_batches)
            rows = state.pipeline_schedule.forward(state.chunks, local, stored)
        # a row's sequences are in the order of collation, and the first token of each sample is its number
        numbers = [_numbers(micro_batch) for micro_batch in micro_batches]
        tokens = [
            (numbers[row][sequence], position, logits)
            for row, result in enumerate(rows)
            for sequence, position, logits in result
        ]
        return tokens, [len(of_micro_batch) for of_micro_batch in numbers], wrap.train(samples)["loss"]


def _numbers(micro_batch: Any) -> list[int]:
    starts = [sum(micro_batch.segments[:index]) for index in range(len(micro_batch.segments))]
    return micro_batch.model_inputs["input_ids"][0, starts].tolist()

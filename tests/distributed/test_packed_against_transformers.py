"""Packed rows of a Llama and a Qwen3 from Hugging Face folders give the logits and the loss of transformers on separate
sequences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _bridge_runs as runs
import numpy
import pytest
from _covering import covering
from _layouts import PACKED as PACKED_ROWS
from _layouts import layout
from _started import from_folder


def packed_logits_and_loss(
    folder: str, overrides: Sequence[str], samples: Sequence[Any], outputs: str
) -> tuple[list[tuple[int, int, Any]], list[int], float]:
    """Start from a Hugging Face folder with packing, run the samples forward as one step cuts them, then train on them.

    Returns:
        on the last pipeline stage (sample, position, logits [V]) of each of this rank's tokens, without padding; the
        number of sequences in each row; the loss of the step.
    """
    import torch

    from megatron_wrap.engine.batches.micro_batch import PACKED
    from megatron_wrap.engine.step_inputs import replica_micro_batches
    from megatron_wrap.flow.contract.base import SEQUENCE_LENGTHS

    with from_folder(folder, (*overrides, *PACKED_ROWS), outputs) as wrap:
        state = wrap.state
        micro_batches = replica_micro_batches(state, samples).training

        def stored(micro_batch: Any, output: Any) -> Any:
            lengths = micro_batch.loss_inputs[SEQUENCE_LENGTHS]
            sequences = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            positions = micro_batch.model_inputs[PACKED].positions
            return [
                (int(sequence), int(position), logits[: runs.VOCAB].numpy())
                for sequence, position, logits in zip(sequences, positions, output[0].float(), strict=True)
                if sequence < len(micro_batch.lengths) and position < micro_batch.lengths[sequence]
            ]

        with state.evaluation_mode():
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


TRAIN = "megatron_lm.train.common."
SETTINGS = (f"{TRAIN}global_batch_size=8", f"{TRAIN}micro_batch_size=2")
COUNT = 8


def samples() -> list[dict[str, list[int]]]:
    """Token ids of unequal lengths, some of them without a loss; the first token of each sample is its number."""
    generator = numpy.random.default_rng(41)
    made = []
    for index, length in enumerate((65, 5, 31, 18, 40, 2, 27, 12)):
        ids = [index, *generator.integers(COUNT, runs.VOCAB, length - 1).tolist()]
        made.append({"input_ids": ids, "loss_mask": (generator.random(length) < 0.7).astype(int).tolist()})
    return made


def separate_sequences(folder: Path) -> tuple[list[Any], float]:
    """transformers' logits [S, V] of each sample by itself, and the mean loss over the trained tokens of all."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits, losses = [], []
    with torch.no_grad():
        for sample in samples():
            ids, trained = torch.tensor(sample["input_ids"]), torch.tensor(sample["loss_mask"])[1:] == 1
            actual = model(ids[None]).logits[0, :-1]
            logits.append(actual.numpy())
            losses.append(cross_entropy(actual.double(), ids[1:], reduction="none")[trained])
    return logits, torch.cat(losses).mean().item()


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """theirs(family) -> the folder, and `separate_sequences`."""
    return runs.made_once(tmp_path_factory, separate_sequences)


@pytest.mark.parametrize(
    ("family", "name"), covering((family, name) for family in ("llama", "qwen3") for name in ("one", "cp2", "pp2"))
)
def test_packed_rows_agree_with_separate_sequences_of_transformers(family, name, ranks, theirs, tmp_path):
    folder, (expected, loss) = theirs(family)
    world_size, overrides = layout(name)
    by_rank = ranks(world_size).run(
        packed_logits_and_loss, str(folder), [*SETTINGS, *overrides], samples(), str(tmp_path)
    )
    assert max(by_rank[0][1]) >= 3  # several sequences in a row
    actual = {(sample, position): logits for tokens, _, _ in by_rank for sample, position, logits in tokens}
    assert actual.keys() == {(sample, index) for sample, rows in enumerate(expected) for index in range(len(rows))}
    worst = max(float(numpy.abs(logits - expected[a][b]).max()) for (a, b), logits in actual.items())
    assert worst <= 1e-4
    for _, _, actual_loss in by_rank:
        assert actual_loss == pytest.approx(loss, rel=1e-6)

"""Whole logits of given token ids, on any layout: what a comparison with another implementation needs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.engine.forward import forward
from megatron_wrap.engine.state import TrainingState
from megatron_wrap.flow import FlowContext, FlowOptions, LossOutput, MegatronWrapTrainingFlowBase
from megatron_wrap.parallel.collectives import gather_tensors
from megatron_wrap.parallel.state import Axis


def sequence_logits(state: TrainingState, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    """Logits [S, V] of each sequence of token ids, V without padding, on the CPU of every rank. Collective.

    Nothing of the state changes. The memory of a whole sequence's logits is needed on every rank.
    """
    longest = max(map(len, sequences))
    flow = _LogitsFlow(state.flow, state.parallel.tp, state.shape.vocab_size, longest)
    samples = [{"input_ids": list(map(int, sequence))} for sequence in sequences]
    train = replace(state.config.train, global_batch_size=state.parallel.dp.size)
    looking = replace(state, flow=flow, agreed={}, config=replace(state.config, train=train))
    return [row["logits"] for row in forward(looking, samples)]


class _LogitsFlow(MegatronWrapTrainingFlowBase):
    """One sequence a micro-batch; its output is the logits, joined over the vocabulary."""

    def __init__(self, other: MegatronWrapTrainingFlowBase, tp: Axis, vocab_size: int, seq_length: int) -> None:
        given = other.context
        super().__init__(
            FlowOptions("logits", {}),
            FlowContext(
                micro_batch_size=1,
                seq_length=seq_length,
                vocab_size=vocab_size,
                cp_size=given.cp_size,
                sum_on_cp_group=given.sum_on_cp_group,
                average_across_dp_ranks=given.average_across_dp_ranks,
                tokenizer=None,
            ),
        )
        self._tp = tp

    def get_fields_and_seqdims(self) -> dict[str, int]:
        return {**super().get_fields_and_seqdims(), "logits": 1}

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        [sample] = itertools.islice(iterator, 1)
        ids = torch.tensor([sample["input_ids"]])
        positions = torch.arange(ids.shape[1])[None]
        inputs = {"input_ids": ids, "position_ids": positions, "attention_mask": torch.ones_like(ids)}
        return inputs, {"loss_mask": torch.ones(ids.shape)}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        raise AssertionError("logits are looked at, not trained on")

    def calculate_outputs(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> dict[str, Tensor]:
        whole = torch.cat(gather_tensors(model_forward_output.detach(), self._tp.group), dim=-1)
        return {"logits": whole[..., : self.vocab_size]}

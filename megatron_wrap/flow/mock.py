"""A flow without data: random tokens and a squared error, to test a layout or a cluster."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.flow.contract.base import LossOutput, MegatronWrapFlowConfig
from megatron_wrap.flow.shared.text import MegatronWrapGPTModelFlow
from megatron_wrap.ops.log_probs import vocabulary_max


class MegatronWrapMinimalMockFlow(MegatronWrapGPTModelFlow):
    """Mean over tokens of (largest logit - 1)^2 on random tokens; a sample's tokens depend only on its `index`."""

    @dataclass(frozen=True, kw_only=True)
    class Config(MegatronWrapFlowConfig):
        """Keys of `megatron_wrap.flow`."""

        vary_length: bool = True
        """Samples of unequal length, up to seq_length; false: all of seq_length."""

    supports_packing = True

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Random token ids [B, S], where S is the longest sample of the micro-batch; `target` is 1 everywhere."""
        samples = list(itertools.islice(iterator, self.micro_batch_size))
        sequences = [self._random_tokens(sample) for sample in samples]
        longest = max(len(sequence) for sequence in sequences)
        positions = torch.arange(longest).expand(len(samples), -1)
        mask = (positions < torch.tensor([len(sequence) for sequence in sequences])[:, None]).long()
        input_ids = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        model_forward_inputs = {"input_ids": input_ids, "position_ids": positions, "attention_mask": mask}
        count = torch.ones(len(samples))
        loss_inputs = {"target": torch.ones(len(samples), longest), "loss_mask": mask, "count": count}
        return model_forward_inputs, loss_inputs

    def _random_tokens(self, sample: Any) -> Tensor:
        if isinstance(sample, Mapping) and "index" in sample:
            seed = int(sample["index"])
        else:  # a placeholder of the caller: the engine has seeded torch equally on all processes of a replica
            seed = int(torch.randint(2**31, ()))
        generator = torch.Generator().manual_seed(seed)
        shortest = max(1, self.seq_length // 4) if self.flow_config.vary_length else self.seq_length
        length = int(torch.randint(shortest, self.seq_length + 1, (), generator=generator))
        return torch.randint(0, self.vocab_size, (length,), generator=generator)

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """The base class's fields and `target`."""
        return {**super().get_fields_and_seqdims(), "target": 1}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This rank's share of the sum over tokens; the metric `mean_length` is in tokens per sample."""
        mask = loss_inputs["loss_mask"]
        error = (vocabulary_max(model_forward_output) - loss_inputs["target"]) ** 2
        samples = self.sequence_mean(loss_inputs["count"])
        return LossOutput(self.token_mean(error, mask), {"mean_length": (mask.sum(), samples)})

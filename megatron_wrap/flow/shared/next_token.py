"""Base of flows that predict the next token of one sequence per sample: supervised fine-tuning, distillation."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.flow.shared.text import MegatronWrapGPTModelTextFlow
from megatron_wrap.ops.log_probs import token_log_probs


class MegatronWrapGPTModelNextTokenFlow(MegatronWrapGPTModelTextFlow):
    """A sample is `{"messages": [...]}`, `{"prompt", "completion"}`, `{"text"}` or already tokenized (see
    `megatron_wrap.data.chat.encode.encode_sample`). Means are over the tokens with `loss_mask`, weighted by their
    samples' `weight`."""

    supports_packing = True

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Up to B samples, prepared or not, see `collate_tokens`; `loss_mask` is multiplied by the samples' weights."""
        sequences = [self._encoded(sample) for sample in itertools.islice(iterator, self.micro_batch_size)]
        model_forward_inputs, loss_inputs = self.collate_tokens(sequences)
        weights = torch.tensor([tokens.weight for tokens in sequences])
        return model_forward_inputs, {**loss_inputs, "loss_mask": loss_inputs["loss_mask"] * weights[:, None]}

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """The base class's fields and the output `log_probs`."""
        return {**super().get_fields_and_seqdims(), "log_probs": 1}

    def calculate_outputs(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> dict[str, Tensor]:
        """`log_probs` [B, S]: log-probability of each label; `loss_mask` [B, S] as collated, times the weights."""
        log_probs = token_log_probs(model_forward_output, loss_inputs["labels"])
        return {"log_probs": log_probs, "loss_mask": loss_inputs["loss_mask"]}

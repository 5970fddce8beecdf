"""Supervised fine-tuning (SFT) of a GPT model on conversations: cross-entropy of the assistant's turns."""

from __future__ import annotations

from torch import Tensor

from megatron_wrap.flow.contract.base import LossOutput
from megatron_wrap.flow.shared.next_token import MegatronWrapGPTModelNextTokenFlow
from megatron_wrap.metrics.metric import Total
from megatron_wrap.ops.log_probs import token_log_probs


class MegatronWrapGPTModelSFTFlow(MegatronWrapGPTModelNextTokenFlow):
    """Mean cross-entropy over the tokens with `loss_mask`, weighted by their samples' `weight`.

    A sample is `{"messages": [...]}`, `{"prompt", "completion"}`, `{"text"}` or already tokenized (see
    `megatron_wrap.data.chat.encode.encode_sample`); the metric `truncated_samples` counts truncated samples.
    """

    supports_packing = True

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This rank's share of the sum of cross-entropies over the tokens with `loss_mask`."""
        log_probs = token_log_probs(model_forward_output, loss_inputs["labels"])
        loss_sum = self.token_mean(-log_probs, loss_inputs["loss_mask"])
        return LossOutput(loss_sum, {"truncated_samples": Total(self.sequence_mean(loss_inputs["truncated"]))})

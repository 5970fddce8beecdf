"""Base of flows for a GPT model: its forward inputs."""

from collections.abc import Mapping

from torch import Tensor

from megatron_wrap.errors import DataError, FlowError
from megatron_wrap.flow.contract.base import MegatronWrapTrainingFlowBase


class MegatronWrapGPTModelFlow(MegatronWrapTrainingFlowBase):
    """Model inputs are `input_ids`, `position_ids` and `attention_mask`, each [B, S]; attention is causal and
    attention_mask is 1 on tokens, 0 on padding to their right."""

    REQUIRED = ("input_ids", "position_ids", "attention_mask")

    def validate_model_forward_inputs(self, model_forward_inputs: Mapping[str, Tensor]) -> None:
        """Check the names of the model inputs and the range of `input_ids`.

        Raises:
            FlowError: one of `REQUIRED` is missing.
            DataError: a token id is negative or not below the vocabulary size.
        """
        missing = [name for name in self.REQUIRED if name not in model_forward_inputs]
        if missing:
            raise FlowError(
                f"{type(self).__name__}.collate_data_micro_batch: model_forward_inputs lack {', '.join(missing)}; "
                f"a GPT model takes {', '.join(self.REQUIRED)}, each [B, S]"
            )
        ids = model_forward_inputs["input_ids"]
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.vocab_size:
            # a vocabulary-parallel embedding would not raise
            raise DataError(
                f"{type(self).__name__}: input_ids are between {int(ids.min())} and {int(ids.max())}, but the model's "
                f"vocabulary has the ids 0 to {self.vocab_size - 1}; tokenize with this model's tokenizer"
            )

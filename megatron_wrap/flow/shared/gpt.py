"""Base of flows for a GPT model: its forward inputs."""

from collections.abc import Mapping

from torch import Tensor

from megatron_wrap.errors import FlowError
from megatron_wrap.flow.contract.base import MegatronWrapTrainingFlowBase


class MegatronWrapGPTModelFlow(MegatronWrapTrainingFlowBase):
    """Model inputs are `input_ids`, `position_ids` and `attention_mask`, each [B, S]; attention is causal and
    attention_mask is 1 on tokens, 0 on padding to their right."""

    REQUIRED = ("input_ids", "position_ids", "attention_mask")

    def validate_model_forward_inputs(self, model_forward_inputs: Mapping[str, Tensor]) -> None:
        """Check the names of the model inputs.

        Raises:
            FlowError: one of `REQUIRED` is missing.
        """
        missing = [name for name in self.REQUIRED if name not in model_forward_inputs]
        if missing:
            raise FlowError(
                f"{type(self).__name__}.collate_data_micro_batch: model_forward_inputs lack {', '.join(missing)}; "
                f"a GPT model takes {', '.join(self.REQUIRED)}, each [B, S]"
            )

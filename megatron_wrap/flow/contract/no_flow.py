"""Replaces the flow in a run that only uses a trained model: one that exports, generates or scores."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor

from megatron_wrap.errors import FlowError
from megatron_wrap.flow.contract.base import MegatronWrapTrainingFlowBase

NO_FLOW = f"{__name__}:NoFlow"
"""`flow_key` of a run without a flow."""


class NoFlow(MegatronWrapTrainingFlowBase):
    """A flow without samples and without a loss."""

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> NoReturn:
        """Raise FlowError."""
        raise FlowError("this run only uses a trained model and has no flow; select one in megatron_wrap.flow")

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> NoReturn:
        """Raise FlowError."""
        raise FlowError("this run only uses a trained model and has no flow; select one in megatron_wrap.flow")

    def __str__(self) -> str:
        return "no flow"

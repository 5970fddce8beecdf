"""Flows: one algorithm per file; `contract/base.py` defines what they implement."""

from megatron_wrap.flow.contract.base import (
    FlowContext,
    FlowOptions,
    LossOutput,
    MegatronWrapFlowConfig,
    MegatronWrapTrainingFlowBase,
)
from megatron_wrap.flow.dpo import MegatronWrapGPTModelDPOFlow
from megatron_wrap.flow.entry import MegatronWrapFlowEntry
from megatron_wrap.flow.kto import MegatronWrapGPTModelKTOFlow
from megatron_wrap.flow.mock import MegatronWrapMinimalMockFlow
from megatron_wrap.flow.sft import MegatronWrapGPTModelSFTFlow
from megatron_wrap.flow.shared.text import MegatronWrapGPTModelFlow
from megatron_wrap.metrics.metric import Difference, Maximum, Metric, Minimum, Total

__all__ = [
    "Difference",
    "FlowContext",
    "FlowOptions",
    "LossOutput",
    "Maximum",
    "MegatronWrapFlowConfig",
    "MegatronWrapFlowEntry",
    "MegatronWrapGPTModelDPOFlow",
    "MegatronWrapGPTModelFlow",
    "MegatronWrapGPTModelKTOFlow",
    "MegatronWrapGPTModelSFTFlow",
    "MegatronWrapMinimalMockFlow",
    "MegatronWrapTrainingFlowBase",
    "Metric",
    "Minimum",
    "Total",
]

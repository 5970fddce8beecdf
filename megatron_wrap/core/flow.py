"""The import path `megatron_wrap.core.flow`, which users' flows take; the code is in `megatron_wrap.flow`."""

from megatron_wrap.flow import (
    FlowContext,
    FlowOptions,
    LossOutput,
    MegatronWrapFlowConfig,
    MegatronWrapFlowEntry,
    MegatronWrapGPTModelDPOFlow,
    MegatronWrapGPTModelFlow,
    MegatronWrapGPTModelSFTFlow,
    MegatronWrapMinimalMockFlow,
    MegatronWrapTrainingFlowBase,
    Metric,
    Total,
)

__all__ = [
    "FlowContext",
    "FlowOptions",
    "LossOutput",
    "MegatronWrapFlowConfig",
    "MegatronWrapFlowEntry",
    "MegatronWrapGPTModelDPOFlow",
    "MegatronWrapGPTModelFlow",
    "MegatronWrapGPTModelSFTFlow",
    "MegatronWrapMinimalMockFlow",
    "MegatronWrapTrainingFlowBase",
    "Metric",
    "Total",
]

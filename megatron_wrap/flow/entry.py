"""Look-up of flows by `flow_key`; and the flow of a run that only uses a trained model: one that exports, generates or
scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor

from megatron_wrap.errors import FlowError
from megatron_wrap.flow.contract.base import MegatronWrapTrainingFlowBase
from megatron_wrap.flow.contract.class_checks import check_flow_class
from megatron_wrap.registry import Registry

SHIPPED: Mapping[str, str] = {
    "minimal_mock": "megatron_wrap.flow.mock:MegatronWrapMinimalMockFlow",
    "gpt_pretrain": "megatron_wrap.flow.pretrain:MegatronWrapGPTModelPretrainFlow",
    "gpt_sft": "megatron_wrap.flow.sft:MegatronWrapGPTModelSFTFlow",
    "gpt_dpo": "megatron_wrap.flow.dpo:MegatronWrapGPTModelDPOFlow",
    "gpt_kto": "megatron_wrap.flow.kto:MegatronWrapGPTModelKTOFlow",
    "gpt_cpo": "megatron_wrap.flow.cpo:MegatronWrapGPTModelCPOFlow",
    "gpt_orpo": "megatron_wrap.flow.orpo:MegatronWrapGPTModelORPOFlow",
    "gpt_distill": "megatron_wrap.flow.distill:MegatronWrapGPTModelDistillFlow",
    "gpt_grpo": "megatron_wrap.flow.grpo:MegatronWrapGPTModelGRPOFlow",
    "gpt_reward": "megatron_wrap.flow.reward:MegatronWrapGPTModelRewardFlow",
}
"""Flows of this package, by key. `make config-docs` writes a file of the tree with the options of each."""

_FLOWS: Registry[type[MegatronWrapTrainingFlowBase]] = Registry("flow", "megatron_wrap.flows", dict(SHIPPED))


class MegatronWrapFlowEntry:
    """Flows by key: shipped ones, registered ones, `my_package.my_module:MyFlow`, and the entry points
    `megatron_wrap.flows` of installed packages."""

    @staticmethod
    def register(flow_key: str) -> Callable[[type], type]:
        """Class decorator that registers a flow as `flow_key`."""
        return _FLOWS.register(flow_key)

    @staticmethod
    def get_flow_class(flow_key: str) -> type[MegatronWrapTrainingFlowBase]:
        """The class of `flow_key`, validated against the contract.

        Raises:
            ConfigError: the key is unknown.
            FlowError: it is not a flow, or an incomplete one.
        """
        flow_class = _FLOWS.resolve(flow_key)
        if not (isinstance(flow_class, type) and issubclass(flow_class, MegatronWrapTrainingFlowBase)):
            raise FlowError(f"flow {flow_key!r} is {flow_class!r}, not a subclass of MegatronWrapTrainingFlowBase")
        check_flow_class(flow_class)
        return flow_class


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

"""The reference model: a second, frozen model whose outputs the flow compares with those of the policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_wrap.engine.micro_batch import MicroBatch
from megatron_wrap.engine.schedule import Schedule
from megatron_wrap.errors import FlowError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

PREFIX = "reference_"
"""Prefix of the names of the reference model's outputs among the loss inputs."""


@dataclass(frozen=True)
class ReferenceModel:
    """This process's chunks of a model that is never trained; it has no gradient buffers and no optimizer."""

    chunks: list[Any]
    transformer_config: TransformerConfig
    """Not the policy's object, which has hooks for gradient reduction and loss scaling."""


def with_reference_outputs(
    reference: ReferenceModel, flow: MegatronWrapTrainingFlowBase, schedule: Schedule, local: list[MicroBatch]
) -> list[MicroBatch]:
    """Run the reference model forward over all micro-batches, without a graph, and add the outputs of the flow's
    `calculate_outputs` to their loss inputs as `reference_NAME`, on the last pipeline stage. Collective over the
    replica.

    Args:
        local: from `Schedule.localize`; all with the same number of sequences.

    Raises:
        FlowError: the loss inputs already contain such a name.
    """
    one_token = torch.ones((), dtype=torch.int)

    def outputs(micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        named = flow.calculate_outputs(micro_batch.loss_inputs, output)
        return output.new_zeros(()), one_token, {PREFIX + name: tensor for name, tensor in named.items()}

    with torch.no_grad():
        stored = schedule.run(reference.chunks, local, outputs, forward_only=True)
    if not stored:  # not the last pipeline stage
        return local
    return [_with_loss_inputs(micro_batch, named) for micro_batch, named in zip(local, stored, strict=True)]


def _with_loss_inputs(micro_batch: MicroBatch, outputs: dict[str, Tensor]) -> MicroBatch:
    both = sorted(outputs.keys() & micro_batch.loss_inputs.keys())
    if both:
        raise FlowError(
            f"the samples contain {', '.join(both)}, which the reference model of megatron_wrap.models.reference "
            "computes too; set megatron_wrap.models.reference to null to use the samples' values, or remove them from "
            "the samples"
        )
    return replace(micro_batch, loss_inputs={**micro_batch.loss_inputs, **outputs})

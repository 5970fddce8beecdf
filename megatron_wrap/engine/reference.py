"""A second, frozen model whose outputs the flow compares the policy's with."""

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
"""Of the names under which the reference model's outputs stand among the loss inputs."""


@dataclass(frozen=True)
class ReferenceModel:
    """This process's part of a model that is never trained; it has no gradient buffers and no optimizer."""

    chunks: list[Any]
    transformer_config: TransformerConfig
    """Its own: the policy's carries hooks of gradient reduction and loss scaling."""


def with_reference_outputs(
    reference: ReferenceModel, flow: MegatronWrapTrainingFlowBase, schedule: Schedule, local: list[MicroBatch]
) -> list[MicroBatch]:
    """The micro-batches with what the flow's `calculate_outputs` makes of the reference model among their loss inputs,
    as `reference_NAME`, on the last pipeline stage. A forward pass over all of them, without a graph.

    Args:
        local: of `Schedule.localize`; as many sequences each.

    Raises:
        FlowError: the loss inputs have such a name already.
    """
    one_token = torch.ones((), dtype=torch.int)

    def outputs(micro_batch: MicroBatch, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        made = flow.calculate_outputs(micro_batch.loss_inputs, output)
        return output.new_zeros(()), one_token, {PREFIX + name: tensor for name, tensor in made.items()}

    with torch.no_grad():
        stored = schedule.run(reference.chunks, local, outputs, forward_only=True)
    if not stored:  # not the last pipeline stage
        return local
    return [_joined(micro_batch, made) for micro_batch, made in zip(local, stored, strict=True)]


def _joined(micro_batch: MicroBatch, outputs: dict[str, Tensor]) -> MicroBatch:
    both = sorted(outputs.keys() & micro_batch.loss_inputs.keys())
    if both:
        raise FlowError(
            f"the samples give {', '.join(both)}, and so does the reference model of megatron_wrap.models.reference; "
            "set that to null to take the samples' own, or leave them out of the samples"
        )
    return replace(micro_batch, loss_inputs={**micro_batch.loss_inputs, **outputs})

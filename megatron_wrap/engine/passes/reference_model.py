"""The reference or teacher model: a model without gradients, whose outputs the flow compares with those of the
policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_wrap.config.schema.reference_models import ReferenceModelConfig
from megatron_wrap.config.schema.run import ModelsConfig, RunConfig
from megatron_wrap.engine.batches.micro_batch import PADDING_MASK, MicroBatch
from megatron_wrap.engine.passes.parameters import synchronize_parameters
from megatron_wrap.engine.passes.pipeline_schedule import PipelineSchedule
from megatron_wrap.errors import FlowError
from megatron_wrap.flow import MegatronWrapTrainingFlowBase
from megatron_wrap.flow.contract.routing import ROUTED_EXPERTS
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.ops.deferred_logits import whole_logits

if TYPE_CHECKING:
    from megatron.core.transformer import TransformerConfig

    from megatron_wrap.plan.flops import Flops


@dataclass
class ReferenceModel:
    """This process's chunks of a model without gradient buffers and optimizer."""

    chunks: list[Any]
    transformer_config: TransformerConfig
    """Not the policy's object, which has hooks for gradient reduction and loss scaling."""
    config: RunConfig
    """Configuration of the run, with the architecture of this model."""
    vocab_size: int
    """Vocabulary size of this model, without padding."""
    flops: Flops
    """FLOPs of a forward pass."""
    device: torch.device
    has_policy_columns: bool = True
    """Whether the logits have the columns of the policy's logits."""
    averages_in_fp32: bool = False
    """Whether the average of the policy is kept in fp32, because the weights are too coarse to hold it."""
    average: list[Tensor] | None = None
    """Average of the policy's weights, one fp32 tensor for each of `parameters`, on their device; None: the weights are
    the average."""

    @property
    def settings(self) -> ReferenceModelConfig:
        """Section `megatron_wrap.models.reference` or `megatron_wrap.models.teacher`."""
        assert self.config.models.reference_or_teacher is not None, "the run has a reference or teacher model"
        return self.config.models.reference_or_teacher

    @property
    def stays_on_device(self) -> bool:
        """Whether this model's weights are on the device also outside `on_device`."""
        return not self.settings.offload

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The weights of all chunks."""
        return [parameter for chunk in self.chunks for parameter in chunk.parameters()]

    def keep_on_host(self) -> None:
        """Move the weights to the host's memory, page-locked where the device is a GPU."""
        for parameter in self.parameters:
            host = parameter.detach().cpu()
            parameter.data = host.pin_memory() if self.device.type == "cuda" else host

    @contextmanager
    def on_device(self, changed: bool = False) -> Iterator[None]:
        """Context in which the weights are on the device; the weights of an offloaded model are copied there, also on a
        CPU.

        Args:
            changed: the block changes the weights, so offloaded ones are copied back.
        """
        if not self.settings.offload:
            yield
            return
        host = [parameter.data for parameter in self.parameters]
        for parameter, kept in zip(self.parameters, host, strict=True):
            parameter.data = torch.empty_like(kept, device=self.device).copy_(kept, non_blocking=True)
        try:
            yield
        finally:
            for parameter, kept in zip(self.parameters, host, strict=True):
                if changed:
                    kept.copy_(parameter.data)
                parameter.data = kept

    @contextmanager
    def as_saved(self, loading: bool = False) -> Iterator[None]:
        """Context in which the chunks have the weights that a checkpoint contains: on the device, in fp32 if there is
        an average.

        Args:
            loading: the block sets the weights.
        """
        if not self.averages_in_fp32:
            with self.on_device(changed=loading):
                yield
            return
        self.start_average()
        assert self.average is not None
        weights = [parameter.data for parameter in self.parameters]
        for parameter, average in zip(self.parameters, self.average, strict=True):
            parameter.data = average.to(self.device)
        try:
            yield
        finally:
            for parameter, average, kept in zip(self.parameters, self.average, weights, strict=True):
                if loading:
                    average.copy_(parameter.data)
                    kept.copy_(average)
                parameter.data = kept

    def start_average(self) -> None:
        """Start the average, if there is one, with the current weights."""
        if self.averages_in_fp32 and self.average is None:
            self.average = [parameter.detach().float() for parameter in self.parameters]

    def copy_policy(self, policy: Sequence[Any]) -> None:
        """Copy the weights of the policy's chunks, whose parameters must be synchronized."""
        with torch.no_grad():
            for target, source in zip(self.chunks, policy, strict=True):
                bare_model(target).load_state_dict(bare_model(source).state_dict())
        self.average = None

    def follow(self, policy: Sequence[Any], iteration: int) -> None:
        """Copy or average the policy, if that is due after this iteration. Collective.

        Args:
            policy: the trained chunks of the same architecture.
            iteration: number of steps taken.
        """
        interval, decay = self.settings.update_interval, self.settings.ema_decay
        if interval is None or iteration % interval:
            return
        synchronize_parameters(policy, bool(self.config.ddp.overlap_param_gather))
        if decay is None:
            self.copy_policy(policy)
        else:
            self._average(policy, decay)

    @torch.no_grad()
    def _average(self, policy: Sequence[Any], decay: float) -> None:
        """Set each parameter to decay * average + (1 - decay) * policy, computed on the device of the weights; copy the
        buffers."""
        self.start_average()
        sources = [parameter for chunk in policy for parameter in bare_model(chunk).parameters()]
        averages = self.average or [parameter.data for parameter in self.parameters]
        for average, target, source in zip(averages, self.parameters, sources, strict=True):
            average.mul_(decay).add_(source.detach().to(average), alpha=1 - decay)
            if self.average is not None:
                target.copy_(average)
        for target_chunk, source_chunk in zip(self.chunks, policy, strict=True):
            of_policy = dict(bare_model(source_chunk).named_buffers())  # also what its routers count, for metrics
            for name, buffer in bare_model(target_chunk).named_buffers():
                buffer.copy_(of_policy[name])


@dataclass
class BaseOfPolicy(ReferenceModel):
    """The policy without its adapter, or with a frozen one instead: the policy's chunks in evaluation mode."""

    policy: Sequence[Any] = ()
    """The policy's chunks with their wrappers."""
    adapter: str | None = None
    """Name of the frozen adapter."""

    @property
    def stays_on_device(self) -> bool:
        """False: outside `on_device` the chunks are the policy."""
        return False

    @contextmanager
    def on_device(self, changed: bool = False) -> Iterator[None]:
        """Context in which the chunks compute the reference."""
        from megatron_wrap.nn.adapters.lora import only_adapter

        synchronize_parameters(self.policy, bool(self.config.ddp.overlap_param_gather))
        trained = [chunk.training for chunk in self.chunks]
        for chunk in self.chunks:
            chunk.eval()
        try:
            with only_adapter(self.chunks, self.adapter):
                yield
        finally:
            for chunk, was_training in zip(self.chunks, trained, strict=True):
                chunk.train(was_training)


def with_reference_outputs(
    reference: ReferenceModel, flow: MegatronWrapTrainingFlowBase, schedule: PipelineSchedule, local: list[MicroBatch]
) -> list[MicroBatch]:
    """Run the reference model forward over all micro-batches, without a graph, and add the outputs of the flow's
    `calculate_reference_outputs` to their loss inputs as `reference_NAME` (or `teacher_NAME`), on the last pipeline
    stage. Collective over the replica.

    Args:
        local: from `Localization.localize`; all with the same number of sequences.

    Raises:
        FlowError: the loss inputs already contain such a name; or an output is the logits of a reference model with
            another number of rows than the policy.
    """
    models = reference.config.models

    def compute(micro_batch: MicroBatch, output: Tensor) -> dict[str, Tensor]:
        named = flow.calculate_reference_outputs(micro_batch.loss_inputs, output)
        if not reference.has_policy_columns:
            _refuse_logits(flow, named, output)
        # the logits of a teacher are computed where the loss uses them, if its weights are still there
        kept = named if reference.stays_on_device else {name: whole_logits(value) for name, value in named.items()}
        return {f"{models.role}_{name}": tensor for name, tensor in kept.items()}

    left_out = {ROUTED_EXPERTS}  # it has its own routing
    if reference.config.arch.num_experts is None:  # it does not take the mask of a policy with experts
        left_out.add(PADDING_MASK)
    inputs = [micro_batch.without_model_inputs(left_out) for micro_batch in local]
    with reference.on_device():
        outputs = schedule.forward(reference.chunks, inputs, compute)
    if not outputs:  # not the last pipeline stage
        return local
    return [_with_loss_inputs(micro_batch, named, models) for micro_batch, named in zip(local, outputs, strict=True)]


def _refuse_logits(flow: MegatronWrapTrainingFlowBase, named: dict[str, Tensor], output: Tensor) -> None:
    for name, value in named.items():
        if output.shape[-1] > 1 and value.shape[-1:] == output.shape[-1:] and value.dim() == output.dim():
            raise FlowError(
                f"{type(flow).__name__}: the output {name!r} of the reference model is logits, and its vocabulary has "
                "another size than the policy's; give the model as megatron_wrap.models.teacher, whose logits are over "
                "the rows that both have"
            )


def _with_loss_inputs(micro_batch: MicroBatch, outputs: dict[str, Tensor], models: ModelsConfig) -> MicroBatch:
    both = sorted(outputs.keys() & micro_batch.loss_inputs.keys())
    if both:
        raise FlowError(
            f"the samples contain {', '.join(both)}, which the model of {models.path} computes too; set {models.path} "
            "to null to use the samples' values, or remove them from the samples"
        )
    return replace(micro_batch, loss_inputs={**micro_batch.loss_inputs, **outputs})

"""The contract between an algorithm (a flow) and the engine. A flow imports torch and nothing of Megatron-Core.

The law of the loss:

    objective = sum over terms k of coefficient_k * (sum of loss_sum_k) / (sum of weight_k)

with both sums over all micro-batches, data-parallel and context-parallel ranks of one optimizer step. A flow gives
`weight_k` on the whole collated micro-batch, before any split, and `loss_sum_k` on this context-parallel rank's part
of it. No parallel size and no number of micro-batches ever appears in a flow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from megatron_wrap.errors import FlowError
from megatron_wrap.metrics.metric import Metric

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class LossOutput:
    """What `calculate_loss` returns."""

    loss_sum: Tensor | dict[str, Tensor]
    """Scalar: this rank's share of the sum; or one scalar for each named term of `get_loss_weight`."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Further numbers to report, detached."""


@dataclass(frozen=True)
class FlowContext:
    """What the framework hands to a flow."""

    micro_batch_size: int
    """Samples that `collate_data_micro_batch` takes, at most: the last batch of an evaluation may hold fewer."""
    seq_length: int
    """Longest sequence a flow may collate, tokens."""
    vocab_size: int
    """Entries of the vocabulary, without padding."""
    cp_size: int
    """Context-parallel size, for `sequence_mean`."""
    sum_on_cp_group: Callable[[Tensor], Tensor]
    """All-reduce (sum) over the context-parallel group with its true adjoint."""
    average_across_dp_ranks: Callable[[Tensor], Tensor]
    """Mean over the data-parallel group, detached."""
    tokenizer: PreTrainedTokenizerBase | None
    """The tokenizer of the run, None where there is none."""
    gather_on_cp_group: Callable[[Tensor, int], Tensor] = lambda part, dim: part
    """(part, dim) -> the whole sequence from the context-parallel ranks' parts, with its true adjoint; default: that of
    one rank."""


@dataclass(frozen=True, kw_only=True)
class MegatronWrapFlowConfig:
    """Base of the dataclass `Config` that a flow declares: one field for each key of `megatron_wrap.flow`, with type,
    default (none: the YAML must give it) and a docstring. `self.flow_config` is then an instance.

        @dataclass(frozen=True, kw_only=True)
        class Config(MegatronWrapFlowConfig):
            gamma: float = 2.0
    """

    flow_key: str
    """Registered flow, or my_package.my_module:MyFlow."""


class FlowOptions:
    """The keys of a flow that declares no `Config`, as the tree's file has them: `self.flow_config.KEY`."""

    def __init__(self, flow_key: str, options: Mapping[str, Any]) -> None:
        self.flow_key = flow_key
        self.__dict__.update(options)

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(sorted(vars(self)))
        raise FlowError(f"the flow asks for its configuration key {name!r}, but megatron_wrap.flow has only: {known}")


class MegatronWrapTrainingFlowBase(ABC):
    """Base of all flows: how samples become tensors and what the loss is."""

    Config: ClassVar[type[MegatronWrapFlowConfig] | None] = None
    """The flow's own keys; None: what the tree's file of the flow gives, unchecked beyond its types."""

    def __init__(self, flow_config: Any, context: FlowContext) -> None:
        self.flow_config = flow_config
        """An instance of `Config`, or `FlowOptions` where the flow declares none."""
        self.context = context
        self.micro_batch_size = context.micro_batch_size
        self.seq_length = context.seq_length
        self.vocab_size = context.vocab_size

    # ---- what a flow says ----

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """Field -> index of its sequence dimension, for model inputs, loss inputs and outputs alike. Listed fields
        are padded and split over context-parallel ranks; a field not listed is copied to every one."""
        return {
            "input_ids": 1,
            "position_ids": 1,
            "attention_mask": 1,
            "labels": 1,
            "loss_mask": 1,
        }

    def get_pad_values(self) -> dict[str, float]:
        """Field -> the value it is padded with where the layout needs a longer sequence; a field not listed gets 0,
        so that a padded `loss_mask` counts nothing."""
        return {}

    @abstractmethod
    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Take `micro_batch_size` samples with `next(iterator)` and make (model_forward_inputs, loss_inputs): CPU
        tensors of full length, [B, S] each. No rank, no device, no padding to parallel sizes.

        Every process of a replica collates the same samples with equally seeded random generators.
        """

    def get_loss_weight(self, loss_inputs: Mapping[str, Tensor]) -> float | dict[str, float] | None:
        """What the loss is a mean over, counted on the full collated micro-batch: tokens, pairs, sums of sample
        weights; a dictionary for several terms. Default: the number of tokens with `loss_mask`; without one None,
        which suits the older two-value return alone."""
        return float(loss_inputs["loss_mask"].sum()) if "loss_mask" in loss_inputs else None

    def get_loss_coefficients(self) -> dict[str, float]:
        """Coefficient of each named term; a term not listed has 1."""
        return {}

    @abstractmethod
    def calculate_loss(
        self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor
    ) -> LossOutput | tuple[Tensor, Mapping[str, Metric]]:
        """On the last pipeline stage, with this context-parallel rank's part of the sequence; logits are
        [B, S/cp, V/tp]. The older two-value return (loss, metrics) is the mean over this micro-batch, complete and
        equal on every context-parallel rank; it depends on how the batch is cut into micro-batches."""

    def calculate_outputs(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> dict[str, Tensor]:
        """Forward only, for `wrap.forward` and for a reference model: named tensors with one row for each sample of
        the micro-batch; one with a sequence dimension is named in `get_fields_and_seqdims`.

        With `megatron_wrap.models.reference` the reference model's outputs are among the loss inputs of
        `calculate_loss`, `reference_` before their names, and like them this context-parallel rank's part.
        """
        raise FlowError(
            f"{type(self).__name__} does not define calculate_outputs, which wrap.forward and a reference model need"
        )

    def validate_model_forward_inputs(self, model_forward_inputs: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Raise `FlowError` when the inputs are not what the model takes; any are right unless a flow says so."""

    # ---- helpers ----

    def token_mean(self, per_token: Tensor, mask: Tensor) -> Tensor:
        """This rank's share of a mean over tokens: sum of per_token * mask, both [B, S/cp], where mask is 0 the
        value does not matter (it may be inf or nan)."""
        return torch.where(mask != 0, per_token * mask, torch.zeros_like(per_token)).sum()

    def sequence_mean(self, per_sequence: Tensor) -> Tensor:
        """This rank's share of a mean over sequences: per_sequence [B] is complete and equal on every
        context-parallel rank."""
        return per_sequence.sum() / self.context.cp_size

    def sum_on_cp_group(self, partial: Tensor) -> Tensor:
        """Sum over the context-parallel group; its backward is the true adjoint."""
        return self.context.sum_on_cp_group(partial)

    def gather_on_cp_group(self, part: Tensor, dim: int = 1) -> Tensor:
        """The whole sequence in its order, [B, S, ...], from this rank's part [B, S/cp, ...] of it along `dim`, on
        every context-parallel rank; its backward is the true adjoint. For a loss that looks along a sequence: a sum of
        what is to come, a neighbour, a sort. S includes padding. Share the result with `sequence_mean`."""
        return self.context.gather_on_cp_group(part, dim)

    def average_loss_across_dp_ranks(self, value: Tensor) -> Tensor:
        """Mean of a metric over data-parallel ranks, detached, as older flows used it."""
        return self.context.average_across_dp_ranks(value)

    def __str__(self) -> str:
        return (
            f"{type(self).__name__}(flow_key={self.flow_config.flow_key}, seq_length={self.seq_length}, "
            f"micro_batch_size={self.micro_batch_size})"
        )

"""The contract between an algorithm (a flow) and the engine. A flow imports torch, but not Megatron-Core.

Loss normalization:

    objective = sum over terms k of coefficient_k * (sum of loss_sum_k) / (sum of weight_k)

with both sums over all micro-batches, data-parallel and context-parallel ranks of one optimizer step. A flow counts
`weight_k` on the full collated micro-batch, before any split, and `loss_sum_k` on this context-parallel rank's shard of
it. A flow never uses a parallel size or the number of micro-batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from megatron_wrap.errors import FlowError
from megatron_wrap.metrics.metric import Metric

STEP_PREFIX = "step_"
"""Prefix of the statistics of the whole step among the loss inputs."""
SEQUENCE_LENGTHS = "sequence_lengths"
"""Loss input of a packed micro-batch: [N + 1] int64, the numbers of this context-parallel rank's tokens in each of the
N sequences and in the row's padding, in the order of the row. An unpacked micro-batch does not have it."""

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_wrap.flow.contract.prediction import MultiTokenPrediction
    from megatron_wrap.flow.contract.routing import RoutingShape


@dataclass(frozen=True)
class LossOutput:
    """Return value of `calculate_loss`."""

    loss_sum: Tensor | dict[str, Tensor]
    """Scalar, this rank's share of the sum; or one scalar for each named term of `get_loss_weight`."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics to report, detached."""


class Collation:
    """The engine's record of the collation in progress; a flow reads it as `micro_batch_size`."""

    def __init__(self) -> None:
        self.num_samples: int | None = None
        """Samples of the micro-batch that is being collated; None between collations."""

    @contextmanager
    def of(self, num_samples: int) -> Iterator[None]:
        """Set `num_samples` within a block that collates a micro-batch of as many samples."""
        previous, self.num_samples = self.num_samples, num_samples
        try:
            yield
        finally:
            self.num_samples = previous


@dataclass(frozen=True)
class FlowContext:
    """Values and collectives that the framework provides to a flow."""

    micro_batch_size: int
    """Maximum number of samples of a micro-batch; the last micro-batch of an evaluation may be smaller."""
    seq_length: int
    """Longest sequence that a flow may collate, in tokens."""
    vocab_size: int
    """Vocabulary size of the model, without padding."""
    cp_size: int
    """Context-parallel size, for `sequence_mean`."""
    sum_on_cp_group: Callable[[Tensor], Tensor]
    """All-reduce (sum) over the context-parallel group; its backward is the true adjoint."""
    average_across_dp_ranks: Callable[[Tensor], Tensor]
    """Mean over the data-parallel group, detached."""
    tokenizer: PreTrainedTokenizerBase | None
    """The run's tokenizer; None if there is none."""
    gather_on_cp_group: Callable[[Tensor, int], Tensor] = lambda part, dim: part
    """(shard, dim) -> full sequence, gathered over the context-parallel group; its backward is the true adjoint. The
    default is for one rank."""
    sources: tuple[str, ...] = ()
    """Names of the sources of `megatron_wrap.data.train`, in their order."""
    collation: Collation = field(default_factory=Collation)
    """The collation in progress."""
    routing: RoutingShape | None = None
    """Layers and experts of a recorded routing; None without `router_replay`."""
    prediction: MultiTokenPrediction | None = None
    """Layers for multi-token prediction, whose losses are added to the flow's; None without `mtp_num_layers`."""
    common_vocab_size: int | None = None
    """Entries of the vocabulary that the model and its reference or teacher model have in common, if their numbers of
    entries differ; None: they are equal, or there is no such model."""

    @property
    def num_token_ids(self) -> int:
        """Number of token ids that every model of the run has; all token ids of the run are below it."""
        return self.vocab_size if self.common_vocab_size is None else self.common_vocab_size


@dataclass(frozen=True, kw_only=True)
class MegatronWrapFlowConfig:
    """Base of the dataclass `Config` that a flow declares: one field for each key of `megatron_wrap.flow`, with type,
    default (without one the YAML must set the key) and docstring. `self.flow_config` is an instance of it.

        @dataclass(frozen=True, kw_only=True)
        class Config(MegatronWrapFlowConfig):
            gamma: float = 2.0
    """

    flow_key: str
    """Registered flow, or my_package.my_module:MyFlow."""
    packing: bool = False
    """Concatenate the sequences of a micro-batch to one row without padding; attention and positions stay within each
    sequence."""


class FlowOptions:
    """The options of a flow without a `Config`, as in its file of the configuration tree: `self.flow_config.KEY`."""

    def __init__(self, flow_key: str, options: Mapping[str, Any], packing: bool = False) -> None:
        self.flow_key = flow_key
        self.packing = packing
        self.__dict__.update(options)

    def __getattr__(self, name: str) -> Any:
        known = ", ".join(sorted(vars(self)))
        raise FlowError(
            f"the flow reads its configuration key {name!r}, but megatron_wrap.flow contains only {known}; add the key "
            "there"
        )


class MegatronWrapTrainingFlowBase(ABC):
    """Base of all flows: defines how samples are collated and how the loss is computed."""

    Config: ClassVar[type[MegatronWrapFlowConfig] | None] = None
    """The flow's options; None: those of its file in the configuration tree, of which only types are validated."""

    supports_packing: ClassVar[bool] = False
    """Whether `calculate_loss` and `calculate_outputs` are also correct if all sequences of a micro-batch are in one
    row (`megatron_wrap.flow.packing`): [1, S/cp] instead of [B, S/cp]. A mean over tokens is correct; a sum over the
    tokens of each sequence is correct with `sum_per_sequence`. A declaration holds for the methods of its class and of
    the classes above it; a class that overrides one of the two methods declares it again."""

    supports_multi_token_prediction: ClassVar[bool] = False
    """Whether the losses of layers for multi-token prediction (`mtp_num_layers`) can be added: the loss is that of the
    next token, with `input_ids`, `labels` and `loss_mask` [B, S] among the collated fields. The flow itself does not
    compute them."""

    reports_perplexity: ClassVar[bool] = False
    """Whether the objective is the mean negative log-likelihood of a token, so that evaluations report its exponential,
    `perplexity`; that of the metric `nll_loss`, where the flow reports it."""

    token_id_fields: ClassVar[Sequence[str]] = ("input_ids", "labels")
    """Collated fields [B, S, ...] of token ids, which the engine compares with the vocabulary at each collation, on the
    CPU. A flow with further ones lists them as well: `(*Base.token_id_fields, "targets")`. A negative label is accepted
    where `loss_mask` is 0, and -100 everywhere if there is no `loss_mask` of its shape."""

    console_metrics: ClassVar[Sequence[str]] = ("*",)
    """Patterns of the flow's metrics that the console shows, the most interesting ones first; a line that is too long
    omits the last ones. `megatron_wrap.logger.console_metrics` replaces them."""

    step_values_from: Literal["inputs", "outputs"] | None = None
    """Source of the statistics of the whole step, for a loss that is not a sum over micro-batches: "inputs"
    (`calculate_step_values` reads the loss inputs), "outputs" (it also gets the model's output, from a forward pass
    without a graph and without dropout before the step) or None (no statistics). Set it in the class, or in `__init__`
    if it depends on the options."""

    def __init__(self, flow_config: Any, context: FlowContext) -> None:
        self.flow_config = flow_config
        """Options of the flow: an instance of `Config`, or `FlowOptions` if the flow declares none."""
        self.context = context
        self.seq_length = context.seq_length
        self.vocab_size = context.vocab_size

    @property
    def micro_batch_size(self) -> int:
        """Samples of the micro-batch that is being collated; between collations, the maximum."""
        collated = self.context.collation.num_samples
        return self.context.micro_batch_size if collated is None else collated

    # ---- methods that a flow defines ----

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """Field -> index of its sequence dimension, for model inputs, loss inputs and outputs. Listed fields are padded
        and split over context-parallel ranks; other fields are copied to every rank."""
        return {
            "input_ids": 1,
            "position_ids": 1,
            "attention_mask": 1,
            "labels": 1,
            "loss_mask": 1,
        }

    def get_pad_values(self) -> dict[str, float]:
        """Field -> padding value, used if the layout needs a longer sequence. The default is 0, so `loss_mask` is 0 on
        padding."""
        return {}

    def prepare_sample(self, sample: Any) -> Any:
        """Encode a sample: the part of collation that does not depend on other samples, such as tokenization. Called
        once for each sample, perhaps in another process, before its step, or when a tokenized cache is written;
        `collate_data_micro_batch` receives the result. Must be deterministic. Default: the sample."""
        return sample

    def get_sample_lengths(self, sample: Any) -> Sequence[int] | None:
        """Tokens of each sequence that a prepared sample collates to, after truncation. Default: None; where packing or
        a token budget needs the numbers, the engine then collates the sample alone to count them."""
        return None

    @abstractmethod
    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Take `micro_batch_size` prepared samples with `next(iterator)` and return (model_forward_inputs,
        loss_inputs): CPU tensors of full sequences, [B, S] each, not padded to a parallel size. The engine packs them.

        Every process of a replica collates the same samples, with equally seeded random generators.
        """

    def get_loss_weight(self, loss_inputs: Mapping[str, Tensor]) -> float | dict[str, float] | None:
        """The weight of this micro-batch in the mean of the loss, counted on the full collated micro-batch: a number of
        tokens, of pairs, a sum of sample weights; a dictionary for several terms. Default: the sum of `loss_mask`, or
        None without a `loss_mask`, which is valid only with the older two-value return."""
        return float(loss_inputs["loss_mask"].sum()) if "loss_mask" in loss_inputs else None

    def has_loss(self, loss_inputs: Mapping[str, Tensor]) -> bool:
        """Whether the loss of this micro-batch can have a gradient; default: True, so only its weight counts. A flow
        whose weight counts sequences or is a constant also defines this. A step in which no micro-batch has a loss is
        skipped, like one of weight 0: the momentum and decay of an update would change the weights even without
        gradients."""
        return True

    def get_loss_coefficients(self) -> dict[str, float]:
        """Coefficient of each named term; the default is 1."""
        return {}

    @abstractmethod
    def calculate_loss(
        self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor
    ) -> LossOutput | tuple[Tensor, Mapping[str, Metric]]:
        """This rank's share of the loss sum, on the last pipeline stage. Fields are this context-parallel rank's
        shards, logits are [B, S/cp, V/tp]. The older two-value return (loss, metrics) is the mean over this
        micro-batch, complete and equal on every context-parallel rank; it depends on the micro-batch size."""

    def calculate_outputs(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> dict[str, Tensor]:
        """Named tensors with one row for each sample of the micro-batch, without a graph, for `wrap.forward` and for a
        reference model. An output with a sequence dimension must be listed in `get_fields_and_seqdims`.

        With `megatron_wrap.models.reference` the loss inputs of `calculate_loss` contain the reference model's outputs
        with the prefix `reference_`, as this context-parallel rank's shards.
        """
        raise FlowError(
            f"{type(self).__name__} does not define calculate_outputs, which wrap.forward and a reference model need; "
            "define it"
        )

    def calculate_reference_outputs(
        self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor
    ) -> dict[str, Tensor]:
        """Named tensors that the forward pass of the reference or teacher model over this micro-batch adds to the loss
        inputs, as this rank's shards, without a graph. Default: `calculate_outputs`, which `precompute` stores."""
        return self.calculate_outputs(loss_inputs, model_forward_output)

    def get_step_samples(self, samples: Sequence[Any]) -> Sequence[Any] | None:
        """The prepared samples that `calculate_step_values` gets, collated like others: as many as the batch contains,
        in its order; default: None, those of the batch. Called on every rank with all prepared samples of the global
        batch in order, so that a sample may use its neighbor. Used only with `step_values_from`."""
        return None

    def get_samples_to_precompute(self, samples: Sequence[Any]) -> Sequence[tuple[Any, Mapping[str, Tensor]]] | None:
        """For each of some prepared samples, in their order, another prepared sample whose outputs `megatron-wrap
        precompute` stores as `reference_step_NAME` of the sample, and further tensors to store as
        `reference_step_NAME`. In training the sample contains both, for `get_step_samples`. Default: None, only the
        outputs of the samples themselves."""
        return None

    def calculate_step_values(
        self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor | None
    ) -> dict[str, Tensor]:
        """Named rows [n] of a micro-batch of n samples, or [n, K] with one K for the whole step, for the statistics of
        the whole step; without a graph, complete and equal on every context-parallel rank. Called before the step on
        the last pipeline stage; the loss inputs contain the reference model's outputs. See `step_values_from`.

        Args:
            model_forward_output: [B, S/cp, V/tp]; None with `step_values_from = "inputs"`.
        """
        raise FlowError(
            f"{type(self).__name__} sets step_values_from = {self.step_values_from!r} and does not define "
            "calculate_step_values; define it, or set step_values_from to None"
        )

    def get_sample_facts(self, sample: Any) -> Any:
        """Metadata of a prepared sample that is known without the model, for `reduce_sample_facts`: a small value that
        can be pickled, such as the sample's keys and the name of its group. Default: None. Used only with
        `step_values_from`."""
        return None

    def reduce_sample_facts(self, facts: Sequence[Any]) -> dict[str, Tensor]:
        """Named CPU tensors [N], which are added to the `values` of `reduce_step_values`. Called on every rank before
        the forward pass. Default: none.

        Args:
            facts: metadata of all N samples of the global batch in its order, equal on every rank.

        Raises:
            DataError: samples contradict each other.
        """
        return {}

    def reduce_step_values(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Statistics of the whole step. The loss inputs of every micro-batch contain each result as `step_NAME`, and
        `step_indices` [n] int64, the indices of its samples in the global batch. Default: `values`.

        Args:
            values: rows of `calculate_step_values` of all micro-batches and replicas, fp32 [N] or [N, K] in the order
                of the global batch's N samples, and the tensors of `reduce_sample_facts`; equal on every rank.
        """
        return values

    def validate_model_forward_inputs(self, model_forward_inputs: Mapping[str, Tensor]) -> None:  # noqa: B027
        """Raise `FlowError` if the model cannot take these inputs; the default accepts all inputs."""

    # ---- helpers ----

    def token_mean(self, per_token: Tensor, mask: Tensor) -> Tensor:
        """This rank's share of an average over tokens: the sum of per_token * mask, both [B, S/cp]. Values where mask
        is 0 are ignored, even inf and nan."""
        return torch.where(mask != 0, per_token * mask, torch.zeros_like(per_token)).sum()

    def sequence_mean(self, per_sequence: Tensor) -> Tensor:
        """This rank's share of an average over sequences; per_sequence [B] must be complete and equal on every
        context-parallel rank."""
        return per_sequence.sum() / self.context.cp_size

    def sum_per_sequence(self, per_token: Tensor, loss_inputs: Mapping[str, Tensor]) -> Tensor:
        """The sum over the tokens of each sequence, in packed and unpacked micro-batches.

        Args:
            per_token: [B, S/cp], or [1, S/cp] if packed; this rank's shard, 0 on tokens that do not count.
            loss_inputs: loss inputs of the micro-batch; they contain the boundaries if it is packed.

        Returns:
            [B], in the order of collation; complete and equal on every context-parallel rank, with the true gradient.
        """
        lengths = loss_inputs.get(SEQUENCE_LENGTHS)
        if lengths is None:
            return self.sum_on_cp_group(per_token.sum(dim=1))
        sums = torch.segment_reduce(per_token.reshape(-1).float(), "sum", lengths=lengths, unsafe=True)
        return self.sum_on_cp_group(sums[:-1])

    def sum_on_cp_group(self, partial: Tensor) -> Tensor:
        """Sum over the context-parallel group; its backward is the true adjoint."""
        return self.context.sum_on_cp_group(partial)

    def gather_on_cp_group(self, part: Tensor, dim: int = 1) -> Tensor:
        """Gather the full sequence [B, S, ...] in its order, along `dim`, from the context-parallel ranks' shards
        [B, S/cp, ...]; its backward is the true adjoint. For a loss that combines tokens of a sequence: a suffix sum, a
        difference of neighbors, a sort. S includes padding. Reduce the result with `sequence_mean`.

        Raises:
            FlowError: rows are packed, so the sequences of a row would be mixed.
        """
        if self.flow_config.packing:
            raise FlowError(
                f"{type(self).__name__} calls gather_on_cp_group, which has no sequence boundaries, with "
                "megatron_wrap.flow.packing: true; use sum_per_sequence, or delete supports_packing from the class and "
                "set packing: false"
            )
        return self.context.gather_on_cp_group(part, dim)

    def average_loss_across_dp_ranks(self, value: Tensor) -> Tensor:
        """Mean of a metric over data-parallel ranks, detached; for older flows."""
        return self.context.average_across_dp_ranks(value)

    def __str__(self) -> str:
        return (
            f"{type(self).__name__}(flow_key={self.flow_config.flow_key}, seq_length={self.seq_length}, "
            f"micro_batch_size={self.micro_batch_size})"
        )

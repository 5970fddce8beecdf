"""Megatron-Core's GPTModel, with logits computed as [B, S, V/tp] and with a scalar head.

Megatron-Core 0.19 deprecates GPTModel in favor of HybridModel, so this is the only module that imports it (docs/
architecture.md describes what a change would need). Import it only after the platform is installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.multi_token_prediction import tie_word_embeddings_state_dict
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor

from megatron_wrap.model.random_numbers import EmbeddingNoise, noise_added
from megatron_wrap.nn.attention.packed_sequences import PackedSequences, rotary_by_position
from megatron_wrap.nn.attention.self_attention import LongRotaryEmbedding, RotaryByWindow
from megatron_wrap.nn.kernels.weight_gradients import WeightGradients
from megatron_wrap.nn.multi_token_prediction import PredictionBlock, TiedEmbedding, mark_copied_embedding
from megatron_wrap.ops.deferred_logits import OutputProjection, add_weight_gradient, deferred_logits, is_deferred


@dataclass(frozen=True)
class PredictionLayers:
    """The layers for multi-token prediction of a model."""

    num_layers: int
    layer_spec: Any
    """Spec of the transformer layer in each of them."""
    norm: type
    trained: bool


class BatchFirstGPTModel(GPTModel):
    """A GPTModel whose logits are computed as [B, S, V/tp]; unchanged with labels.

    Without labels, GPTModel transposes and copies the logits (megatron/core/models/gpt/gpt_model.py, `_postprocess`)
    and in the backward their gradient, the largest tensors of the step. Transposing the hidden states before the output
    layer moves V / hidden_size times less memory.

    Rotary embeddings restart with each sequence of a packed row. `rotary_factors` are LongRoPE's; `window_rotary_base`
    is the base of the rotary embeddings in layers with a window. The embedding's output is multiplied by
    `embedding_multiplier`, and logits are capped by `final_logit_softcapping`. With an inference context it returns the
    logits of the last position only, [B, 1, V/tp]. With `prediction` the last chunk has layers for multi-token
    prediction (`mtp_block`). If these are trained, it also has a copy of the embedding, unless it has the embedding
    itself; with tied embeddings the copy is the weight of the output layer.
    """

    rotary_pos_emb: Any

    def __init__(
        self,
        rotary_factors: Sequence[float] | None = None,
        window_rotary_base: float | None = None,
        embedding_multiplier: float | None = None,
        final_logit_softcapping: float | None = None,
        defers_logits: bool = False,
        prediction: PredictionLayers | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.mtp_block: PredictionBlock | None = None
        self._copies_embedding = False
        self._tied_embedding: tuple[TiedEmbedding, ...] = ()
        if prediction is not None:
            self._add_prediction(prediction, arguments)
        self.defers_logits = defers_logits and self.post_process
        """Whether the output without an inference context is `DeferredLogits`."""
        if self.post_process:
            replaced: ColumnParallelLinear = self.output_layer  # type: ignore[has-type]
            self.output_layer = OutputLayer(replaced, self, final_logit_softcapping)
        if embedding_multiplier is not None:
            has_embedding = self.pre_process or self._copies_embedding
            own = (self.embedding,) if has_embedding else ()  # type: ignore[has-type]
            for embedding in (*own, *self._tied_embedding):
                embedding.word_embeddings.register_forward_hook(_multiplied(embedding_multiplier))
        if final_logit_softcapping is not None and self.post_process:
            self.output_layer.register_forward_hook(_capped(final_logit_softcapping))
        rotary: dict[str, Any] = {
            "kv_channels": self.config.kv_channels,
            "rotary_percent": arguments["rotary_percent"],
            "rotary_interleaved": self.config.rotary_interleaved,
            "use_cpu_initialization": self.config.use_cpu_initialization,
            "cp_group": self.pg_collection.cp,
        }
        if rotary_factors is not None:
            base = arguments["rotary_base"]
            self.rotary_pos_emb = LongRotaryEmbedding(factors=rotary_factors, rotary_base=base, **rotary)
        if window_rotary_base is not None:
            window = RotaryEmbedding(rotary_base=window_rotary_base, **rotary)
            self.rotary_pos_emb = RotaryByWindow(self.rotary_pos_emb, window)

    def _add_prediction(self, prediction: PredictionLayers, arguments: Mapping[str, Any]) -> None:
        """Build the layers and the copy of the embedding on the last chunk."""
        if self.post_process:
            self.mtp_block = PredictionBlock(
                self.config,
                prediction.layer_spec,
                prediction.norm,
                prediction.num_layers,
                arguments["vp_stage"],
                self.pg_collection,
            )
        if not prediction.trained or self.pre_process == self.post_process:
            return
        sizes = {
            "config": self.config,
            "vocab_size": self.vocab_size,
            "max_sequence_length": self.max_sequence_length,
            "position_embedding_type": arguments["position_embedding_type"],
            "tp_group": self.pg_collection.tp,
        }
        if self.share_embeddings_and_output_weights:  # Megatron-Core adds the gradients of both stages
            if self.post_process:
                # in a tuple, so that it is no module of the model: its weight has a name and a checkpoint entry already
                self._tied_embedding = (TiedEmbedding(self.output_layer.weight, **sizes),)
            return
        if self.post_process:
            self.embedding = LanguageModelEmbedding(**sizes)
        self._copies_embedding = True
        mark_copied_embedding(self.embedding.word_embeddings.weight, is_copy=self.post_process)

    @property
    def copied_embedding(self) -> torch.nn.Parameter | None:
        """The embedding's weight, if both the first and the last pipeline stage have it for multi-token prediction; the
        gradient of each is then the sum over both. None otherwise."""
        return self.embedding.word_embeddings.weight if self._copies_embedding else None

    def forward(
        self,
        *arguments: Any,
        embedding_noise: EmbeddingNoise | None = None,
        mtp_input_ids: Tensor | None = None,
        **named: Any,
    ) -> Any:
        """See the base class; `embedding_noise` is added to the word embeddings in training mode.

        Args:
            mtp_input_ids: [B, D, S/cp], the tokens ahead of each position for each layer of multi-token prediction;
                None: these layers are not computed.

        Returns:
            The base class's result; with `mtp_input_ids` on the last chunk a tuple: the logits, then those of each
            layer for multi-token prediction, each [B, S/cp, V/tp].
        """
        noise: Any = nullcontext()
        if embedding_noise is not None and self.training and self.pre_process:
            noise = noise_added(self.embedding.word_embeddings, embedding_noise)
        if mtp_input_ids is not None and self.mtp_block is not None:
            return self._with_predictions(mtp_input_ids, noise, **named)
        with noise:
            return super().forward(*arguments, **named)

    def _with_predictions(
        self,
        mtp_input_ids: Tensor,
        noise: AbstractContextManager[None],
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        packed_seq_params: PackedSequences | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """The steps of `GPTModel.forward` in training, with the layers for multi-token prediction after the decoder.
        The noise is added to the decoder's embeddings alone."""
        with noise:
            prepared = self._preprocess(
                input_ids=input_ids,
                position_ids=position_ids,
                packed_seq_params=packed_seq_params,
                padding_mask=padding_mask,
            )
        inputs = {
            **dict(zip(("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"), prepared[1:4], strict=True)),
            "attention_mask": attention_mask,
            "packed_seq_params": packed_seq_params,
            "padding_mask": prepared[5],
        }
        unused = dict.fromkeys(("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"))

        def logits(states: Tensor) -> Tensor:
            return self._postprocess(hidden_states=states, input_ids=input_ids, position_ids=position_ids, **unused)

        hidden_states = self.decoder(hidden_states=prepared[0], **inputs)
        assert self.mtp_block is not None
        of_next = logits(hidden_states)  # first: it waits for the gathered weight, which a tied embedding shares
        embedding = self._tied_embedding[0].train(self.training) if self._tied_embedding else self.embedding
        predicted = self.mtp_block(mtp_input_ids, position_ids, hidden_states, embedding, **inputs)
        return (of_next, *map(logits, predicted))

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """See the base class; a copy of the embedding is one more replica of it."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        if self._copies_embedding and not self.pre_process:
            tie_word_embeddings_state_dict(
                state,
                self.embedding.word_embeddings.weight,
                f"{prefix}embedding.word_embeddings.weight",
                tp_group=self.pg_collection.tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
        return state

    def _preprocess(self, *arguments: Any, packed_seq_params: PackedSequences | None = None, **named: Any) -> Any:
        if packed_seq_params is None:
            return super()._preprocess(*arguments, **named)
        rotary = getattr(self, "rotary_pos_emb", None)
        with rotary_by_position(rotary, packed_seq_params):
            return super()._preprocess(*arguments, packed_seq_params=packed_seq_params, **named)

    def _postprocess(self, hidden_states: Tensor, labels: Tensor | None = None, **inputs: Any) -> Tensor:
        if inputs.get("inference_context") is not None:
            # Generation needs only the last position. Select it here and hide the inference context from
            # `_postprocess`, whose requirements for it differ between Megatron-Core versions.
            inputs["inference_context"] = None
            hidden_states = hidden_states[-1:] if self.post_process else hidden_states
        elif self.defers_logits and labels is None:
            weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
            with self.output_layer.deferring():
                return self.output_layer(hidden_states, weight=weight)[0]
        form: Any = nullcontext()
        if labels is None and self.post_process and isinstance(self.output_layer, OutputLayer):
            form = self.output_layer.batch_first()
        with form:
            return super()._postprocess(hidden_states=hidden_states, labels=labels, **inputs)


def _multiplied(factor: float) -> Callable[..., Tensor]:
    """A forward hook that multiplies the output; the factor is rounded to the output's dtype, as in transformers."""

    def multiply(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
        return output * output.new_tensor(factor)

    return multiply


def _capped(cap: float) -> Callable[..., Any]:
    """A forward hook: logits x become cap * tanh(x / cap)."""

    def limit(_module: Any, _inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        logits, bias = output
        if is_deferred(logits):  # the projection has the cap
            return output
        return cap * torch.tanh(logits / cap), bias

    return limit


class OutputLayer(ColumnParallelLinear):
    """The output layer of a model, in three forms: Megatron-Core's, one whose output is [B, S, V/tp] in memory, or one
    whose matmul is computed where the logits are used. It is called as a module, so that the hooks before its forward
    pass run: they wait for gathered parameters (`overlap_param_gather`).

    Args:
        replaced: the layer whose weight it takes.
        model: the model that contains it.
        softcap: see `OutputProjection`; logits that are not deferred are capped by a hook.
    """

    def __init__(self, replaced: ColumnParallelLinear, model: GPTModel, softcap: float | None) -> None:
        super().__init__(
            model.config.hidden_size,
            model.vocab_size,
            config=model.config,
            init_method=model.config.init_method,
            bias=False,
            gather_output=not model.parallel_output,
            skip_weight_param_allocation=True,
            embedding_activation_buffer=replaced.embedding_activation_buffer,
            grad_output_buffer=replaced.grad_output_buffer,
            tp_group=replaced.tp_group,
        )
        self.weight = replaced.weight
        self.unpadded = self.output_size_per_partition
        """Columns of this rank that are not padding of the vocabulary."""
        self._softcap = softcap
        self._form: Literal["core", "batch first", "deferred"] = "core"
        self._reported: set[str] = set()

    @contextmanager
    def batch_first(self) -> Iterator[None]:
        """Make the output, within the block, a view of a tensor [B, S, V/tp], so that no copy is needed for this form.
        Without effect where Megatron-Core computes the weight's gradient later, from input and gradient in its own
        form."""
        if not self.config.defer_embedding_wgrad_compute:
            self._form = "batch first"
        try:
            yield
        finally:
            self._form = "core"

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Defer the output within the block."""
        self._form = "deferred"
        try:
            yield
        finally:
            self._form = "core"

    def forward(self, input_: Tensor, weight: Tensor | None = None, *arguments: Any, **named: Any) -> Any:
        """Hidden states [S, B, H], or [S/tp, B, H] with sequence parallelism, -> logits [S, B, V/tp], or deferred ones
        [B, S, V/tp]; and None for the bias."""
        if self._form != "deferred":
            return super().forward(input_, weight, *arguments, **named)
        # the gradient is reduced once for all chunks
        if self.sequence_parallel:
            hidden = self._gathered_batch_first(input_)
        else:  # transposed before: Megatron-Core reduces only a contiguous gradient in place (mappings.py, _reduce)
            hidden = copy_to_tensor_model_parallel_region(input_.transpose(0, 1).contiguous(), group=self.tp_group)
        fused = self.gradient_accumulation_fusion and hidden.is_cuda
        add_gradient = WeightGradients.add if fused else add_weight_gradient
        projection = OutputProjection(
            self.weight if weight is None else weight, self.unpadded, add_gradient, self._softcap, self._reported
        )
        return deferred_logits(hidden, projection), None

    def _forward_impl(self, input: Tensor, weight: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if self._form != "batch first":
            return super()._forward_impl(input, weight, *arguments, **named)
        if named["sequence_parallel"]:  # the product would gather along its first dimension
            hidden, named = self._gathered_batch_first(input), {**named, "sequence_parallel": False}
        else:
            hidden = input.transpose(0, 1).contiguous()
        return super()._forward_impl(hidden, weight, *arguments, **named).transpose(0, 1)

    def _gathered_batch_first(self, share: Tensor) -> Tensor:
        """Gather the sequence: [S/tp, B, H] -> [B, S, H]."""
        return gather_from_sequence_parallel_region(share, group=self.tp_group).transpose(0, 1).contiguous()


class ValueHead(torch.nn.Module):
    """A linear layer hidden -> 1 instead of the output layer, replicated over tensor-parallel ranks.

    With sequence parallelism each rank computes the values of its part of the sequence, and the attribute
    `sequence_parallel` makes Megatron-Core add up the ranks' gradients of the weight (finalize_model_grads.py,
    _allreduce_non_tensor_model_parallel_grads). Without it every rank has all hidden states and the same gradient.
    """

    def __init__(self, hidden_size: int, sequence_parallel: bool, like: Tensor) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.weight = torch.nn.Parameter(torch.empty(1, hidden_size, dtype=like.dtype, device=like.device))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Hidden states [S/tp, B, H] with sequence parallelism, else any [.., .., H], -> values of the whole sequence;
        and None for the bias, as from Megatron-Core's output layer."""
        values = torch.nn.functional.linear(hidden_states, self.weight)
        if self.sequence_parallel:
            # every rank computes the same loss, so the gradient of its part is complete: no reduction
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


class GPTValueModel(BatchFirstGPTModel):
    """A GPT model that returns values [B, S/cp, 1] instead of logits; it takes the arguments of GPTModel."""

    output_layer: Any

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments, share_embeddings_and_output_weights=False)
        if self.post_process:
            replaced = self.output_layer.weight
            self.output_layer = ValueHead(self.config.hidden_size, self.config.sequence_parallel, replaced)

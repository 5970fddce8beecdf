"""Distillation: a student learns the next-token distributions of a teacher."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.config.checks.vocabulary import check_token_ids
from megatron_wrap.config.schema.keys import key
from megatron_wrap.errors import DataError, FlowError
from megatron_wrap.flow.contract.base import LossOutput
from megatron_wrap.flow.shared.text import NextTokenFlow, TextFlow, contain_keys
from megatron_wrap.metrics.metric import Metric
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.ops.divergence import DivergenceKind, kl_divergence
from megatron_wrap.ops.log_probs import token_log_probs
from megatron_wrap.ops.token_values import TopK, top_k

VALUES, IDS = "top_k_logits", "top_k_ids"
TEACHER_VALUES, TEACHER_IDS, TEACHER_LOGITS = f"teacher_{VALUES}", f"teacher_{IDS}", "teacher_logits"


class MegatronWrapGPTModelDistillFlow(NextTokenFlow):
    """Mean over the tokens with `loss_mask` of a divergence between the teacher's and the student's distribution of the
    next token: with p the teacher's and q the student's, and b = `beta`, the generalized Jensen-Shannon divergence
    b KL(p || m) + (1 - b) KL(q || m), m = b p + (1 - b) q (Agarwal et al. 2023, arXiv:2306.13649, equation 1); beta 0
    is the forward KL(p || q), beta 1 the reverse KL(q || p). Samples are those of `gpt_sft`.

    The teacher is the model of `megatron_wrap.models.teacher`, or the samples contain its `top_k` largest logits in
    `teacher_top_k_logits` and `teacher_top_k_ids`, [tokens, K] each, one row for each token that is predicted.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(TextFlow.Config):
        """Keys of `megatron_wrap.flow`."""

        beta: float = key(0.0, at_least=0, at_most=1)
        """The teacher's share of the mixture: 0 is the forward KL, 1 the reverse KL (trl's GKDConfig.beta)."""
        temperature: float = key(1.0, above=0)
        """Divides the logits of both models; the loss is not multiplied by its square."""
        label_weight: float = key(0.0, at_least=0)
        """Coefficient of the cross-entropy of the labels, which is added."""
        top_k: int | None = key(None, at_least=1)
        """Take only the teacher's K largest logits of each token, as a distribution over these ids; null: all, which
        are in memory for a whole step."""

    supports_packing = True
    token_id_fields = (*NextTokenFlow.token_id_fields, TEACHER_IDS)

    @property
    def _kind(self) -> DivergenceKind:
        beta = self.flow_config.beta
        return "forward" if beta == 0 else "reverse" if beta == 1 else "jensen_shannon"

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """The base class's fields, and the outputs of the teacher and of this model."""
        fields = (VALUES, IDS, TEACHER_VALUES, TEACHER_IDS, TEACHER_LOGITS)
        return {**super().get_fields_and_seqdims(), **dict.fromkeys(fields, 1)}

    def prepare_sample(self, sample: Mapping[str, Any]) -> dict[str, Any]:
        """Encode a sample like gpt_sft.

        Raises:
            DataError: also if an id of `teacher_top_k_ids` is outside the vocabulary.
        """
        prepared = super().prepare_sample(sample)
        if sample.get(TEACHER_IDS) is None:
            return prepared
        prepared[TEACHER_IDS] = _tensor(sample, TEACHER_IDS, torch.long)
        check_token_ids(TEACHER_IDS, prepared[TEACHER_IDS], self.context.num_token_ids)
        return prepared

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The fields of gpt_sft, and the teacher's logits [B, S, K] if the samples contain them.

        Raises:
            DataError: only some samples contain them, or their number of rows is not that of the predicted tokens.
        """
        samples = list(itertools.islice(iterator, self.micro_batch_size))
        model_forward_inputs, loss_inputs = super().collate_data_micro_batch(iter(samples))
        return model_forward_inputs, {**loss_inputs, **self._teacher_columns(samples, loss_inputs["labels"].shape[1])}

    def _teacher_columns(self, samples: list[Mapping[str, Any]], width: int) -> dict[str, Tensor]:
        """The teacher's logits and ids, [B, S, K] each, padded with 0; empty if no sample contains them."""
        if not contain_keys(samples, [TEACHER_VALUES, TEACHER_IDS]):
            return {}
        columns: dict[str, Tensor] = {}
        for name, dtype in ((TEACHER_VALUES, torch.float32), (TEACHER_IDS, torch.long)):
            rows = [_tensor(sample, name, dtype) for sample in samples]
            columns[name] = torch.zeros(len(rows), width, rows[0].shape[-1], dtype=dtype)
            for index, (row, sample) in enumerate(zip(rows, samples, strict=True)):
                tokens = len(self._encoded(sample)) - 1
                if row.dim() != 2 or len(row) not in (tokens, min(tokens, self.seq_length)):
                    raise DataError(
                        f"{name} has shape {list(row.shape)}, but the sample predicts {counted(tokens, 'token')}; "
                        f"give [{tokens}, K]"
                    )
                kept = row[-self.seq_length :] if self.flow_config.truncation == "left" else row[: self.seq_length]
                columns[name][index, : len(kept)] = kept
        return columns

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This rank's share of the sum over the tokens with `loss_mask`.

        Raises:
            DataError: there is no teacher.
        """
        options, mask = self.flow_config, loss_inputs["loss_mask"]
        teacher = _teacher(loss_inputs)
        per_token = kl_divergence(
            model_forward_output,
            teacher,
            self._kind,
            options.temperature,
            mixture=options.beta if self._kind == "jensen_shannon" else 0.5,
            vocab_size=self.context.common_vocab_size,
        )
        loss_sum = self.token_mean(per_token, mask)
        metrics: dict[str, Metric] = {"divergence": (loss_sum.detach(), mask.sum())}
        if options.label_weight:
            nll = self.token_mean(-token_log_probs(model_forward_output, loss_inputs["labels"]), mask)
            metrics["nll_loss"] = (nll.detach(), mask.sum())
            loss_sum = loss_sum + options.label_weight * nll
        return LossOutput(loss_sum, metrics)

    def calculate_outputs(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> dict[str, Tensor]:
        """`log_probs` and `loss_mask` as in gpt_sft; with `top_k` also `top_k_logits` and `top_k_ids` [B, S, K], from
        which a student can learn."""
        outputs = super().calculate_outputs(loss_inputs, model_forward_output)
        return outputs if self.flow_config.top_k is None else {**outputs, **self._largest(model_forward_output)}

    def calculate_reference_outputs(
        self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor
    ) -> dict[str, Tensor]:
        """`logits` [B, S/cp, V/tp], or with `top_k` the largest ones [B, S/cp, K]."""
        if self.flow_config.top_k is None:
            return {"logits": model_forward_output.detach()}
        return self._largest(model_forward_output)

    def _largest(self, logits: Tensor) -> dict[str, Tensor]:
        count = self.flow_config.top_k
        if count > self.context.num_token_ids:
            raise FlowError(
                f"megatron_wrap.flow.top_k {count} is larger than the vocabulary of {self.context.num_token_ids}; "
                "lower it"
            )
        best = top_k(logits, count)
        return {VALUES: best.values, IDS: best.ids}


def _tensor(sample: Mapping[str, Any], name: str, dtype: torch.dtype) -> Tensor:
    try:
        return torch.as_tensor(sample[name], dtype=dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise DataError(f"{name} is no table of numbers ({error}); give [tokens, K]") from error


def _teacher(loss_inputs: Mapping[str, Tensor]) -> Tensor | TopK:
    if TEACHER_IDS in loss_inputs:
        return TopK(loss_inputs[TEACHER_VALUES], loss_inputs[TEACHER_IDS])
    if TEACHER_LOGITS in loss_inputs:
        return loss_inputs[TEACHER_LOGITS]
    raise DataError(
        "gpt_distill needs a teacher: set megatron_wrap.models.teacher, for instance to {hf_path: FOLDER}, or give "
        f"samples with {TEACHER_VALUES} and {TEACHER_IDS}"
    )

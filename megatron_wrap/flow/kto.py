"""Kahneman-Tversky optimization (KTO) of a GPT model on single answers with a label: desirable or not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_wrap.config.schema.keys import key
from megatron_wrap.data.chat.encode import ChatTokens, encode_sample, sample_of_ids
from megatron_wrap.errors import DataError
from megatron_wrap.flow.contract.base import FlowContext, LossOutput
from megatron_wrap.flow.shared.pairs import label_log_probs, label_log_probs_and_entropy, weighted
from megatron_wrap.flow.shared.text import ENCODED, TextFlow, contain_keys, number_columns
from megatron_wrap.metrics.metric import Difference, Metric, Total

REFERENCE_FIELD = "reference_answer_log_probs"
STEP_REFERENCE, STEP_IDS, STEP_MASK = (
    f"reference_step_{name}" for name in ("answer_log_probs", "answer_ids", "answer_mask")
)
"""Keys of a sample with precomputed outputs: the answer that its prompt is joined with in the KL estimate, and the
reference's log-probability of that answer."""


class MegatronWrapGPTModelKTOFlow(TextFlow):
    """Mean over samples of w_d * (1 - sigmoid(beta * (r - z))) for desirable answers and
    w_u * (1 - sigmoid(beta * (z - r))) for others, where r is the policy's log-probability of the answer minus the
    reference's (Ethayarajh et al., 2024, arXiv:2402.01306, equation 8). z estimates the KL divergence from the
    reference over the whole step: the mean of r over each prompt with the answer of the sample before it (the first
    prompt with the last answer), at least 0, without a gradient. An answer that equals the prompt's own is skipped in
    favor of the one before it: r would be the sample's own, and the loss of each desirable answer 1/2. A sample without
    another answer in the step is not part of the mean; if there is none, z is 0. trl 1.16.0 estimates z in each
    micro-batch and also from equal answers, so the two are equal with one micro-batch per step of different answers.

    A sample has a format of `encode_sample` and `label`: true (desirable) or false; or `prompt_ids`, `completion_ids`
    and `label`. The reference's log-probabilities come from `megatron_wrap.models.reference`; for apo_zero_unpaired
    each sample may contain them instead, in `reference_answer_log_probs`. A sample's `weight` is its weight in both
    means.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config(TextFlow.Config):
        """Keys of `megatron_wrap.flow`."""

        beta: float = key(0.1, above=0)
        """Strength of the penalty for deviating from the reference model."""
        loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
        """kto, or APO-zero of single answers (arXiv:2408.06266), whose z is 0."""
        desirable_weight: float = key(1.0, at_least=0)
        """Factor of the loss of desirable answers, not a weight in the mean."""
        undesirable_weight: float = key(1.0, at_least=0)
        """Factor of the loss of undesirable answers, not a weight in the mean."""

    supports_packing = True
    console_metrics = ("rewards/margins", "kl", "truncated_samples")

    def __init__(self, flow_config: Any, context: FlowContext) -> None:
        super().__init__(flow_config, context)
        if flow_config.loss_type == "kto":
            self.step_values_from = "outputs"

    def _encode(self, sample: Mapping[str, Any]) -> ChatTokens:
        """`ChatTokens` of the prompt and the answer.

        Raises:
            DataError: `label` is neither true nor false, or the answer has no tokens.
        """
        label = sample.get("label")
        if not isinstance(label, bool):
            raise DataError(
                f'"label" is {label!r}; gpt_kto needs true for a desirable answer and false for an undesirable one'
            )
        if "prompt_ids" in sample and "completion_ids" in sample:
            sample = sample_of_ids(sample["prompt_ids"], sample["completion_ids"], sample.get("weight"))
        tokens = encode_sample(self.context.tokenizer, sample, self.flow_config.loss_on)
        if not any(tokens.loss_mask):
            raise DataError("the answer of a sample has no tokens; complete or remove the sample")
        return tokens

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Up to B samples, prepared or not, as [B, S]; `token_weights` [B, S] is `loss_mask` times the sample's weight;
        `desirable`, `sample_weights`, `truncated` and the reference's log-probabilities, if the samples contain them,
        are [B].

        Raises:
            DataError: only some of the samples contain reference log-probabilities.
        """
        samples = list(itertools.islice(iterator, self.micro_batch_size))
        encoded = [self._encoded(sample) for sample in samples]
        model_forward_inputs, loss_inputs = self.collate_tokens(encoded)
        loss_inputs["desirable"] = torch.tensor([float(sample["label"]) for sample in samples])
        loss_inputs["sample_weights"] = torch.tensor([tokens.weight for tokens in encoded])
        loss_inputs["token_weights"] = loss_inputs["loss_mask"] * loss_inputs["sample_weights"][:, None]
        return model_forward_inputs, {**loss_inputs, **number_columns(samples, [REFERENCE_FIELD])}

    def get_step_samples(self, samples: Sequence[Any]) -> list[dict[str, Any]]:
        """The samples of the KL estimate: each prompt with the last answer before it that differs from its own, or with
        the answer that is stored with precomputed outputs; of weight 0 if that is its own. An answer begins with its
        first token with a loss."""
        if not contain_keys(samples, [STEP_IDS]):
            return [step_sample for step_sample, _ in self._step_samples_and_answers(samples)]
        return [
            {
                "label": True,
                ENCODED: self._joined(self._encoded(sample), _numbers(sample[STEP_IDS]), _numbers(sample[STEP_MASK])),
                REFERENCE_FIELD: sample[STEP_REFERENCE],
            }
            for sample in samples
        ]

    def get_samples_to_precompute(self, samples: Sequence[Any]) -> list[tuple[Any, dict[str, Tensor]]] | None:
        """The samples of the KL estimate and their answers, which stay the same in every step of training."""
        return None if self.step_values_from is None else self._step_samples_and_answers(samples)

    def _step_samples_and_answers(self, samples: Sequence[Any]) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
        """Each prompt with an answer of `get_step_samples`; that answer."""
        encoded = [self._encoded(sample) for sample in samples]
        answers = []
        for tokens in encoded:
            start = _answer_start(tokens)
            answers.append((list(tokens.input_ids[start:]), list(tokens.loss_mask[start:])))
        joined = []
        for index, (tokens, own) in enumerate(zip(encoded, answers, strict=True)):
            before = (answers[index - distance] for distance in range(1, len(answers)))  # the first ones from the end
            ids, mask = next((answer for answer in before if answer[0] != own[0]), own)
            step_sample = {"label": True, ENCODED: self._joined(tokens, ids, mask)}
            joined.append((step_sample, {"answer_ids": torch.tensor(ids), "answer_mask": torch.tensor(mask)}))
        return joined

    def _joined(self, prompt_of: ChatTokens, answer_ids: list[int], answer_mask: list[int]) -> ChatTokens:
        first = _answer_start(prompt_of)
        ids = prompt_of.input_ids[:first] + answer_ids
        mask = [0] * first + answer_mask
        kept = self.seq_length + 1 if self.flow_config.truncation == "refuse" else len(ids)
        weight = 0.0 if answer_ids == list(prompt_of.input_ids[first:]) else prompt_of.weight
        return replace(prompt_of, input_ids=ids[:kept], loss_mask=mask[:kept], weight=weight)

    def get_fields_and_seqdims(self) -> dict[str, int]:
        """The base class's fields and `token_weights`."""
        return {**super().get_fields_and_seqdims(), "token_weights": 1}

    def get_loss_weight(self, loss_inputs: Mapping[str, Tensor]) -> float:
        """Sum of the weights of the micro-batch's samples, each 1 by default."""
        return float(loss_inputs["sample_weights"].sum())

    def has_loss(self, loss_inputs: Mapping[str, Tensor]) -> bool:
        """Whether a token has a loss; truncation may remove the answers."""
        return bool(loss_inputs["token_weights"].any())

    def calculate_step_values(
        self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor | None
    ) -> dict[str, Tensor]:
        """The log-ratio of each sample of `get_step_samples`, [B]."""
        assert model_forward_output is not None
        ratios = self._log_ratios(loss_inputs, self._answer_log_probs(loss_inputs, model_forward_output))
        return {"ratios": ratios, "weights": loss_inputs["sample_weights"]}

    def reduce_step_values(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """`kl`: the mean of the log-ratios, at least 0; 0 without any."""
        weights = values["weights"]
        total, least = weights.sum(), torch.finfo(weights.dtype).tiny
        return {"kl": (weighted(values["ratios"], weights).sum() / total.clamp(min=least)).clamp(min=0)}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        """This rank's share of the weighted sum over samples. The metrics are means over the desirable (`chosen`) or
        the undesirable (`rejected`) answers, `rewards/margins` the difference of the two mean rewards; `entropy` is a
        mean over the answers' tokens.

        Raises:
            DataError: there are no reference log-probabilities.
        """
        config, desirable, weights = self.flow_config, loss_inputs["desirable"], loss_inputs["sample_weights"]
        token_log_probs, entropy = label_log_probs_and_entropy(
            model_forward_output, loss_inputs["labels"], loss_inputs["loss_mask"], loss_inputs["token_weights"]
        )
        log_probs = self.sum_per_sequence(token_log_probs * loss_inputs["loss_mask"], loss_inputs)
        ratios = self._log_ratios(loss_inputs, log_probs)
        kl = loss_inputs["step_kl"] if config.loss_type == "kto" else torch.zeros_like(ratios[:1]).sum()
        utility = torch.sigmoid(config.beta * torch.where(desirable != 0, ratios - kl, kl - ratios))
        factors = torch.where(desirable != 0, config.desirable_weight, config.undesirable_weight)
        metrics: dict[str, Metric] = {"entropy": entropy}
        rewards: list[tuple[Tensor, Tensor]] = []
        for kind, share in (("chosen", weights * desirable), ("rejected", weights * (1 - desirable))):
            rewards.append((weighted(config.beta * ratios.detach(), share).sum(), share.sum()))
            metrics[f"rewards/{kind}"] = rewards[-1]
            metrics[f"logps/{kind}"] = (weighted(log_probs.detach(), share).sum(), share.sum())
        metrics["rewards/margins"] = Difference(*rewards)
        if config.loss_type == "kto":
            metrics["kl"] = (kl * weights.sum(), weights.sum())
        metrics["truncated_samples"] = Total(self.sequence_mean(loss_inputs["truncated"]))
        return LossOutput(self.sequence_mean(weighted(factors * (1 - utility), weights)), metrics)

    def calculate_outputs(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> dict[str, Tensor]:
        """`answer_log_probs` [B]: log-probability of each answer given its prompt."""
        return {"answer_log_probs": self._answer_log_probs(loss_inputs, model_forward_output)}

    def _answer_log_probs(self, loss_inputs: Mapping[str, Tensor], logits: Tensor) -> Tensor:
        mask = loss_inputs["loss_mask"]
        return self.sum_per_sequence(label_log_probs(logits, loss_inputs["labels"], mask) * mask, loss_inputs)

    def _log_ratios(self, loss_inputs: Mapping[str, Tensor], log_probs: Tensor) -> Tensor:
        if REFERENCE_FIELD not in loss_inputs:
            alternative = "" if self.flow_config.loss_type == "kto" else f", or add {REFERENCE_FIELD} to each sample"
            raise DataError(
                "gpt_kto needs a reference model's log-probabilities: set megatron_wrap.models.reference: copy"
                + alternative
            )
        return log_probs - loss_inputs[REFERENCE_FIELD]


def _answer_start(tokens: ChatTokens) -> int:
    """Index of the first token with a loss; the number of tokens if there is none."""
    return tokens.loss_mask.index(1) if 1 in tokens.loss_mask else len(tokens)


def _numbers(values: Any) -> list[int]:
    """A stored tensor or list as integers."""
    return [int(value) for value in values]

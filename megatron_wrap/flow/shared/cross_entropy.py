"""Cross-entropy of the labels with label smoothing and z-loss: its keys, and its value at each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_wrap.config.schema.keys import key
from megatron_wrap.flow.contract.base import MegatronWrapFlowConfig, MegatronWrapTrainingFlowBase
from megatron_wrap.flow.contract.prediction import LABELS, LOSS_MASK
from megatron_wrap.metrics.metric import Metric
from megatron_wrap.ops.log_probs import token_log_probs
from megatron_wrap.ops.token_values import log_probs_and_logsumexp, token_terms


@dataclass(frozen=True, kw_only=True)
class CrossEntropyConfig(MegatronWrapFlowConfig):
    """Keys of `cross_entropy`."""

    label_smoothing: float = key(0.0, at_least=0, below=1)
    """Share of the target distribution that is uniform over the vocabulary, as in torch's cross_entropy and
    transformers' label_smoothing_factor. (The key of this name of gpt_dpo is the probability of swapped labels.)"""
    z_loss_coefficient: float = key(0.0, at_least=0)
    """Coefficient of the mean over tokens of logsumexp(logits)^2, which is added to the loss (PaLM, arXiv:2204.02311,
    section 5); 1e-4 is usual. The metric logits_z_loss is this mean."""


def prediction_losses(
    flow: MegatronWrapTrainingFlowBase, loss_inputs: Mapping[str, Tensor], outputs: Sequence[Tensor]
) -> list[Tensor]:
    """This rank's sum of the cross-entropies of each layer for multi-token prediction, in the order of the layers.

    Args:
        outputs: logits of each layer, [B, S/cp, V/tp].
    """
    labels, masks = loss_inputs[LABELS], loss_inputs[LOSS_MASK]
    return [
        flow.token_mean(-token_log_probs(logits, labels[:, layer].contiguous()), masks[:, layer])
        for layer, logits in enumerate(outputs)
    ]


def cross_entropy(
    flow: MegatronWrapTrainingFlowBase, loss_inputs: Mapping[str, Tensor], logits: Tensor
) -> tuple[Tensor, dict[str, Metric]]:
    """The loss of each token, [B, S/cp]: with label smoothing e, the mean log-probability m over the vocabulary and the
    z-loss coefficient c, (1 - e) (-log p(label)) - e m + c logsumexp(logits)^2.

    Metrics, if e or c is above 0: `nll_loss`, the mean of -log p(label) over the tokens of `loss_mask`; with c also
    `logits_z_loss`, the mean of logsumexp(logits)^2.
    """
    smoothing, coefficient = flow.flow_config.label_smoothing, flow.flow_config.z_loss_coefficient
    labels, mask = loss_inputs["labels"], loss_inputs["loss_mask"]
    if smoothing:
        log_probs, mean_log_probs, normalizer = token_terms(logits, labels)
        per_token = -(1 - smoothing) * log_probs - smoothing * mean_log_probs
    elif coefficient:
        log_probs, normalizer = log_probs_and_logsumexp(logits, labels)
        per_token = -log_probs
    else:
        return -token_log_probs(logits, labels, loss_gradient=-mask), {}
    metrics: dict[str, Metric] = {"nll_loss": (flow.token_mean(-log_probs.detach(), mask), mask.sum())}
    if coefficient:
        squares = normalizer.square()
        per_token = per_token + coefficient * squares
        metrics["logits_z_loss"] = (flow.token_mean(squares.detach(), mask), mask.sum())
    return per_token, metrics

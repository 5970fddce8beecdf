"""Flows for the engine's tests: several terms, whole sequences, the two-value return, metrics of each kind, errors."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megatron_wrap.flow import LossOutput, MegatronWrapGPTModelFlow, MegatronWrapGPTModelSFTFlow, Total
from megatron_wrap.ops.log_probs import token_log_probs, vocabulary_max

COEFFICIENT = 0.03
BETA = 0.2


class TwoTerms(MegatronWrapGPTModelSFTFlow):
    """Cross-entropy as a weighted mean with sample weights, and squared largest logits as a mean over tokens."""

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        samples = [next(iterator) for _ in range(self.micro_batch_size)]
        inputs, loss_inputs = super().collate_data_micro_batch(iter(samples))
        return inputs, {**loss_inputs, "token_mask": inputs["attention_mask"]}

    def get_fields_and_seqdims(self) -> dict[str, int]:
        return {**super().get_fields_and_seqdims(), "token_mask": 1}

    def get_loss_weight(self, loss_inputs: Mapping[str, Tensor]) -> dict[str, float]:
        return {"ce": float(loss_inputs["loss_mask"].sum()), "z": float(loss_inputs["token_mask"].sum())}

    def get_loss_coefficients(self) -> dict[str, float]:
        return {"z": COEFFICIENT}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        mask, tokens = loss_inputs["loss_mask"], loss_inputs["token_mask"]
        ce = self.token_mean(-token_log_probs(model_forward_output, loss_inputs["labels"]), mask)
        z = self.token_mean(vocabulary_max(model_forward_output) ** 2, tokens)
        rows = torch.tensor(float(mask.shape[0]))
        metrics = {"z_mean": (z, tokens.sum()), "rows": rows, "tokens_seen": Total(tokens.sum())}
        return LossOutput({"ce": ce, "z": z}, metrics)


class Pairs(MegatronWrapGPTModelFlow):
    """-log sigmoid(beta * (log-probability of the chosen whole sequence - of the rejected)), a mean over pairs."""

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        samples = [next(iterator) for _ in range(self.micro_batch_size)]
        rows = [sample[key] for key in ("chosen", "rejected") for sample in samples]
        width = max(len(row) for row in rows) - 1
        ids, labels = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros(len(rows), width)
        for index, row in enumerate(rows):
            ids[index, : len(row) - 1], labels[index, : len(row) - 1] = torch.tensor(row[:-1]), torch.tensor(row[1:])
            mask[index, : len(row) - 1] = 1
        positions = torch.arange(width).expand(len(rows), -1)
        return {"input_ids": ids, "position_ids": positions, "attention_mask": mask.long()}, {
            "labels": labels,
            "loss_mask": mask,
        }

    def get_loss_weight(self, loss_inputs: Mapping[str, Tensor]) -> float:
        return loss_inputs["labels"].shape[0] / 2

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> Any:
        losses, margin = self.losses(loss_inputs, model_forward_output)
        metrics = {
            "accuracy": (self.sequence_mean((margin > 0).float()), self.sequence_mean(torch.ones_like(margin))),
            "margin": margin.mean(),
            "wins": Total(self.sequence_mean((margin > 0).float())),
        }
        return LossOutput(self.sequence_mean(losses), metrics)

    def losses(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> tuple[Tensor, Tensor]:
        log_probs = token_log_probs(model_forward_output, loss_inputs["labels"]) * loss_inputs["loss_mask"]
        chosen, rejected = self.sum_on_cp_group(log_probs.sum(dim=1)).chunk(2)
        return -logsigmoid(BETA * (chosen - rejected)), (chosen - rejected).detach()


class PairsTwoValues(Pairs):
    """The same with the older return: the mean over this micro-batch."""

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> Any:
        losses, margin = self.losses(loss_inputs, model_forward_output)
        return losses.mean(), {"margin": self.average_loss_across_dp_ranks(margin.mean())}


class Shortcut(MegatronWrapGPTModelSFTFlow):
    """Returns a zero without a graph if this rank's shard has no loss token."""

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        if not loss_inputs["loss_mask"].any():
            return LossOutput(torch.zeros(()))
        return super().calculate_loss(loss_inputs, model_forward_output)


class NotANumber(MegatronWrapGPTModelSFTFlow):
    """The loss and the gradients are nan."""

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        return LossOutput(super().calculate_loss(loss_inputs, model_forward_output).loss_sum * float("nan"))


class Poisoned(MegatronWrapGPTModelSFTFlow):
    """A sample with `poison: loss` makes the loss infinite and keeps the gradient finite; one with `poison: gradient`
    makes the gradient nan and does not change the loss; one with `poison: spike` makes the loss of its micro-batch
    large."""

    def collate_data_micro_batch(self, iterator: Iterator[Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        samples = list(itertools.islice(iterator, self.micro_batch_size))
        model_inputs, loss_inputs = super().collate_data_micro_batch(iter(samples))
        kinds = [["", "loss", "gradient", "spike"].index(sample.get("poison", "")) for sample in samples]
        return model_inputs, {**loss_inputs, "poison": torch.tensor(kinds)}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        loss = super().calculate_loss(loss_inputs, model_forward_output).loss_sum
        kinds = loss_inputs["poison"].tolist()
        if 1 in kinds:
            loss = loss + float("inf")
        if 3 in kinds:
            loss = loss * 50.0
        if 2 in kinds:  # the derivative of the square root at 0 is infinite, and is multiplied by 0
            loss = loss + (model_forward_output[0, 0, :1].float().sum() * 0.0).abs().sqrt()
        return LossOutput(loss)


class RelativeLengthFlow(MegatronWrapGPTModelSFTFlow):
    """Each sequence's loss is divided by the longest length of the step."""

    supports_packing = True
    step_values_from = "inputs"

    def calculate_step_values(
        self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor | None
    ) -> dict[str, Tensor]:
        assert model_forward_output is None
        return {"lengths": self.sum_per_sequence(loss_inputs["loss_mask"], loss_inputs)}

    def reduce_step_values(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"longest": values["lengths"].max(), "lengths": values["lengths"]}

    def get_loss_weight(self, loss_inputs: Any) -> float:
        return float(len(loss_inputs["truncated"]))

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        mask = loss_inputs["loss_mask"]
        log_probs = token_log_probs(model_forward_output, loss_inputs["labels"]) * mask
        lengths = self.sum_per_sequence(mask, loss_inputs)
        assert torch.equal(lengths, loss_inputs["step_lengths"][loss_inputs["step_indices"]])
        losses = -self.sum_per_sequence(log_probs, loss_inputs) / loss_inputs["step_longest"]
        return LossOutput(self.sequence_mean(losses))

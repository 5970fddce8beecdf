"""Correct and wrong flows. Each wrong one has a mistake that raises no error in training; its docstring names it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from megatron_wrap.flow import LossOutput, MegatronWrapGPTModelSFTFlow, Total
from megatron_wrap.ops import entropy, token_log_probs, vocabulary_max


class _Base(MegatronWrapGPTModelSFTFlow):
    """Most flows define no more than a `loss`, from log-probabilities of labels and their mask."""

    def log_probs(self, inputs: dict[str, Tensor], output: Tensor) -> Tensor:
        return token_log_probs(output, inputs["labels"])

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        return LossOutput(self.loss(self.log_probs(loss_inputs, model_forward_output), loss_inputs["loss_mask"]))


class _OfSequences(_Base):
    """A mean over sequences."""

    def get_loss_weight(self, loss_inputs: Any) -> float:
        return float(loss_inputs["loss_mask"].shape[0])


# ---- correct ----


class Focal(_Base):
    """A loss that is not linear in the log-probability of a token."""

    supports_packing = True

    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        return self.token_mean(-((1 - log_probs.exp()) ** 2) * log_probs, mask)


class WholeSequence(_OfSequences):
    """A non-linear function of whole sequences, which context parallelism splits and packing puts in one row."""

    supports_packing = True

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs = self.log_probs(loss_inputs, model_forward_output)
        whole = self.sum_per_sequence(log_probs * loss_inputs["loss_mask"], loss_inputs)
        return LossOutput(self.sequence_mean(-functional.logsigmoid(whole / 100.0)))


class TwoValuesComplete(_Base):
    """The older return: a mean over the micro-batch, complete and equal on every context-parallel rank."""

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> Any:
        log_probs, mask = self.log_probs(loss_inputs, model_forward_output), loss_inputs["loss_mask"]
        sums = self.sum_on_cp_group(torch.stack([(-log_probs * mask).sum(), mask.sum()]))
        loss = sums[0] / sums[1].clamp(min=1)
        return loss, {"loss_seen": loss.detach()}


class ToCome(_Base):
    """Depends on token order: the squared difference of each token to the sum of later ones, on gathered sequences,
    which packed rows have not."""

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        learned = self.log_probs(loss_inputs, model_forward_output) * loss_inputs["loss_mask"]
        whole, mask = self.gather_on_cp_group(learned), self.gather_on_cp_group(loss_inputs["loss_mask"])
        to_come = whole.flip(1).cumsum(1).flip(1) - whole
        per_sequence = ((whole - 0.1 * to_come) ** 2 * mask).sum(1)
        share = self.sequence_mean(per_sequence)
        return LossOutput(share, {"to_come": (share.detach(), self.sequence_mean(torch.ones(len(mask))))})


class EntropyBonus(_Base):
    """Cross-entropy minus an entropy bonus over the full vocabulary."""

    supports_packing = True

    def get_loss_weight(self, loss_inputs: Any) -> dict[str, float]:
        tokens = float(loss_inputs["loss_mask"].sum())
        return {"cross_entropy": tokens, "entropy": tokens}

    def get_loss_coefficients(self) -> dict[str, float]:
        return {"entropy": -0.1}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        mask = loss_inputs["loss_mask"]
        spread = self.token_mean(entropy(model_forward_output), mask)
        learned = self.token_mean(-self.log_probs(loss_inputs, model_forward_output), mask)
        return LossOutput({"cross_entropy": learned, "entropy": spread}, {"entropy": (spread, mask.sum())})


class MaxZ(_Base):
    """A second term over all tokens, with a separate coefficient and weight, and three kinds of metrics."""

    supports_packing = True

    def collate_data_micro_batch(self, iterator: Any) -> Any:
        model_inputs, loss_inputs = super().collate_data_micro_batch(iterator)
        return model_inputs, {**loss_inputs, "token_mask": model_inputs["attention_mask"]}

    def get_fields_and_seqdims(self) -> dict[str, int]:
        return {**super().get_fields_and_seqdims(), "token_mask": 1}

    def get_loss_weight(self, loss_inputs: Any) -> dict[str, float]:
        return {"ce": float(loss_inputs["loss_mask"].sum()), "z": float(loss_inputs["token_mask"].sum())}

    def get_loss_coefficients(self) -> dict[str, float]:
        return {"z": 0.05}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        tokens = loss_inputs["token_mask"]
        z = self.token_mean(vocabulary_max(model_forward_output) ** 2, tokens)
        ce = self.token_mean(-self.log_probs(loss_inputs, model_forward_output), loss_inputs["loss_mask"])
        return LossOutput({"ce": ce, "z": z}, {"z": (z, tokens.sum()), "tokens_seen": Total(tokens.sum()), "one": 1.0})


class SampleWeights(_Base):
    """A weighted mean over tokens with one weight for each sample."""

    def collate_data_micro_batch(self, iterator: Any) -> Any:
        model_inputs, loss_inputs = super().collate_data_micro_batch(iterator)
        weights = 0.5 + loss_inputs["labels"].sum(1) % 7  # depends only on the sample
        return model_inputs, {**loss_inputs, "sample_weight": weights}

    def get_loss_weight(self, loss_inputs: Any) -> float:
        return float((loss_inputs["loss_mask"] * loss_inputs["sample_weight"][:, None]).sum())

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        weights = loss_inputs["loss_mask"] * loss_inputs["sample_weight"][:, None]
        return LossOutput(self.token_mean(-self.log_probs(loss_inputs, model_forward_output), weights))


class Advantages(_Base):
    """A policy gradient: the objective is 0 up to rounding, but its gradient is not."""

    supports_packing = True

    def collate_data_micro_batch(self, iterator: Any) -> Any:
        model_inputs, loss_inputs = super().collate_data_micro_batch(iterator)
        mask = loss_inputs["loss_mask"]
        signs = torch.where(torch.arange(mask.shape[1]) % 2 == 0, 1.0, -1.0)
        return model_inputs, {**loss_inputs, "advantages": signs.expand_as(mask) * mask}

    def get_fields_and_seqdims(self) -> dict[str, int]:
        return {**super().get_fields_and_seqdims(), "advantages": 1}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs = self.log_probs(loss_inputs, model_forward_output)
        advantages, mask = loss_inputs["advantages"], loss_inputs["loss_mask"]
        ratio = (log_probs - log_probs.detach()).exp()
        centered = self.token_mean((ratio - 1) * advantages, mask)
        return LossOutput(-centered, {"drift": (centered, mask.sum())})


RIGHT = [Focal, WholeSequence, ToCome, EntropyBonus, MaxZ, SampleWeights, Advantages, TwoValuesComplete]


# ---- wrong ----


class TimesContextSize(_Base):
    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        return self.token_mean(-log_probs, mask) * self.context.cp_size


class TimesDataSize(_Base):
    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        from megatron.core import parallel_state

        log_probs = self.log_probs(loss_inputs, model_forward_output)
        size = parallel_state.get_data_parallel_world_size()
        return LossOutput(self.token_mean(-log_probs, loss_inputs["loss_mask"]) * size)


class TimesTensorSize(_Base):
    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        from megatron.core import parallel_state

        log_probs = self.log_probs(loss_inputs, model_forward_output)
        size = parallel_state.get_tensor_model_parallel_world_size()
        return LossOutput(self.token_mean(-log_probs, loss_inputs["loss_mask"]) * size)


class WrongAdjoint(_Base):
    """The sum over the whole sequence is correct, but its backward is the identity."""

    def get_loss_weight(self, loss_inputs: Any) -> float:
        return float(loss_inputs["loss_mask"].shape[0])

    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        mine = (log_probs * mask).sum(1)
        whole = mine + (self.sum_on_cp_group(mine) - mine).detach()
        # one term is per sequence, the other per token, so the gradients do not differ by one factor
        loss = self.sequence_mean(-functional.logsigmoid(whole / 100.0))
        return loss + 0.01 * self.token_mean(-log_probs, mask)


class MeanOfMeans(_Base):
    def get_loss_weight(self, loss_inputs: Any) -> float:
        return 1.0

    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        count = self.sum_on_cp_group(mask.sum()).clamp(min=1)
        return self.token_mean(-log_probs, mask) / count


class SoftmaxOfAPart(_Base):
    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        columns = model_forward_output.shape[-1]
        log_probs = model_forward_output.float().log_softmax(-1)
        picked = log_probs.gather(-1, (loss_inputs["labels"] % columns)[..., None]).squeeze(-1)
        return LossOutput(self.token_mean(-picked, loss_inputs["loss_mask"]))


class PlainCrossEntropy(_Base):
    """torch's cross-entropy: labels outside this process's part of the vocabulary are out of bounds."""

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        labels = loss_inputs["labels"]
        loss = functional.cross_entropy(model_forward_output.flatten(0, 1), labels.flatten(), reduction="none")
        return LossOutput(self.token_mean(loss.view_as(labels), loss_inputs["loss_mask"]))


class SumWithWeightOne(_Base):
    """A sum over tokens, divided by the number of micro-batches."""

    def get_loss_weight(self, loss_inputs: Any) -> float:
        return 1.0

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        return LossOutput((-self.log_probs(loss_inputs, model_forward_output) * loss_inputs["loss_mask"]).sum())


class DividedTwice(_Base):
    """A mean over the tokens of each micro-batch; the framework divides by their number again."""

    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        return (-log_probs * mask).sum() / mask.sum().clamp(min=1)


class NanOnAnEmptyPart(_Base):
    """A mean over this rank's tokens: 0 / 0 if it has none."""

    def get_loss_weight(self, loss_inputs: Any) -> float:
        return 1.0

    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        return (-log_probs * mask).sum() / mask.sum()


class UndeclaredField(_Base):
    """A per-token weight that get_fields_and_seqdims does not list."""

    def collate_data_micro_batch(self, iterator: Any) -> Any:
        model_inputs, loss_inputs = super().collate_data_micro_batch(iterator)
        width = loss_inputs["labels"].shape[1]
        loss_inputs["token_weight"] = torch.linspace(0.5, 1.5, width).expand_as(loss_inputs["labels"]).contiguous()
        return model_inputs, loss_inputs

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs = self.log_probs(loss_inputs, model_forward_output)
        weight = loss_inputs["token_weight"][:, : log_probs.shape[1]]
        if weight.shape[1] < log_probs.shape[1]:
            weight = functional.pad(weight, (0, log_probs.shape[1] - weight.shape[1]))
        return LossOutput(self.token_mean(-log_probs * weight, loss_inputs["loss_mask"]))


class Undetermined(_Base):
    """Draws unseeded random numbers in the loss."""

    count = 0

    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        noise = torch.rand(log_probs.shape, generator=torch.Generator().manual_seed(torch.seed() % 2**31))
        return self.token_mean(-log_probs * noise, mask)


class NotFinite(_Base):
    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        return self.token_mean(log_probs / 0.0 * 0.0, mask)


class PartOfTheSequence(_OfSequences):
    """A non-linear function of each context-parallel rank's part of a sequence."""

    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        part = (log_probs * mask).sum(1)
        return -functional.logsigmoid(part / 100.0).sum()


class ReducedByHand(_Base):
    """Averages over data-parallel ranks in the loss; the framework does it again."""

    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        from megatron.core import parallel_state

        total = mask.sum().clone()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return self.token_mean(-log_probs, mask) * mask.sum() / total.clamp(min=1)


class WrongShape(_Base):
    """Raises an error on every layout."""

    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        return (log_probs @ log_probs).sum()


class OverMicroBatchSize(_Base):
    """Divides by the number of samples; the framework also divides by the weight."""

    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        return self.token_mean(-log_probs, mask) / mask.shape[0]


class NoGradient(_Base):
    """Detached from the model's output except for a term with factor 0."""

    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        return self.token_mean(-log_probs.detach(), mask) + 0 * log_probs.sum()


class CountsPadding(_Base):
    """Ignores the mask, so positions after a sample's end are trained on."""

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        return LossOutput(-self.log_probs(loss_inputs, model_forward_output).sum())


class RandomInTheLoss(_Base):
    """Drops tokens at random; two runs with one seed are equal, but two layouts are not."""

    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        return self.token_mean(-log_probs, mask * (torch.rand(mask.shape) < 0.8))


class RunningBaseline(_Base):
    """Keeps state between micro-batches, of which each replica processes different ones."""

    baseline = 0.0

    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        share = self.token_mean(-log_probs * (1 + self.baseline), mask)
        self.baseline = 0.5 * self.baseline + 0.5 * float((log_probs.exp().detach() * mask).sum()) + 0.1
        return share


class _WithMetric(_Base):
    """A correct loss with a metric."""

    def metric(self, log_probs: Tensor, mask: Tensor, logits: Tensor, labels: Tensor) -> Any:
        raise NotImplementedError

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs, mask = self.log_probs(loss_inputs, model_forward_output), loss_inputs["loss_mask"]
        value = self.metric(log_probs.detach(), mask, model_forward_output.detach(), loss_inputs["labels"])
        return LossOutput(self.token_mean(-log_probs, mask), {"shown": value})


class MetricOfAPart(_WithMetric):
    """A mean over this process's part of the sequence."""

    def metric(self, log_probs: Tensor, mask: Tensor, logits: Tensor, labels: Tensor) -> Any:
        return (log_probs.exp() * mask).sum() / mask.sum().clamp(min=1)


class MetricOfAMicroBatch(_WithMetric):
    """A mean over samples, which the framework weights by tokens."""

    def metric(self, log_probs: Tensor, mask: Tensor, logits: Tensor, labels: Tensor) -> Any:
        return self.sum_on_cp_group((log_probs.exp() * mask).sum(1)).mean()


class MetricOfSomeColumns(_WithMetric):
    """The largest logit of this process's part of the vocabulary."""

    def metric(self, log_probs: Tensor, mask: Tensor, logits: Tensor, labels: Tensor) -> Any:
        return self.token_mean(logits.amax(-1), mask), mask.sum()


class ArgmaxOfAPart(_WithMetric):
    """The most likely id of each token among this process's columns."""

    def metric(self, log_probs: Tensor, mask: Tensor, logits: Tensor, labels: Tensor) -> Any:
        return self.token_mean(logits.argmax(-1).float(), mask), mask.sum()


class AccuracyOfAPart(_WithMetric):
    """The same, compared with labels that an untrained model never finds."""

    def metric(self, log_probs: Tensor, mask: Tensor, logits: Tensor, labels: Tensor) -> Any:
        return self.token_mean((logits.argmax(dim=-1) == -labels).float(), mask), mask.sum()


class MetricRightOnTheFirst(_WithMetric):
    """Frequency of the first label, from this process's columns: correct only on the rank that is reported."""

    def metric(self, log_probs: Tensor, mask: Tensor, logits: Tensor, labels: Tensor) -> Any:
        from megatron.core import parallel_state

        mine = labels - parallel_state.get_tensor_model_parallel_rank() * logits.shape[-1]
        return self.token_mean((mine == labels[:1, :1]).float(), mask), mask.sum()


class BareShare(_WithMetric):
    """This process's share of a value, reported as a bare number."""

    def metric(self, log_probs: Tensor, mask: Tensor, logits: Tensor, labels: Tensor) -> Any:
        return self.sequence_mean(torch.ones(2))


class TotalOnEveryRank(_WithMetric):
    """A Total of a value that is complete and equal on every context-parallel rank."""

    def metric(self, log_probs: Tensor, mask: Tensor, logits: Tensor, labels: Tensor) -> Any:
        return Total(mask.shape[0])


class SumsOfRows(_OfSequences):
    """Declares that it supports packing, but sums over each row; correct on unpacked sequences."""

    supports_packing = True

    def loss(self, log_probs: Tensor, mask: Tensor) -> Tensor:
        whole = self.sum_on_cp_group((log_probs * mask).sum(dim=1))
        return self.sequence_mean(-functional.logsigmoid(whole / 100.0))


class CountsRows(_WithMetric):
    """A metric with one term for each row."""

    supports_packing = True

    def metric(self, log_probs: Tensor, mask: Tensor, logits: Tensor, labels: Tensor) -> Any:
        likely = self.sum_on_cp_group((log_probs * mask).sum(dim=1)) > -60.0
        return self.sequence_mean(likely.float()), self.sequence_mean(torch.ones(len(mask)))


class GathersPackedRows(_Base):
    """Declares that it supports packing, but gathers rows, which has no sequence boundaries."""

    supports_packing = True

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        learned = self.log_probs(loss_inputs, model_forward_output) * loss_inputs["loss_mask"]
        return LossOutput(self.sequence_mean(-self.gather_on_cp_group(learned).cumsum(1).mean(1)))


WRONG = {
    TimesContextSize: ("cp2", "context-parallel size"),
    TimesDataSize: ("dp2", "the data-parallel size"),
    TimesTensorSize: ("tp2", "the tensor-parallel size"),
    WrongAdjoint: ("cp2", "adjoint"),
    MeanOfMeans: ("mbs1", "mean of means"),
    SoftmaxOfAPart: ("tp2", "_flow_zoo.py:LINE calls log_softmax over this process's part of the vocabulary"),
    PlainCrossEntropy: ("tp2", "write -token_log_probs(logits, labels), of megatron_wrap.ops"),
    ArgmaxOfAPart: ("tp2", "write top_k(logits, 1).ids[..., 0], of megatron_wrap.ops"),
    SumWithWeightOne: ("mbs1", "calculate_loss returns a sum, and get_loss_weight returns 1"),
    DividedTwice: ("mbs1", "divided twice"),
    NanOnAnEmptyPart: ("cp2", "nan"),
    UndeclaredField: ("cp2", "token_weight"),
    Undetermined: ("one process", "not deterministic"),
    NotFinite: ("one process", "not finite"),
    PartOfTheSequence: ("cp2", "whole sequences"),
    ReducedByHand: ("dp2", "average_loss_across_dp_ranks"),
    RunningBaseline: ("dp2", "keeps between micro-batches"),
    OverMicroBatchSize: ("mbs1", "the number of micro-batches"),
    NoGradient: ("one process", "no parameter gets a gradient"),
    CountsPadding: ("padded", "padding is counted"),
    RandomInTheLoss: ("dp2", "draws random numbers"),
    MetricOfAPart: ("cp2", "'shown' is computed from each context-parallel rank's part of the sequence"),
    MetricOfAMicroBatch: ("mbs1", "'shown' is a bare number"),
    MetricOfSomeColumns: ("tp2", "part of the vocabulary"),
    MetricRightOnTheFirst: ("tp2", "'shown' differs between tensor-parallel ranks"),
    BareShare: ("cp2", "'shown' is a bare number, but it is this rank's share"),
    SumsOfRows: ("packed", "self.sum_per_sequence"),
    CountsRows: ("packed", "metric 'shown': likely cause: a sum, mean or other operation over each row"),
    GathersPackedRows: ("packed", "calls gather_on_cp_group"),
    TotalOnEveryRank: ("cp2", "'shown' is complete and equal on every context-parallel rank"),
}
"""Flow -> the layout on which it disagrees, and a part of the cause in the report."""

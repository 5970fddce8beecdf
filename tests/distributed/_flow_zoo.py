"""Right flows and wrong ones. Each wrong one makes a mistake that trains silently; the comment says which."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_wrap.core.flow import LossOutput, MegatronWrapGPTModelSFTFlow
from megatron_wrap.ops import token_log_probs


class _Base(MegatronWrapGPTModelSFTFlow):
    def log_probs(self, inputs: dict[str, Tensor], output: Tensor) -> Tensor:
        return token_log_probs(output, inputs["labels"])


# ---- right ----


class Focal(_Base):
    """A loss that is not linear in the log-probability of a token."""

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs = self.log_probs(loss_inputs, model_forward_output)
        return LossOutput(self.token_mean(-((1 - log_probs.exp()) ** 2) * log_probs, loss_inputs["loss_mask"]))


class TwoTerms(_Base):
    """Two named terms with coefficients and weights of their own."""

    def get_loss_weight(self, loss_inputs: Any) -> dict[str, float]:
        mask = loss_inputs["loss_mask"]
        return {"tokens": float(mask.sum()), "confidence": float(mask.shape[0])}

    def get_loss_coefficients(self) -> dict[str, float]:
        return {"confidence": 0.01}

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs, mask = self.log_probs(loss_inputs, model_forward_output), loss_inputs["loss_mask"]
        return LossOutput(
            {"tokens": self.token_mean(-log_probs, mask), "confidence": self.token_mean(log_probs**2, mask)},
            {"accuracy_like": (self.token_mean(log_probs.exp(), mask).detach(), mask.sum())},
        )


class WholeSequence(_Base):
    """A non-linear step over whole sequences, split by context parallelism."""

    def get_loss_weight(self, loss_inputs: Any) -> float:
        return float(loss_inputs["loss_mask"].shape[0])

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs = self.log_probs(loss_inputs, model_forward_output)
        whole = self.sum_on_cp_group((log_probs * loss_inputs["loss_mask"]).sum(1))
        return LossOutput(self.sequence_mean(-torch.nn.functional.logsigmoid(whole / 100.0)))


class TwoValuesComplete(_Base):
    """The older return: complete and equal on every context-parallel rank, a mean over the micro-batch."""

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> Any:
        log_probs, mask = self.log_probs(loss_inputs, model_forward_output), loss_inputs["loss_mask"]
        sums = self.sum_on_cp_group(torch.stack([(-log_probs * mask).sum(), mask.sum()]))
        loss = sums[0] / sums[1].clamp(min=1)
        return loss, {"loss_seen": loss.detach()}


RIGHT = [Focal, TwoTerms, WholeSequence, TwoValuesComplete, MegatronWrapGPTModelSFTFlow]


# ---- wrong ----


class TimesContextSize(_Base):
    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs = self.log_probs(loss_inputs, model_forward_output)
        return LossOutput(self.token_mean(-log_probs, loss_inputs["loss_mask"]) * self.context.cp_size)


class OverContextSize(_Base):
    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs = self.log_probs(loss_inputs, model_forward_output)
        return LossOutput(self.token_mean(-log_probs, loss_inputs["loss_mask"]) / self.context.cp_size)


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
    """The whole sequence's sum is right, but its backward is the identity."""

    def get_loss_weight(self, loss_inputs: Any) -> float:
        return float(loss_inputs["loss_mask"].shape[0])

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs = self.log_probs(loss_inputs, model_forward_output)
        mine = (log_probs * loss_inputs["loss_mask"]).sum(1)
        whole = mine + (self.sum_on_cp_group(mine) - mine).detach()
        # one part of the loss whole, the other per token: not a mere factor
        loss = self.sequence_mean(-torch.nn.functional.logsigmoid(whole / 100.0))
        return LossOutput(loss + 0.01 * self.token_mean(-log_probs, loss_inputs["loss_mask"]))


class MeanOfMeans(_Base):
    def get_loss_weight(self, loss_inputs: Any) -> float:
        return 1.0

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs, mask = self.log_probs(loss_inputs, model_forward_output), loss_inputs["loss_mask"]
        count = self.sum_on_cp_group(mask.sum()).clamp(min=1)
        return LossOutput(self.token_mean(-log_probs, mask) / count)


class SoftmaxOfAPart(_Base):
    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        columns = model_forward_output.shape[-1]
        log_probs = model_forward_output.float().log_softmax(-1)
        picked = log_probs.gather(-1, (loss_inputs["labels"] % columns)[..., None]).squeeze(-1)
        return LossOutput(self.token_mean(-picked, loss_inputs["loss_mask"]))


class NanOnAnEmptyPart(_Base):
    """A mean over this rank's tokens: 0 / 0 where it has none."""

    def get_loss_weight(self, loss_inputs: Any) -> float:
        return 1.0

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs, mask = self.log_probs(loss_inputs, model_forward_output), loss_inputs["loss_mask"]
        return LossOutput((-log_probs * mask).sum() / mask.sum())


class UndeclaredField(_Base):
    """A per-token weight that get_fields_and_seqdims does not name."""

    def collate_data_micro_batch(self, iterator: Any) -> Any:
        model_inputs, loss_inputs = super().collate_data_micro_batch(iterator)
        width = loss_inputs["labels"].shape[1]
        loss_inputs["token_weight"] = torch.linspace(0.5, 1.5, width).expand_as(loss_inputs["labels"]).contiguous()
        return model_inputs, loss_inputs

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs = self.log_probs(loss_inputs, model_forward_output)
        weight = loss_inputs["token_weight"][:, : log_probs.shape[1]]
        if weight.shape[1] < log_probs.shape[1]:
            weight = torch.nn.functional.pad(weight, (0, log_probs.shape[1] - weight.shape[1]))
        return LossOutput(self.token_mean(-log_probs * weight, loss_inputs["loss_mask"]))


class Undetermined(_Base):
    """Randomness outside the collation."""

    count = 0

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs = self.log_probs(loss_inputs, model_forward_output)
        noise = torch.rand(log_probs.shape, generator=torch.Generator().manual_seed(torch.seed() % 2**31))
        return LossOutput(self.token_mean(-log_probs * noise, loss_inputs["loss_mask"]))


class NotFinite(_Base):
    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs = self.log_probs(loss_inputs, model_forward_output)
        return LossOutput(self.token_mean(log_probs / 0.0 * 0.0, loss_inputs["loss_mask"]))


class PartOfTheSequence(_Base):
    """A non-linear step over each context-parallel rank's part of a sequence."""

    def get_loss_weight(self, loss_inputs: Any) -> float:
        return float(loss_inputs["loss_mask"].shape[0])

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs = self.log_probs(loss_inputs, model_forward_output)
        part = (log_probs * loss_inputs["loss_mask"]).sum(1)
        return LossOutput(-torch.nn.functional.logsigmoid(part / 100.0).sum())


class ReducedByHand(_Base):
    """A mean over data-parallel ranks inside the loss, which the framework takes again."""

    def calculate_loss(self, loss_inputs: dict[str, Tensor], model_forward_output: Tensor) -> LossOutput:
        log_probs, mask = self.log_probs(loss_inputs, model_forward_output), loss_inputs["loss_mask"]
        from megatron.core import parallel_state

        total = mask.sum().clone()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return LossOutput(self.token_mean(-log_probs, mask) * mask.sum() / total.clamp(min=1))


WRONG = {
    TimesContextSize: ("cp2", "context-parallel size"),
    OverContextSize: ("cp2", "1 / the context-parallel size"),
    TimesDataSize: ("dp2", "the data-parallel size"),
    TimesTensorSize: ("tp2", "the tensor-parallel size"),
    WrongAdjoint: ("cp2", "adjoint"),
    MeanOfMeans: ("mbs1", "mean of means"),
    SoftmaxOfAPart: ("tp2", "part of the vocabulary"),
    NanOnAnEmptyPart: ("cp2", "nan"),
    UndeclaredField: ("cp2", "token_weight"),
    Undetermined: ("one process", "not deterministic"),
    NotFinite: ("one process", "not finite"),
    PartOfTheSequence: ("cp2", "whole sequences"),
    ReducedByHand: ("dp2", ""),
}
"""Flow -> the layout that shows it, and words of the cause; empty: only the disagreement is asked for."""

"""Recorded routing: the experts of each token in each layer with experts, which samples contain and passes replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.errors import DataError

ROUTED_EXPERTS = "routed_experts"
"""Key of a sample, of its outputs, and of a micro-batch's model inputs."""
NOT_RECORDED = -1
"""Index instead of an expert, for a token whose experts the router selects."""


@dataclass(frozen=True)
class RoutingShape:
    """The layers and experts of a recorded routing."""

    layers: tuple[int, ...]
    """Indices of the layers with experts."""
    num_layers: int
    """Number of all layers."""
    num_experts: int
    topk: int
    mode: str
    """Value of `router_replay`: R2 or R3."""

    @property
    def dtype(self) -> torch.dtype:
        """The smallest integer type that holds the index of an expert."""
        return torch.uint8 if self.num_experts <= 256 else torch.int16

    def collate(self, samples: Sequence[Any], lengths: Tensor, width: int) -> Tensor | None:
        """The routing of the samples of a micro-batch; None if they contain none.

        A sample's routing has a row for each input token of the model, or one more for the last token of the sequence;
        a column for each layer with experts, or one for each layer; and `topk` experts, or NOT_RECORDED.

        Args:
            lengths: [N], the model's input tokens of each sequence.
            width: S, tokens of the padded sequences.

        Returns:
            int16 [N, S, layers with experts, topk], NOT_RECORDED on padding.

        Raises:
            DataError: only some samples contain a routing, a sample is not one sequence, or the routing is of another
                number of tokens, layers or experts.
        """
        recorded = [sample.get(ROUTED_EXPERTS) if isinstance(sample, Mapping) else None for sample in samples]
        if all(of_sample is None for of_sample in recorded):
            return None
        if any(of_sample is None for of_sample in recorded):
            raise DataError(f'only some samples contain "{ROUTED_EXPERTS}"; every sample must contain it, or none')
        if len(lengths) != len(samples):
            raise DataError(
                f'the flow collates {len(lengths)} sequences from {len(samples)} samples, and "{ROUTED_EXPERTS}" is of '
                "one sequence; set megatron_lm.train.common.router_replay to disabled"
            )
        result = torch.full((len(samples), width, len(self.layers), self.topk), NOT_RECORDED, dtype=torch.int16)
        for row, (of_sample, length) in enumerate(zip(recorded, lengths.tolist(), strict=True)):
            result[row, :length] = self._checked(of_sample, length)
        return result

    def _checked(self, of_sample: Any, length: int) -> Tensor:
        """A sample's validated routing, int16 [length, layers with experts, topk]."""
        try:
            routing = torch.as_tensor(of_sample)
        except (TypeError, ValueError, RuntimeError):
            raise DataError(f'"{ROUTED_EXPERTS}" is no array of integers; {self._rule(length)}') from None
        counts = (len(self.layers), self.num_layers)
        is_integer = not (routing.is_floating_point() or routing.is_complex() or routing.dtype == torch.bool)
        shape = tuple(routing.shape)
        fits = len(shape) == 3 and shape[0] in (length, length + 1) and shape[1] in counts and shape[2] == self.topk
        if not is_integer or not fits:
            raise DataError(
                f'"{ROUTED_EXPERTS}" of a sample is {routing.dtype} of shape {list(shape)}; {self._rule(length)}'
            )
        if shape[1] != len(self.layers):
            routing = routing[:, list(self.layers)]
        routing = routing[:length].long()
        if routing.numel() and not NOT_RECORDED <= int(routing.min()) <= int(routing.max()) < self.num_experts:
            raise DataError(
                f'"{ROUTED_EXPERTS}" has experts from {int(routing.min())} to {int(routing.max())}, and the model has '
                f"the experts 0 to {self.num_experts - 1}; record it with this model"
            )
        ordered = routing.sort(dim=-1).values
        if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)).any()):
            raise DataError(f'"{ROUTED_EXPERTS}" has one expert twice for a token; record it with this model')
        return routing.to(torch.int16)

    def _rule(self, length: int) -> str:
        layers = f"{len(self.layers)} layers with experts"
        return (
            f"the sequence has {length} input tokens, the model {layers} and {self.topk} experts for each token, so "
            f"give integers of shape [{length}, {len(self.layers)}, {self.topk}], as wrap.forward returns them"
        )

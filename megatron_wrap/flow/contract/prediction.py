"""Multi-token prediction: layer k of D predicts the token after the next k tokens (DeepSeek-V3, arXiv:2412.19437,
section 2.2). Its loss is one term for each layer in addition to the flow's own terms.

The inputs are shifted on the collated micro-batch, where each row is one sequence, so that they cross neither the
borders of sequences that are packed later nor those of context-parallel shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_wrap.errors import FlowError

INPUT_IDS = "mtp_input_ids"
"""Model input, [B, D, S]: at position t of layer k the token t + k."""
LABELS = "mtp_labels"
"""Loss input, [B, D, S]: at position t of layer k the label of position t + k."""
LOSS_MASK = "mtp_loss_mask"
"""Loss input, [B, D, S]: at position t of layer k the loss mask of position t + k, 0 where the sequence has ended."""
SEQDIMS = dict.fromkeys((INPUT_IDS, LABELS, LOSS_MASK), 2)
"""Field -> its sequence dimension."""


@dataclass(frozen=True)
class MultiTokenPrediction:
    """The layers of a model whose losses are added to that of a flow."""

    num_layers: int
    """Number of layers (D)."""
    scaling_factor: float
    """Coefficient of the mean of the layers' losses."""

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the loss terms, first layer first. The metric of each is `NAME_loss`, as in Megatron-LM."""
        return tuple(f"mtp_{layer}" for layer in range(1, self.num_layers + 1))

    @property
    def coefficients(self) -> dict[str, float]:
        """Term -> coefficient."""
        return dict.fromkeys(self.terms, self.scaling_factor / self.num_layers)

    def shifted_inputs(
        self,
        model_inputs: Mapping[str, Any],
        loss_inputs: Mapping[str, Tensor],
        lengths: Tensor,
        pad_id: float,
        flow: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """INPUT_IDS, LABELS and LOSS_MASK of a collated micro-batch.

        Args:
            model_inputs: model inputs with `input_ids` [B, S].
            loss_inputs: loss inputs with `labels` and `loss_mask` [B, S].
            lengths: [B], tokens of each sequence without padding.
            pad_id: the token after the end of a sequence.
            flow: name of the flow's class.

        Raises:
            FlowError: the flow collates no such fields.
        """
        fields = {**model_inputs, **loss_inputs}
        missing = [name for name in ("input_ids", "labels", "loss_mask") if fields.get(name) is None]
        if missing:
            raise FlowError(
                f"{flow}.collate_data_micro_batch: {', '.join(missing)} is missing, which the loss of multi-token "
                "prediction needs; collate it, or set megatron_lm.model.arch.mtp_num_layers to null"
            )
        return (
            self._shifted(fields["input_ids"], lengths, pad_id),
            self._shifted(fields["labels"], lengths, 0),
            self._shifted(fields["loss_mask"], lengths, 0),
        )

    def _shifted(self, values: Tensor, lengths: Tensor, fill: float) -> Tensor:
        """Values shifted for each layer, [B, S] -> [B, D, S], with `fill` where the sequence has ended."""
        columns = torch.arange(values.shape[1])
        layers = []
        for layer in range(1, self.num_layers + 1):
            ended = columns + layer >= lengths[:, None]
            layers.append(values.roll(-layer, dims=1).masked_fill(ended, fill))
        return torch.stack(layers, dim=1)

    def weights(self, loss_mask: Tensor) -> dict[str, float]:
        """Weight of each term: the sum of its layer's LOSS_MASK."""
        return {term: float(loss_mask[:, layer].sum()) for layer, term in enumerate(self.terms)}

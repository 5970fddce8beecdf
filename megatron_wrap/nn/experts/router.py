"""Megatron-Core's MoE router with corrected auxiliary losses, which count each token once and ignore padding.

Megatron-Core accepts a padding mask (transformer/moe/router.py, 0.16 and 0.19), but it averages the z-loss over each
rank's own tokens, divides the loss of a sequence by the mean length, fails on the mask with an expert bias, and divides
the gradient of the global loss by the data-parallel size. Here, each loss of a micro-batch is the mean over its
non-padding tokens on all tensor- and context-parallel ranks, and the loss of a step is the mean over micro-batches and
data-parallel ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from megatron_wrap.nn.experts.expert_choice import ExpertChoice
from megatron_wrap.nn.kernels.available import Selection, can_route, has_triton
from megatron_wrap.nn.kernels.weight_gradients import can_accumulate_weight_gradients
from megatron_wrap.parallel.collectives import reduce_in_place
from megatron_wrap.platform.megatron_core.versions import BALANCE_LOSSES, router_loss_total


class Router(TopKRouter):
    """Routes each token to its top-k experts.

    Args:
        group_score_experts: for group-limited routing, the number of highest scores whose sum is a group's score;
            None: topk / group_topk, as in Megatron-Core.
        arguments: arguments of `TopKRouter`.
    """

    layer_number: int | None

    def __init__(self, *, group_score_experts: int | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.router_replay = self.choice = ExpertChoice(group_score_experts)
        self._selection = _selection(self.config, group_score_experts)
        self._loss_totals: dict[str, Tensor] = {}
        self.register_buffer("load", None, persistent=False)  # the capture of a CUDA graph keeps the values of buffers
        self.load: Tensor | None
        """Counts of this process since `record_load`, without padding, fp32 [experts + 3]: tokens of each expert,
        tokens, sum of the tokens' entropies in nats, dropped assignments; None: not recorded."""

    def _maintain_float32_expert_bias(self) -> None:
        """Keep all buffers in fp32, not only the expert bias as `TopKRouter` does. Megatron-Core's `Float16Module`
        converts them to half precision, in which counts of tokens are rounded from 257 on."""
        for buffer in self.buffers(recurse=False):
            if buffer.dtype in (torch.bfloat16, torch.float16):
                buffer.data = buffer.data.float()

    def leave_decoder(self) -> None:
        """Mark this as the router of a layer outside of the decoder. Its losses have gradients, but are not part of the
        metrics, which cover the decoder's layers only."""
        self.layer_number = None

    def record_load(self) -> None:
        """Record `load` from now on, in passes with gradients."""
        if self.load is None:
            self.load = torch.zeros(self.config.num_moe_experts + 3, device=self.weight.device)
        self.load.zero_()  # graphs add to this very tensor

    def gating(self, input: Tensor) -> Tensor:
        """See `Router.gating` of Megatron-Core."""
        if can_gate(input, self.weight, self.bias, self.config.moe_router_dtype):
            return gate(input, self.weight)
        logits: Tensor = super().gating(input)
        return logits

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `TopKRouter.routing`."""
        result: tuple[Tensor, Tensor]
        if self._selection is not None and not self.choice.is_in_use and can_route(logits, self._selection):
            result = self._route_by_kernel(logits, self._selection, padding_mask)
        else:
            result = super().routing(logits, padding_mask)
        if self.load is not None and torch.is_grad_enabled():
            with torch.no_grad():
                self._add_load(logits.reshape(-1, logits.shape[-1]).float(), result[1], padding_mask)
        return result

    def _route_by_kernel(
        self, logits: Tensor, selection: Selection, padding_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """`TopKRouter.routing` with its scores, top-k and weights by one kernel."""
        from megatron_wrap.nn.kernels.router import route

        batch = logits.shape[1]
        logits = self.apply_z_loss(logits.view(-1, logits.shape[-1]), padding_mask=padding_mask)
        has_gradients = torch.is_grad_enabled()
        balances = self.training and has_gradients and self.is_aux_loss_enabled()
        result = route(
            *(logits, selection, self.expert_bias, padding_mask),
            sequences=batch if self.get_aux_loss_coeff("seq_aux_loss") else 1,
            balances=balances,
            counts=self.enable_expert_bias and has_gradients,
        )
        if result.chosen_counts is not None:
            self.local_tokens_per_expert += _over_sequences(result.chosen_counts)[0]
        probs = result.weights
        if result.score_sums is not None and result.best_counts is not None:
            probs = self._with_balance_losses(probs, result.score_sums, result.best_counts)
        return probs, result.chosen

    def _with_balance_losses(self, probs: Tensor, score_sums: Tensor, counts: Tensor) -> Tensor:
        """The probabilities, with the gradients of the configured load-balancing losses (per sequence, per micro-batch,
        global).

        Args:
            score_sums: fp32 [sequences, experts], local; sums of the scores without padding.
            counts: fp32 [sequences, experts], local; tokens for which an expert has one of the highest scores.
        """
        if self.get_aux_loss_coeff("seq_aux_loss"):
            chosen = _sum(counts, self.tp_cp_group)
            probs = self._with_balance_loss(probs, "seq_aux_loss", score_sums, chosen, chosen, 1 / len(counts))
        of_batch = self.get_aux_loss_coeff("aux_loss"), self.get_aux_loss_coeff("global_aux_loss")
        if any(of_batch):
            score_sums, counts = _over_sequences(score_sums), _over_sequences(counts)
        if of_batch[0]:
            chosen = _sum(counts, self.tp_cp_group)
            probs = self._with_balance_loss(probs, "aux_loss", score_sums, chosen, chosen)
        if of_batch[1]:
            chosen = _sum(counts, self.tp_dp_cp_group)
            self.global_tokens_per_expert += chosen[0]
            load, replicas = self.global_tokens_per_expert[None], self.tp_dp_cp_group.size() // self.tp_cp_group.size()
            probs = self._with_balance_loss(probs, "global_aux_loss", score_sums, chosen, load, replicas)
        return probs

    def _with_balance_loss(
        self, probs: Tensor, kind: str, score_sums: Tensor, counts: Tensor, load: Tensor, weight: float = 1.0
    ) -> Tensor:
        """The probabilities, with the gradient of a loss, whose value is logged.

        Args:
            score_sums, counts, load: see `balance`.
            weight: factor of the loss in addition to its coefficient.
        """
        from megatron_wrap.nn.kernels.router import balance

        total = self._loss_total(BALANCE_LOSSES[kind], score_sums.device)
        coefficient = self.get_aux_loss_coeff(kind)
        scale = weight * self.num_experts
        gradient = balance(score_sums.detach(), counts, load, self.topk, scale, coefficient, total)
        return with_loss_gradient(probs, score_sums, gradient)

    def _loss_total(self, name: str, device: torch.device) -> Tensor:
        """The sum of a loss without its coefficient, a scalar on the device, to which each pass adds this process's
        share."""
        if name not in self._loss_totals:
            layer, layers = self.layer_number, self.config.num_layers
            total = torch.zeros((), device=device) if layer is None else router_loss_total(name, layer, layers, device)
            self._loss_totals[name] = total
        return self._loss_totals[name]

    def attach_and_log_load_balancing_loss(
        self,
        activation: Tensor,
        aux_loss_coeff: float,
        aux_loss: Tensor,
        aux_loss_name: str,
        reduce_group: Any,
        **unused: Any,
    ) -> Tensor:
        """See `TopKRouter`; one operation on the device, and no scaling by tokens (engine/passes/loss.py)."""
        self._loss_total(aux_loss_name, aux_loss.device).add_(aux_loss.detach(), alpha=1.0 / aux_loss_coeff)
        attached: Tensor = MoEAuxLossAutoScaler.apply(activation, aux_loss)
        return attached

    def _add_load(self, logits: Tensor, routing_map: Tensor, padding_mask: Tensor | None) -> None:
        """Add the tokens of a micro-batch: logits and routing_map [tokens, experts], padding_mask True on padding."""
        scores = logits.sigmoid() if self.score_function == "sigmoid" else logits.softmax(dim=-1)
        shares = scores / scores.sum(dim=-1, keepdim=True)
        entropies = torch.special.entr(shares).sum(dim=-1)
        counted = torch.ones_like(entropies) if padding_mask is None else (~padding_mask.reshape(-1)).float()
        chosen = (routing_map * counted[:, None]).sum(dim=0)
        tokens = counted.sum()
        assert self.load is not None
        self.load += torch.cat(
            [chosen, torch.stack([tokens, (entropies * counted).sum(), tokens * self.topk - chosen.sum()])]
        )

    def apply_z_loss(self, logits: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        """Add the gradient of coefficient * mean of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, equation 5).

        Args:
            logits: [tokens, experts], local.
            padding_mask: bool with an element for each token, True on padding.
        """
        coefficient = self.config.moe_z_loss_coeff
        if not coefficient or not self.training or not torch.is_grad_enabled():
            return logits
        squares = torch.logsumexp(logits.float(), dim=-1).square()
        count = torch.full((), float(squares.numel()), device=squares.device)
        if padding_mask is not None:
            squares = squares.masked_fill(padding_mask.reshape(-1), 0.0)
            count = count - padding_mask.sum()
        share = coefficient * squares.sum() / _sum(count, self.tp_cp_group).clamp(min=1.0)
        return self.attach_and_log_load_balancing_loss(logits, coefficient, share, "z_loss", self.tp_cp_group)

    def _apply_seq_aux_loss(
        self,
        probs: Tensor,
        scores_for_aux_loss: Tensor,
        routing_map: Tensor,
        seq_length: int,
        bsz: int,
        with_padding_mask: bool = False,
    ) -> Tensor:
        """The load-balancing loss of each sequence, averaged over sequences. Rows of padding are zero."""
        coefficient = self.get_aux_loss_coeff("seq_aux_loss")
        if not coefficient:
            return probs
        by_sequence = (seq_length, bsz, -1)
        chosen = _sum(routing_map.reshape(by_sequence).sum(dim=0).float(), self.tp_cp_group)
        tokens = (chosen.sum(dim=-1, keepdim=True) / self.topk).clamp(min=1.0)
        mean_scores = scores_for_aux_loss.reshape(by_sequence).sum(dim=0) / tokens
        share = coefficient * self.num_experts / self.topk * (chosen / tokens * mean_scores).sum() / bsz
        return self.attach_and_log_load_balancing_loss(
            probs, coefficient, share, BALANCE_LOSSES["seq_aux_loss"], self.tp_cp_group
        )

    def _apply_global_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        """The load-balancing loss with the experts' load over all micro-batches of the step so far and all
        data-parallel ranks (arXiv:2501.11873)."""
        coefficient = self.get_aux_loss_coeff("global_aux_loss")
        if not coefficient:
            return probs
        chosen = _sum(routing_map.sum(dim=0).float(), self.tp_dp_cp_group)
        tokens = (chosen.sum() / self.topk).clamp(min=1.0)
        self.global_tokens_per_expert += chosen
        load = self.global_tokens_per_expert / self.global_tokens_per_expert.sum().clamp(min=1.0)
        share = coefficient * self.num_experts * (load * scores_for_aux_loss.sum(dim=0)).sum() / tokens
        replicas = self.tp_dp_cp_group.size() // self.tp_cp_group.size()
        return self.attach_and_log_load_balancing_loss(
            probs, coefficient, share * replicas, BALANCE_LOSSES["global_aux_loss"], self.tp_cp_group
        )

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        """Count each expert's non-padding tokens, for the bias update after the step (finalize_model_grads.py)."""
        if self.enable_expert_bias and torch.is_grad_enabled():
            counted = routing_map if padding_mask is None else routing_map & ~padding_mask[:, None]
            with torch.no_grad():
                self.local_tokens_per_expert += counted.sum(dim=0)


def _selection(config: Any, group_score_experts: int | None) -> Selection | None:
    """The selection of a configuration, for the kernel; None: other code or Transformer Engine's kernel computes it."""
    score, kind = config.moe_router_score_function, config.moe_router_load_balancing_type
    others = kind in ("sinkhorn", "quantile_balancing") or config.moe_expert_capacity_factor is not None
    if others or score not in ("softmax", "sigmoid") or config.moe_router_fusion:
        return None
    topk, groups, group_topk = config.moe_router_topk, config.moe_router_num_groups, config.moe_router_group_topk
    scale = config.moe_router_topk_scaling_factor or 1.0
    selection = Selection(topk, score == "sigmoid", bool(config.moe_router_pre_softmax), scale)
    if not group_topk:
        return selection
    score_experts = group_score_experts or topk // group_topk
    return selection._replace(groups=groups, group_topk=group_topk, group_score_experts=score_experts)


def _sum(tensor: Tensor, group: Any) -> Tensor:
    """All-reduce (sum) over the group, detached."""
    if group.size() == 1:
        return tensor.detach()
    total = tensor.detach().clone()
    reduce_in_place(total, "sum", group)
    return total


def _over_sequences(sums: Tensor) -> Tensor:
    """Sum over sequences: [sequences, experts] -> [1, experts]."""
    return sums if len(sums) == 1 else sums.sum(dim=0, keepdim=True)


def can_gate(hidden: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: str | None) -> bool:
    """Whether `gate` supports these tensors: fp32 logits of bf16 tensors on a GPU, without a bias."""
    halves = hidden.dtype == weight.dtype == torch.bfloat16
    return hidden.is_cuda and halves and bias is None and router_dtype == "fp32" and _multiplies(hidden.device)


@functools.cache
def _multiplies(device: torch.device) -> bool:
    return can_accumulate_weight_gradients(device)


def gate(hidden: Tensor, weight: Tensor) -> Tensor:
    """fp32 logits [..., experts] of hidden states [..., H] and a weight [experts, H], both bf16.

    Results are those of fp32 matmuls: bf16 tensors are multiplied exactly and added up in fp32, and the gradient of the
    logits is split into three bf16 tensors that add up to it. The hidden states are not copied to fp32.
    """
    result: Tensor = _Gate.apply(hidden, weight)
    return result


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        logits = _fp32_matmul(hidden.reshape(-1, hidden.shape[-1]), weight.t())
        return logits.view(*hidden.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        parts = _split(grads[0].reshape(-1, weight.shape[0]))
        of_hidden = of_weight = None
        if ctx.needs_input_grad[0]:
            of_hidden = (parts @ torch.cat((weight, weight, weight))).view(hidden.shape)
        if ctx.needs_input_grad[1]:
            of_parts = _fp32_matmul(parts.t(), hidden.reshape(-1, hidden.shape[-1]))
            of_weight = of_parts.view(3, *weight.shape).sum(0).to(weight.dtype)
        return of_hidden, of_weight


def _split(values: Tensor) -> Tensor:
    """Three tensors side by side, bf16 [N, 3 * columns], with 8 of the fp32 values' 24 bits each."""
    if values.is_cuda and has_triton():
        from megatron_wrap.nn.kernels.router import split

        return split(values)
    parts = []
    for _ in range(3):
        parts.append(values.bfloat16())
        values = values - parts[-1]
    return torch.cat(parts, dim=1)


def _fp32_matmul(left: Tensor, right: Tensor) -> Tensor:
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()  # as in the tests


def with_loss_gradient(activation: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
    """Attach a loss's gradient to `activation`, which is returned. In its backward pass `values` get `gradient`, times
    the scale of auxiliary losses that Megatron-Core's schedule sets for each micro-batch. This is
    `MoEAuxLossAutoScaler` for a loss with a known derivative.

    Args:
        gradient: the derivative of the loss by `values`, in their shape.
    """
    result: Tensor = _WithLossGradient.apply(activation, values, gradient)
    return result


class _WithLossGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return activation

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = ctx.saved_tensors
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        return grads[0], gradient if scale is None else gradient * scale, None

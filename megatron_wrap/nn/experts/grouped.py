"""The experts of one process as two stacks of linear layers, each computed in one grouped matmul."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.activations import quick_gelu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensorFactory
from megatron.core.tensor_parallel import layers, set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import functional

from megatron_wrap.nn.experts.dispatcher import graph_ends_before_exchange
from megatron_wrap.nn.experts.products import DeferredGradient, RowEnds, grouped_linear
from megatron_wrap.nn.kernels.available import has_triton
from megatron_wrap.platform.megatron_core.first_gradients import replaces_first

_GATE_GAINS: dict[Any, float] = {functional.silu: 1.0, quick_gelu: 1.702}
"""Activation x * sigmoid(gain * x) -> its gain (megatron/core/activations.py)."""


class GroupedExperts(MegatronModule):
    """The experts of an expert-parallel process, instead of Megatron-Core's `SequentialMLP` and `TEGroupedMLP`.

    Args:
        num_local_experts: experts of this process (E).
        config: Megatron-Core's configuration; its activation, clamp, offset and biases apply.
        pg_collection: process groups, of which `ep`, `expt_tp` and `expt_dp` are used.
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any, name: str | None = None) -> None:
        super().__init__(config=config)
        self.num_local_experts = num_local_experts
        tensor = pg_collection.expt_tp.size()
        width, hidden = config.moe_ffn_hidden_size // tensor, config.moe_latent_size or config.hidden_size
        inner = 2 * width if config.gated_linear_unit else width
        self.linear_fc1 = GroupedLinear(num_local_experts, hidden, inner, config, pg_collection, split_dim=0)
        self.linear_fc2 = GroupedLinear(num_local_experts, width, hidden, config, pg_collection, split_dim=1)

    def forward(self, rows: Tensor, tokens_per_expert: Tensor | RowEnds, weights: Tensor) -> tuple[Tensor, None]:
        """Outputs of the experts, times the weights of the rows.

        Args:
            rows: [R, H], sorted by local expert.
            tokens_per_expert: number of rows of each local expert, integers [E] on any device; or the ends of their
                rows.
            weights: [R], the router's weight of each row.

        Returns:
            [R, H] in the dtype of the rows, a partial sum if the experts are tensor-parallel; and no bias.
        """
        if self.config.moe_apply_probs_on_input:
            rows, weights = (weights.unsqueeze(-1) * rows).to(rows.dtype), torch.ones_like(weights)
        if isinstance(tokens_per_expert, RowEnds):
            ends = tokens_per_expert.ends
        else:
            counts = torch.as_tensor(tokens_per_expert).to(rows.device, non_blocking=True)
            ends = counts.cumsum(0).to(torch.int32)
        inner = self.linear_fc1(rows, ends)
        outputs = self.linear_fc2(self._activation(inner, weights), ends, weights)
        return outputs, None

    def _activation(self, inner: Tensor, weights: Tensor) -> Tensor:
        config = self.config
        clamp, offset = config.activation_func_clamp_value, config.glu_linear_offset
        if not config.gated_linear_unit:
            return (config.activation_func(inner) * weights.unsqueeze(-1)).to(inner.dtype)
        gain = _GATE_GAINS.get(config.activation_func)
        if gain is not None and inner.is_cuda and has_triton():
            from megatron_wrap.nn.kernels.weighted_swiglu import weighted_swiglu

            return weighted_swiglu(inner, weights, gain, clamp, offset)
        gate, up = inner.chunk(2, dim=-1)
        if clamp is not None:
            gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
        return (config.activation_func(gate) * (up + offset) * weights.unsqueeze(-1)).to(inner.dtype)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Shards with the names and shapes of Megatron-Core's experts, so that both can load each other's
        checkpoints."""
        result: dict[str, Any] = {}
        for child in ("linear_fc1", "linear_fc2"):
            linear, gated = getattr(self, child), child == "linear_fc1" and bool(self.config.gated_linear_unit)
            result |= linear.sharded_parameters(
                f"{prefix}{child}.", f"{prefix}experts.{child}.", sharded_offsets, gated
            )
            adapter: Any = dict(self.named_children()).get(f"{child}_adapter")
            if adapter is not None:
                result |= adapter.sharded_parameters(linear, f"{prefix}{child}_adapter.", gated)
        return result

    def backward_dw(self) -> None:
        """No-op: weight gradients are computed in the backward pass."""


class GroupedLinear(torch.nn.Module):
    """One linear layer for each of E experts; `weight[e]` [out, in] is that of expert e, as in `torch.nn.Linear`.

    Args:
        split_dim: dimension of an expert's weight that is sharded over the experts' tensor parallelism: 0 (outputs) or
            1 (inputs).
    """

    def __init__(
        self, experts: int, inputs: int, outputs: int, config: Any, pg_collection: Any, split_dim: int
    ) -> None:
        super().__init__()
        self.split_dim = split_dim
        self._deferred: DeferredGradient | None = None
        self.accumulate = bool(config.gradient_accumulation_fusion)
        tensor = pg_collection.expt_tp.size()
        self.bias_share = 1.0 if split_dim == 0 else 1.0 / tensor  # outputs of tensor-parallel experts are added up
        self._groups = pg_collection
        # where Megatron-Core's linear layers are allocated; on CPUs its modules see another torch (platform/cpu)
        device = layers.torch.cuda.current_device()
        memory = {"dtype": config.params_dtype, "device": device}
        self.weight = torch.nn.Parameter(torch.empty(experts, outputs, inputs, **memory))
        self.bias = torch.nn.Parameter(torch.zeros(experts, outputs, **memory)) if config.add_bias_linear else None
        if self.accumulate and (config.cuda_graph_impl == "none" or graph_ends_before_exchange(config)):
            replaces_first(self.weight)
        # Each rank's shard counts in the gradient norm.
        set_tensor_model_parallel_attributes(self.weight, is_parallel=True, dim=1 + split_dim, stride=1)
        if self.bias is not None and (split_dim == 0 or tensor == 1):
            set_tensor_model_parallel_attributes(self.bias, is_parallel=True, dim=1, stride=1)

    def forward(self, rows: Tensor, ends: Tensor, weights: Tensor | None = None) -> Tensor:
        """Apply the experts' layers, [R, in] -> [R, out]; `ends` as in `grouped_linear`; the bias is multiplied by
        `weights` [R], one for each row, unless they are None."""
        deferred, self._deferred = self._deferred, None
        outputs = grouped_linear(rows, self.weight, ends, self.accumulate, deferred)
        if self.bias is None:
            return outputs
        counts = ends.diff(prepend=ends.new_zeros(1)).long()
        bias = _bias_of_rows(self.bias, counts, rows.shape[0], self.bias_share)
        return outputs + (bias if weights is None else (bias * weights.unsqueeze(-1)).to(outputs.dtype))

    def defer_gradient(self) -> DeferredGradient:
        """Defer the weight's gradient of the next forward pass: the backward pass of that pass does not compute it."""
        self._deferred = DeferredGradient(self.weight)
        return self._deferred

    def sharded_parameters(
        self, name: str, key: str, sharded_offsets: tuple[Any, ...], gated: bool
    ) -> dict[str, ShardedTensor | ShardedTensorFactory]:
        """name + "weight" -> its shard of the global tensor [all experts, out, in] with the key + "weight"; the bias
        likewise.

        Args:
            gated: the outputs are a gate projection, then an up projection, each sharded by itself.
        """
        result: dict[str, ShardedTensor | ShardedTensorFactory] = {}
        for child, parameter in self.named_parameters():
            split = 1 + self.split_dim if child == "weight" or self.split_dim == 0 else None
            result[name + child] = self.sharded(key + child, parameter, sharded_offsets, split, gated)
        return result

    def sharded(
        self, key: str, parameter: Tensor, sharded_offsets: tuple[Any, ...], split: int | None, gated: bool
    ) -> ShardedTensor | ShardedTensorFactory:
        """The shard of a global tensor [all experts, ...], of which `parameter` has the local experts; `split` is the
        dimension that the experts' tensor parallelism splits, None: none."""
        expert, tensor, data = self._groups.ep, self._groups.expt_tp, self._groups.expt_dp
        first = len(sharded_offsets)
        offsets = (*sharded_offsets, (first, expert.rank(), expert.size()))
        replica = (0, 0 if split is not None else tensor.rank(), data.rank())

        def shard(key: str, values: Tensor, replica_id: ReplicaId, index: int, count: int) -> ShardedTensor:
            within = () if split is None else ((first + split, index, count),)
            return ShardedTensor.from_rank_offsets(
                key, values, *offsets, *within, replica_id=replica_id, prepend_axis_num=first
            )

        if not gated:
            return shard(key, parameter, replica, tensor.rank(), tensor.size())

        # the optimizer builds the shards of its states under keys of their own
        def halves(key: str, values: Tensor, replica_id: ReplicaId, *_range: Any) -> list[ShardedTensor]:
            return [
                shard(key, half, replica_id, tensor.rank() + number * tensor.size(), 2 * tensor.size())
                for number, half in enumerate(values.chunk(2, dim=1))
            ]

        def joined(parts: Any) -> Tensor:
            return torch.cat(parts, dim=1)

        return ShardedTensorFactory(key, parameter, halves, joined, replica)


class _BiasOfRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, bias: Tensor, counts: Tensor, total: int, share: float) -> Tensor:
        ctx.save_for_backward(counts)
        return (bias * share).repeat_interleave(counts, dim=0, output_size=total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (counts,) = ctx.saved_tensors
        # unsafe: without the check of the lengths, which would wait for a GPU
        sums = torch.segment_reduce(grads[0].float().contiguous(), "sum", lengths=counts, axis=0, unsafe=True)
        return sums.to(grads[0].dtype), None, None, None


def _bias_of_rows(bias: Tensor, counts: Tensor, total: int, share: float) -> Tensor:
    """The bias [E, out] of each row's expert times `share`, [total, out]. The gradient is that of the whole bias, of
    which each tensor-parallel process has a copy; it is added up in fp32, in the order of the rows."""
    result: Tensor = _BiasOfRows.apply(bias, counts, total, share)
    return result

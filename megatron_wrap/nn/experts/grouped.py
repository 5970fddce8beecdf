"""The experts of one process as two stacks of linear layers, each computed in one grouped matmul; and a low-rank
adapter for each expert, computed in two, with the formula of peft's ParamWrapper.

With tensor-parallel experts one factor of each expert's adapter is whole and the other is sharded as in
`nn/adapters/lora.py`: A of the first layer and B of the second are whole. An adapter's output is in the parallel state
of its base's output: a rank's columns after the first layer, a partial sum after the second. Every rank has the rows of
all tokens of its experts, and its gradient of a whole factor is a part of the sum over the ranks of an expert, which
the backward pass adds up."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.activations import quick_gelu
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ReplicaId, ShardedTensorFactory
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    layers,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor
from torch.nn import functional

from megatron_wrap.nn.experts.dispatcher import graph_ends_before_exchange
from megatron_wrap.nn.experts.matmuls import DeferredGradient, RowEnds, grouped_linear
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
            from megatron_wrap.nn.kernels.swiglu import weighted_swiglu

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


class ExpertAdapter(torch.nn.Module):
    """The adapters of E local experts for one `GroupedLinear`; its parameters are `lora_A_NAME` [E, rank, in] and
    `lora_B_NAME` [E, out, rank].

    Args:
        base: the layer, whose outputs it adds to.
        name: name of the adapted tensor in Hugging Face's model, such as gate_up_proj.
        scale: factor of the product B A.
        layer: index of the transformer layer in the model, for names in checkpoints.
        tensor_parallel: process group of the experts' tensor parallelism.
    """

    def __init__(
        self, base: GroupedLinear, name: str, rank: int, scale: float, layer: int, tensor_parallel: Any
    ) -> None:
        super().__init__()
        self.name, self.scale, self.layer = name, scale, layer
        self.enabled = True
        self.adapter_name = "default"
        self._group = tensor_parallel
        self._sharded = "lora_B" if base.split_dim == 0 else "lora_A"
        self.base_weight = lambda: base.weight  # not a submodule, which would list the base twice
        experts, outputs, inputs = base.weight.shape
        self._add_factor(f"lora_A_{name}", base.weight.new_empty(experts, rank, inputs))
        self._add_factor(f"lora_B_{name}", base.weight.new_empty(experts, outputs, rank))
        base.register_forward_hook(self._add_to_output)

    def _add_factor(self, name: str, values: Tensor) -> None:
        parameter: Any = torch.nn.Parameter(values)
        # The gradient norm counts each shard, and a whole factor on one of an expert's ranks; ranks of tensor
        # parallelism may have other experts, so Megatron-Core's rule for factors without this mark does not hold.
        split = self.split_dim(name)
        parameter.allreduce = False  # gradients are reduced over the experts' data parallelism
        set_tensor_model_parallel_attributes(parameter, True, -1 if split is None else split, 1)
        if split is None and self._group.rank() > 0:
            parameter.shared = True
        self.register_parameter(name, parameter)

    def split_dim(self, factor: str) -> int | None:
        """Dimension of a factor that is sharded over the experts' tensor parallelism; None: it is whole."""
        if not factor.startswith(self._sharded):
            return None
        return 1 if self._sharded == "lora_B" else 2

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Outputs [R, out] for rows [R, in]; `ends` as in `grouped_linear`."""
        product = grouped_linear(rows, self._summed("lora_A"), ends)
        return grouped_linear(product, self._summed("lora_B") * self.scale, ends)

    def delta(self, expert: int) -> Tensor:
        """The scaled product B A of a local expert in the shape of its weight, fp32 [out, in] on this rank."""
        first, second = (self.get_parameter(f"{kind}_{self.name}")[expert].float() for kind in ("lora_A", "lora_B"))
        return second @ first * self.scale

    def _summed(self, kind: str) -> Tensor:
        """A factor; the gradients of a whole one are added up over the ranks of an expert."""
        factor: Tensor = self.get_parameter(f"{kind}_{self.name}")
        if kind == self._sharded:
            return factor
        whole: Tensor = copy_to_tensor_model_parallel_region(factor, group=self._group)
        return whole

    def _add_to_output(self, _base: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + self(inputs[0], inputs[1]) if self.enabled else output

    def sharded_parameters(self, base: GroupedLinear, prefix: str, gated: bool) -> dict[str, Any]:
        """Megatron-Core's description of the factors for checkpoints; each layer has tensors of its own."""
        result = {}
        for name, parameter in self.named_parameters():
            split = self.split_dim(name)
            key = f"{prefix}{self.layer}.{name}"
            result[prefix + name] = base.sharded(key, parameter, (), split, gated and split == 1)
        return result

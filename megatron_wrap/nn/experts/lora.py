"""One low-rank adapter for each expert, computed in two grouped matmuls; the formula is that of peft's ParamWrapper.

With tensor-parallel experts one factor of each expert is whole and the other is sharded as in `nn/adapters/lora.py`: A
of the first layer and B of the second are whole. An adapter's output is in the parallel state of its base's output: a
rank's columns after the first layer, a partial sum after the second. Every rank has the rows of all tokens of its
experts, and its gradient of a whole factor is a part of the sum over the ranks of an expert, which the backward pass
adds up.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from torch import Tensor

from megatron_wrap.nn.experts.grouped import GroupedLinear
from megatron_wrap.nn.experts.products import grouped_linear


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

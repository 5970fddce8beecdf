"""Gated delta networks (arXiv:2412.06464) instead of attention, as in Qwen3-Next and Qwen3.5. Import this module only
after the platform is installed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    layers,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint, sharded_state_dict_default
from torch import Tensor, nn

from megatron_wrap.errors import PlatformError
from megatron_wrap.nn.linear_attention.gated_delta_rule import PackedRow, RecurrentState
from megatron_wrap.nn.linear_attention.implementations import causal_convolution, convolved_heads, gated_rms_norm, recur
from megatron_wrap.parallel.head_exchange import to_whole_heads, to_whole_sequences


@dataclass
class GatedDeltaNetSubmodules:
    """Classes of the two linear layers, with the arguments of Megatron-Core's."""

    in_proj: Any = None
    out_proj: Any = None


class GatedDeltaNet(MegatronModule):
    """Short convolution of queries, keys and values, the gated delta rule, and a norm gated by the input.

    Megatron-Core's class of this name (ssm/gated_delta_net) needs the package flash-linear-attention even on a CPU, has
    no generation, and in 0.16 neither packed rows nor context parallelism. Here tensor-parallel ranks have a share of
    the heads; context-parallel ranks exchange their share of each sequence for whole sequences with a share of the
    heads, so that the state passes through whole sequences.

    The rows of `in_proj` and the channels of the convolution are ordered by key head, so a shard of either is a range:
    the query, the key, the values of the head, their betas, their decays, and their gates, which the convolution and
    the rule do not need. Parameters, of this rank's heads:

        in_proj.weight   [key heads * (2 d_k + values * (2 d_v + 2)), hidden size], values per key head
        conv_weight      [key heads * (2 d_k + values * d_v), K]
        A_log, dt_bias   [heads]: log_decay = -exp(A_log) softplus(input + dt_bias)
        norm_weight      [d_v], not zero-centered
        out_proj.weight  [hidden size, heads * d_v]

    Args:
        config: Megatron-Core's; reads the fields `linear_...`, `layernorm_epsilon` and `sequence_parallel`.
        pg_collection: contains the groups `tp` and `cp`; default: Megatron-Core's global ones.
    """

    def __init__(
        self,
        config: Any,
        submodules: GatedDeltaNetSubmodules,
        layer_number: int,
        pg_collection: Any = None,
        **ignored: Any,
    ) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.tp_group = getattr(pg_collection, "tp", None) or parallel_state.get_tensor_model_parallel_group()
        cp_group = getattr(pg_collection, "cp", None) or parallel_state.get_context_parallel_group()
        self.cp_group: Any = cp_group if cp_group.size() > 1 else None
        """Context-parallel group; None without context parallelism, and in generation."""
        self.key_width, self.value_width = config.linear_key_head_dim, config.linear_value_head_dim
        self.values_per_key = config.linear_num_value_heads // config.linear_num_key_heads
        self.recurrent_state: RecurrentState | None = None
        """State of the tokens processed in generation; None outside of generation."""
        heads, hidden = config.linear_num_value_heads, config.hidden_size
        linear = {"config": config, "bias": False, "is_expert": False, "tp_group": self.tp_group}
        self.in_proj = build_module(
            submodules.in_proj,
            hidden,
            config.linear_num_key_heads * sum(self._widths),
            init_method=config.init_method,
            gather_output=False,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **linear,
        )
        self.out_proj = build_module(
            submodules.out_proj,
            heads * self.value_width,
            hidden,
            init_method=config.output_layer_init_method,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **linear,
        )
        channels = config.linear_num_key_heads * self._convolved
        self.conv_weight = self._sharded(channels, config.linear_conv_kernel_dim)
        self.A_log, self.dt_bias = self._sharded(heads), self._sharded(heads)
        self.norm_weight = self._parameter(self.value_width)
        self.norm_weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._reset_parameters()

    @property
    def _widths(self) -> tuple[int, int, int, int]:
        """Rows of `in_proj` for one key head: input of the convolution, betas, decays, gates."""
        return (
            self._convolved,
            *(self.values_per_key, self.values_per_key),
            self.values_per_key * self.value_width,
        )

    @property
    def _convolved(self) -> int:
        return 2 * self.key_width + self.values_per_key * self.value_width

    def _parameter(self, *shape: int) -> nn.Parameter:
        # on the device of Megatron-Core's linear layers; on CPUs its modules see another torch (platform/cpu)
        device = layers.torch.cuda.current_device()
        return nn.Parameter(torch.empty(*shape, dtype=self.config.params_dtype, device=device))

    def _sharded(self, rows: int, *columns: int) -> nn.Parameter:
        parameter = self._parameter(rows // self.tp_group.size(), *columns)
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    @torch.no_grad()
    def _reset_parameters(self) -> None:
        """Set placeholder values; training initializes all weights, alike on every layout."""
        self.conv_weight.fill_(1.0 / self.conv_weight.shape[1])
        self.A_log.fill_(math.log(2.0))
        self.dt_bias.fill_(1.0)
        self.norm_weight.fill_(1.0)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedRow | None = None,
        **ignored: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Hidden states [s, b, h] (with sequence parallelism [s / tp, b, h]) -> the same shape, and None for the bias,
        as in Megatron-Core's attention. The rule is causal and padding follows the tokens, so the mask is not needed.

        Args:
            packed_seq_params: the sequences of a packed row, which cover all tokens; b is then 1.

        Raises:
            PlatformError: an inference context without `recurrent_state`.
        """
        if inference_context is not None and self.recurrent_state is None:
            raise PlatformError("linear attention generates with a recurrent state; use wrap.generate")
        mixed, _ = self.in_proj(hidden_states)
        mixed = mixed.unflatten(-1, (-1, sum(self._widths)))  # [s, b, key heads, width]
        if self.cp_group is None:
            output, gate = self._over_sequences(mixed, packed_seq_params)
            assert gate is not None
        else:
            *widths, gate_width = self._widths
            recurrent, gate = mixed.split((sum(widths), gate_width), dim=-1)
            size = self.cp_group.size()
            lengths = (mixed.shape[0] * size,) if packed_seq_params is None else packed_seq_params.lengths
            whole, _ = self._over_sequences(to_whole_sequences(recurrent, lengths, self.cp_group), packed_seq_params)
            output = to_whole_heads(whole.transpose(0, 1), lengths, self.cp_group).transpose(0, 1)
            gate = gate.transpose(0, 1)
        weight = self.norm_weight
        if not self.config.sequence_parallel:  # else Megatron-Core adds up the ranks' gradients, each of its heads
            weight = copy_to_tensor_model_parallel_region(weight, group=self.tp_group)
        output = gated_rms_norm(output, gate.reshape(output.shape), weight, self.config.layernorm_epsilon)
        projected: tuple[Tensor, Tensor | None] = self.out_proj(output.transpose(0, 1).flatten(2))
        return projected

    def _over_sequences(self, mixed: Tensor, packed: PackedRow | None) -> tuple[Tensor, Tensor | None]:
        """Convolution and rule over whole sequences, of the key heads of this tensor- and context-parallel rank.

        Args:
            mixed: [s, b, key heads, width], with or without the gates.

        Returns:
            [b, s, heads, d_v], and the gates [b, s, key heads, values * d_v] if `mixed` has them.
        """
        kept = self.recurrent_state
        conv_weight, a_log, dt_bias = (self._of_rank(each) for each in (self.conv_weight, self.A_log, self.dt_bias))
        convolved_widths = (self.key_width, self.key_width, self.values_per_key * self.value_width)
        widths: tuple[int, ...] = (*convolved_widths, *self._widths[1:])
        if mixed.shape[-1] < sum(widths):
            widths = widths[:-1]
        if kept is None:
            parts = convolved_heads(mixed, conv_weight, widths, packed)
        else:
            before, others = mixed.transpose(0, 1).split((self._convolved, sum(widths[3:])), dim=-1)
            inputs = kept.without_padding(before.flatten(2))
            convolved = causal_convolution(inputs, conv_weight, before=kept.inputs).unflatten(-1, before.shape[2:])
            parts = (*convolved.split(widths[:3], dim=-1), *others.split(widths[3:], dim=-1))
        query, key, value, beta, decay, *gate = parts
        value = value.unflatten(-1, (-1, self.value_width)).flatten(2, 3)
        log_decay = -a_log.float().exp() * F.softplus(decay.flatten(2).float() + dt_bias.float())
        output, state = recur(
            *(query, key, value, log_decay, beta.flatten(2).sigmoid(), packed),
            *(None if kept is None else kept.heads, kept is not None),
            trains=self.training or torch.is_grad_enabled(),
        )
        if kept is not None:
            assert state is not None
            kept.keep(inputs, conv_weight.shape[1] - 1, state)
        return output, gate[0] if gate else None

    def _of_rank(self, parameter: Tensor) -> Tensor:
        """The rows of this context-parallel rank's heads."""
        if self.cp_group is None:
            return parameter
        return parameter.chunk(self.cp_group.size())[self.cp_group.rank()]

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The parameters for a checkpoint, split by heads over tensor-parallel ranks."""
        parameters: dict[str, Any] = {}
        self._save_to_state_dict(parameters, "", keep_vars=True)
        groups = {"tp_group": self.tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        axes = dict.fromkeys(("conv_weight", "A_log", "dt_bias"), 0)
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            parameters, prefix, axes, sharded_offsets, **groups
        )
        for name, module in self.named_children():
            sharded |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata)
        return sharded

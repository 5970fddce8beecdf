"""Shared by the MoE families: keys of a softmax router, and the weight table of an MoE layer."""

from __future__ import annotations

from typing import Any

from megatron_wrap.bridge.families.decoder import Sizes, Table, mlp_table
from megatron_wrap.bridge.mapping import tensors as weights
from megatron_wrap.config.schema.derived import moe_ffn_hidden_size
from megatron_wrap.config.schema.model import ArchConfig

ROUTER: dict[str, Any] = {
    "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False,
    "moe_router_score_function": "softmax",
    "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_router_group_score_experts": None,
    "moe_router_enable_expert_bias": False,
}
"""Values of a router with a softmax over the chosen experts; a family overrides those that differ."""


def experts_table(
    arch: ArchConfig,
    sizes: Sizes,
    ours: str,
    theirs: str,
    *,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_expert",
) -> Table:
    """The MLP of an MoE layer: router, experts, and shared experts if there are any.

    Args:
        ours, theirs: prefixes of the MLP in Megatron-Core and Hugging Face.
        names: of an expert's gate, up and down projections.
        shared: name of the shared experts; their gate is `{shared}_gate`.
    """
    assert arch.num_experts is not None
    table: Table = {ours + "router.weight": weights.replicated(theirs + "gate.weight", arch.num_experts, sizes.hidden)}
    if arch.moe_router_enable_expert_bias:
        bias = weights.replicated(theirs + "gate.e_score_correction_bias", arch.num_experts)
        table[ours + "router.expert_bias"] = weights.in_fp32(bias)
    ffn = moe_ffn_hidden_size(arch)
    for number in range(arch.num_experts):
        gate, up, down = (f"{theirs}experts.{number}.{name}.weight" for name in names)
        mine = f"{ours}experts.{number}."
        table[mine + "linear_fc1.weight"] = weights.gated(gate, up, ffn, sizes.hidden)
        table[mine + "linear_fc2.weight"] = weights.row(down, sizes.hidden, ffn)
    shared_ffn = arch.moe_shared_expert_intermediate_size
    if shared_ffn is not None:
        table |= mlp_table(shared_ffn, arch, sizes, ours + "shared_experts.", f"{theirs}{shared}.")
        if arch.moe_shared_expert_gate:
            gate = f"{theirs}{shared}_gate.weight"
            table[ours + "shared_experts.gate_weight"] = weights.replicated(gate, 1, sizes.hidden)
    return table

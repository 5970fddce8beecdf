"""The layouts that `check_parity` compares, and the overrides of the run in each: a tiny model of the same kind, in
fp32 without dropout, with little logging."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.config import RunConfig
from megatron_wrap.config.hugging_face import HF_PATH, spelled_out
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import ConfigError

PARALLEL = "megatron_lm.model.parallel"
_SIZES = {
    "tp": f"{PARALLEL}.tensor_model_parallel_size",
    "pp": f"{PARALLEL}.pipeline_model_parallel_size",
    "cp": f"{PARALLEL}.context_parallel_size",
    "ep": f"{PARALLEL}.expert_model_parallel_size",
    "vpp": f"{PARALLEL}.virtual_pipeline_model_parallel_size",
    "etp": f"{PARALLEL}.expert_tensor_parallel_size",
}
_SWITCHES = {
    "sp": "sequence_parallel",
    "dopt": "distributed_optimizer",
    "packed": "packing",
    "token_budget": "token_budget",
}
"""Part of a layout's name -> field of `LayoutCase` that it sets."""
_UNUSED_SIZES = {"vpp": 1, "etp": 0}
"""Axis -> the size with which a layout does not use it, for axes whose key is then null."""

DEFAULT_LAYOUTS = (
    "mbs1",
    "padded",
    "dp2",
    "dp2-dopt",
    "tp2",
    "tp2-sp",
    "pp2",
    "pp2-vpp2",
    "cp2",
    "tp2-sp-pp2",
    "tp2-sp-cp2",
    "tp2-sp-dp2",
    "pp2-dp2",
    "cp2-dp2",
    "pp2-cp2",
    "packed",
    "packed-tp2-sp-cp2",
    "packed-pp2-vpp2",
    "token-budget-dp2",
)
"""Names of the layouts that `check-parity` runs: each kind of parallelism, pairs of them, another micro-batch size,
more padding, packed rows, and micro-batches with a token budget."""

EXTRA_PADDING = 16
"""Tokens of additional padding of every sequence in the layout `padded`."""

EXPERT_LAYOUTS = ("ep2", "ep2-dopt", "cp2-ep2", "tp2-sp-ep2-etp1", "tp2-sp-ep2", "pp2-ep2", "ep4")
"""Names of further layouts for an MoE model."""


def default_layouts(arch: ArchConfig) -> tuple[str, ...]:
    """Names of the layouts to run for a model of this kind."""
    if arch.num_experts is None:
        return DEFAULT_LAYOUTS
    return (*(name for name in DEFAULT_LAYOUTS if name != "tp2"), *EXPERT_LAYOUTS)  # MoE with tp requires sp


@dataclass(frozen=True)
class LayoutCase:
    """One layout to run a step on."""

    name: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    ep: int = 1
    """Size of expert parallelism, over the processes of tp, cp and dp."""
    vpp: int = 1
    etp: int = 0
    """Size of the tensor parallelism of experts; 0: the same as tp."""
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    micro_batch_size: int | None = None
    """Number of samples in a micro-batch; None: as in the reference."""
    extra_padding: int = 0
    """Tokens of additional padding of every sequence."""
    packing: bool = False
    """Whether all sequences of a micro-batch are packed into one row."""
    token_budget: bool = False
    """Whether micro-batches have up to twice seq_length tokens instead of a number of samples."""

    @property
    def processes(self) -> int:
        """Number of processes of the layout."""
        return self.tp * self.pp * self.cp * self.dp

    def overrides(self, seq_length: int) -> tuple[str, ...]:
        """The layout as overrides of a configuration with this `seq_length`."""
        values = [f"{PARALLEL}.sequence_parallel={str(self.sequence_parallel).lower()}"]
        if self.tp > 1 and not self.sequence_parallel:
            values.append(f"{PARALLEL}.tp_comm_overlap=false")  # it hides communication of sequence parallelism
        for axis, path in _SIZES.items():
            size = getattr(self, axis)
            values.append(f"{path}={'null' if _UNUSED_SIZES.get(axis) == size else size}")
        values.append(
            f"megatron_lm.train.optimizer.use_distributed_optimizer={str(self.distributed_optimizer).lower()}"
        )
        if self.micro_batch_size is not None:
            values.append(f"megatron_lm.train.common.micro_batch_size={self.micro_batch_size}")
        if self.packing:
            values.append("megatron_wrap.flow.packing=true")
        if self.token_budget:
            values.append(f"megatron_lm.train.common.max_tokens_per_micro_batch={2 * seq_length}")
        return tuple(values)


def one_process_overrides() -> list[str]:
    """Overrides that reduce the layout of any run to one process."""
    keys = [
        "num_layers_per_virtual_pipeline_stage",
        "decoder_first_pipeline_num_layers",
        "decoder_last_pipeline_num_layers",
        "pipeline_model_parallel_layout",
    ]
    return [*(f"{PARALLEL}.{key}=null" for key in keys), *LayoutCase("one process").overrides(seq_length=0)]


def parse_layout(name: str) -> LayoutCase:
    """The layout of a name: parts joined by `-`, each `tpN`, `ppN`, `cpN`, `dpN`, `vppN`, `epN` (expert parallelism;
    data-parallel processes are added as needed), `etpN` (tensor parallelism of the experts), `sp` (sequence
    parallelism), `dopt` (distributed optimizer), `mbsN` (micro-batch size), `padded` (more padding), `packed` (all
    sequences of a micro-batch in one row) or `token-budget` (micro-batches by number of tokens).

    Raises:
        ConfigError: a part is unknown.
    """
    fields: dict[str, int] = {}
    for part in name.replace("token-budget", "token_budget").split("-"):
        match = re.fullmatch(r"(tp|pp|cp|dp|ep|vpp|etp|mbs)([1-9]\d*)", part)
        if match:
            fields["micro_batch_size" if match[1] == "mbs" else match[1]] = int(match[2])
        elif part == "padded":
            fields["extra_padding"] = EXTRA_PADDING
        elif part in _SWITCHES:
            fields[_SWITCHES[part]] = True
        else:
            raise ConfigError(
                f"layout {name!r}: {part!r} is unknown; use parts such as tp2, sp, pp2, vpp2, cp2, dp2, ep2, dopt, "
                "mbs1, padded, packed or token-budget, joined by '-'"
            )
    case = LayoutCase(name, **fields)  # type: ignore[arg-type]
    expert_processes = case.ep * (case.etp or case.tp) * case.pp if case.ep > 1 else 1
    return replace(case, dp=case.dp * math.lcm(case.processes, expert_processes) // case.processes)


def expert_reason(arch: ArchConfig, case: LayoutCase) -> str:
    """Reason why a correct MoE model may differ between this layout and one process; empty if it must agree."""
    if arch.num_experts is None:
        return ""
    losses = set(derived.load_balancing_coefficients(arch))
    if case.packing or case.token_budget:
        kinds = sorted(losses | ({"z_loss"} if arch.moe_z_loss_coeff else set()))
        if kinds:
            return f"{kinds[0]} of the routers is a mean over micro-batches, so it depends on how the batch is divided"
    losses -= {"seq_aux_loss"}
    if case.micro_batch_size is not None and (losses or arch.moe_z_loss_coeff):
        kind = min(losses) if losses else "z_loss"
        return f"{kind} of the routers is computed for each micro-batch, so it depends on the micro-batch size"
    if "global_aux_loss" in losses and case.dp > 1:
        return "global_aux_loss accumulates the experts' loads over micro-batches, so it depends on their order"
    if case.tp * case.cp * case.pp > 1 or case.extra_padding:
        sinkhorn = arch.moe_router_load_balancing_type == "sinkhorn"
        if sinkhorn or arch.upstream.get("moe_expert_capacity_factor") is not None:
            name = "moe_router_load_balancing_type sinkhorn" if sinkhorn else "moe_expert_capacity_factor"
            return f"{name} is computed from the tokens and padding of one process, not from the micro-batch"
    return ""


def check_overrides(
    config: str | Path, overrides: Sequence[str], flow: str | None, shrink: bool, folder: str, platform: str
) -> list[str]:
    """Overrides of the check: fp32 without dropout, small batches, no checkpoints; the user's overrides come last."""
    train = "megatron_lm.train.common"
    values = [
        f"{train}.{key}={value}"
        for key, value in {
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "rampup_batch_size": "null",
            "train_iters": 1000,
            "save": "null",
            "save_interval": "null",
            "load": "null",
            "finetune": "false",
            "eval_interval": "null",
            "sample_prompts": "null",
            "check_for_nan_in_loss_and_grad": "false",  # the check reports nan itself
            "max_tokens_per_micro_batch": "null",
            "global_batch_tokens": "null",
        }.items()
    ]
    values += [
        f"megatron_wrap.init.platform={platform}",
        "megatron_wrap.data.index_samples=null",
        "megatron_lm.train.dtype.__select__=fp32",
        "megatron_wrap.logger.progress_bar=false",
        "megatron_wrap.logger.enable_wandb=false",
        "megatron_wrap.logger.enable_tensorboard=false",
        "megatron_wrap.logger.tensorboard_dir=null",
        "megatron_wrap.logger.ignore_warning=true",
        f"megatron_wrap.logger.output_dir={folder}",
        "megatron_lm.model.arch.hidden_dropout=0.0",
        "megatron_lm.model.arch.attention_dropout=0.0",
        "megatron_lm.model.arch.transformer_impl=torch",
        *one_process_overrides(),
    ]
    run = read_run(config, overrides)
    if run.parallel.cp_comm_type is None:  # the default of runs in half precision, which fp32 would change
        values.append("megatron_lm.model.parallel.cp_comm_type=p2p")
    if run.flow.packing:  # layouts with `packed` set it
        overrides = [*overrides, "megatron_wrap.flow.packing=false", "megatron_wrap.data.reset_attention_mask=false"]
    if flow is not None:
        values.append(f"megatron_wrap.flow.flow_key={flow}")
    if shrink:
        whole = read_run(config, [*values, *overrides])
        if whole.model_provider.hf_path is not None:  # a tiny model differs from the folder's architecture
            values += spelled_out(whole)
            overrides = [*overrides, f"{HF_PATH}=null"]
        if whole.models.reference is not None:  # the run's may be large, or have another vocabulary
            overrides = [*overrides, "megatron_wrap.models.reference=copy"]
        values += _tiny(whole)
    return [*values, *overrides]


def _tiny(config: RunConfig) -> list[str]:
    """Overrides for a tiny model of the same kind: the same ratio of query to key heads, norms, activation and
    positions."""
    arch = config.arch
    experts = {} if arch.num_experts is None else _tiny_experts(arch)
    groups = arch.num_query_groups or arch.num_attention_heads
    exchanged = config.parallel.cp_comm_type == "a2a" and groups >= 4  # enough heads for tp2-cp2 and cp4
    few_groups = 4 if exchanged else min(groups, 2)
    heads = few_groups * min(arch.num_attention_heads // groups, 4)
    sizes: dict[str, Any] = {
        "num_layers": 4,
        "num_attention_heads": heads,
        "num_query_groups": few_groups,
        "group_query_attention": "null",
        "kv_channels": 16,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        **experts,
    }
    if arch.multi_latent_attention:
        ranks = {"kv_lora_rank": 32, "q_lora_rank": "null" if arch.q_lora_rank is None else 48}
        sizes |= {**ranks, "qk_head_dim": 16, "qk_pos_emb_head_dim": 8, "v_head_dim": 12}
    if arch.window_size is not None:  # small enough to affect sequences of a few dozen tokens
        sizes["window_size"] = [min(size, 12) for size in arch.window_size]
    if isinstance(arch.window_attn_skip_freq, tuple):
        sizes["window_attn_skip_freq"] = [*arch.window_attn_skip_freq, 1, 0, 1, 0][:4]
    if arch.experimental_attention_variant is not None:
        sizes |= _tiny_linear_attention(arch)
    values = [f"megatron_lm.model.arch.{key}={value}" for key, value in sizes.items()]
    return [*values, f"megatron_lm.train.common.seq_length={min(config.train.seq_length, 64)}"]


def _tiny_linear_attention(arch: ArchConfig) -> dict[str, Any]:
    """Overrides for few heads, in as many of the layers as there are, or all but the last."""
    pattern = derived.linear_layer_pattern(arch)[:4]
    values_per_key = min(arch.linear_num_value_heads // arch.linear_num_key_heads, 3)
    return {
        "linear_attention_freq": list(pattern) if len(pattern) == 4 and 1 in pattern else [1, 1, 1, 0],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4 * values_per_key,
        "linear_key_head_dim": 12,
        "linear_value_head_dim": 8,
    }


def _tiny_experts(arch: ArchConfig) -> dict[str, Any]:
    """Overrides for few experts of the same kind: the same router, groups and shared experts, and a dense layer if
    there is one."""
    grouped = arch.moe_router_num_groups is not None
    experts, topk = 8 if grouped else 4, min(arch.moe_router_topk, 2)
    pattern = derived.moe_layer_pattern(arch)[:4]
    sizes: dict[str, Any] = {
        "num_experts": experts,
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": 64,
        "moe_layer_freq": list(pattern) if len(pattern) == 4 and 1 in pattern else [int(1 in pattern[:1]), 1, 1, 1],
        "moe_shared_expert_intermediate_size": "null" if arch.moe_shared_expert_intermediate_size is None else 64,
    }
    if grouped:
        sizes |= {"moe_router_num_groups": 4, "moe_router_group_topk": min(arch.moe_router_group_topk or 1, topk)}
        if arch.moe_router_group_score_experts is not None:
            sizes["moe_router_group_score_experts"] = min(arch.moe_router_group_score_experts, 2)
    if "moe_input_jitter_eps" in arch.upstream:
        sizes["moe_input_jitter_eps"] = "null"  # random, as dropout is
    return sizes

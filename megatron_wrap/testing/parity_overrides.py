"""The overrides of `check_parity`: a tiny model of the same kind, in fp32 without dropout, with little logging."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.config import RunConfig
from megatron_wrap.config.hugging_face import HF_PATH, spelled_out
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.testing.layouts import one_process_overrides


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

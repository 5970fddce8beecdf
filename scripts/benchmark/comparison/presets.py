"""Named sizes that can be compared."""

from __future__ import annotations

from dataclasses import dataclass

_ARCH, _TRAIN = "megatron_lm.model.arch", "megatron_lm.train.common"


@dataclass(frozen=True)
class Preset:
    """A run of megatron-wrap, whose sizes and settings the other programs use."""

    config: str
    """Name of the YAML in the folder of compare.py."""
    overrides: tuple[str, ...] = ()


def _sizes(seq_length: int, micro_batch_size: int, global_batch_size: int) -> tuple[str, ...]:
    return (
        f"{_TRAIN}.seq_length={seq_length}",
        f"{_TRAIN}.micro_batch_size={micro_batch_size}",
        f"{_TRAIN}.global_batch_size={global_batch_size}",
    )


def _arch(keys: str) -> tuple[str, ...]:
    return tuple(f"{_ARCH}.{key}" for key in keys.split())


def _tiny(config: str, keys: str) -> Preset:
    """A run with the smallest sizes, in fp32."""
    smallest = _arch("hidden_size=64 num_attention_heads=4 vocab_size=4096")
    return Preset(config, (*_SMALL, "megatron_lm.train.dtype.__select__=fp32", *smallest, *_arch(keys)))


_SMALL = _sizes(128, 2, 4)
_LLAMA_3_8B = _arch("num_layers=32 hidden_size=4096 ffn_hidden_size=14336")
_LORA = tuple(f"megatron_wrap.adapter.{key}" for key in ("__select__=lora", "r=16", "lora_alpha=32"))
_MIXED = ("megatron_wrap.flow.collate_type=variable_length", "megatron_wrap.flow.packing=true")
_BALANCED = _arch("moe_router_force_load_balancing=true")

PRESETS = {
    "1.5b-4096": Preset("llama-1b.yaml", _sizes(4096, 4, 16)),
    "8b-layers-4096": Preset("llama-1b.yaml", (*_sizes(4096, 2, 8), *_LLAMA_3_8B, f"{_ARCH}.num_layers=8")),
    "8b-lora-4096": Preset("llama-1b.yaml", (*_sizes(4096, 2, 8), *_LLAMA_3_8B, *_LORA)),
    "8b-lora-mixed": Preset(
        "llama-1b.yaml",
        (*_sizes(4096, 16, 64), *_LLAMA_3_8B, *_LORA, *_MIXED, f"{_TRAIN}.max_tokens_per_micro_batch=12288"),
    ),
    "1.5b-mixed": Preset(
        "llama-1b.yaml", (*_sizes(4096, 32, 128), *_MIXED, f"{_TRAIN}.max_tokens_per_micro_batch=32768")
    ),
    "1.5b-32768": Preset("llama-1b.yaml", _sizes(32768, 1, 2)),
    "moe-30b-a3b-layers": Preset("moe-30b-a3b-layers.yaml", _sizes(4096, 4, 8)),
    "moe-30b-a3b-layers-balanced": Preset("moe-30b-a3b-layers.yaml", (*_sizes(4096, 4, 8), *_BALANCED)),
    "deepseek-v3-layers": Preset("deepseek-v3-layers.yaml", _sizes(4096, 4, 8)),
    "deepseek-v3-layers-balanced": Preset("deepseek-v3-layers.yaml", (*_sizes(4096, 4, 8), *_BALANCED)),
    "gpt-oss-20b-layers": Preset("gpt-oss-20b-layers.yaml", _sizes(4096, 1, 8)),
    "gpt-oss-20b-lora": Preset("gpt-oss-20b-layers.yaml", (*_sizes(4096, 1, 8), f"{_ARCH}.num_layers=24", *_LORA)),
    "glm-4.5-air-layers": Preset("glm-4.5-air-layers.yaml", _sizes(4096, 2, 8)),
    "qwen3.5-9b-layers": Preset("qwen3.5-9b-layers.yaml", _sizes(4096, 2, 8)),
    "qwen3.5-35b-a3b-layers": Preset("qwen3.5-35b-a3b-layers.yaml", _sizes(4096, 2, 8)),
    "tiny": Preset("overhead.yaml", _SMALL),
    "tiny-mixed": Preset("overhead.yaml", (*_SMALL, *_MIXED)),
    "tiny-lora": Preset("overhead.yaml", (*_SMALL, *_LORA)),
    "tiny-lora-mixed": Preset("overhead.yaml", (*_SMALL, *_LORA, *_MIXED)),
    "tiny-moe": Preset("overhead.yaml", (*_SMALL, *_arch("num_experts=8 moe_ffn_hidden_size=64 qk_layernorm=true"))),
    "tiny-gpt-oss": _tiny(
        "gpt-oss-20b-layers.yaml",
        "num_layers=2 ffn_hidden_size=48 num_query_groups=2 kv_channels=16 num_experts=8 window_size=[31,0]",
    ),
    "tiny-qwen3.5": _tiny(
        "qwen3.5-35b-a3b-layers.yaml",
        "ffn_hidden_size=32 num_query_groups=2 kv_channels=16 num_experts=8 moe_ffn_hidden_size=32 moe_router_topk=2 "
        "moe_shared_expert_intermediate_size=32 linear_key_head_dim=16 linear_value_head_dim=16 linear_num_key_heads=2 "
        "linear_num_value_heads=4",
    ),
    "tiny-glm": _tiny(
        "glm-4.5-air-layers.yaml",
        "ffn_hidden_size=128 num_query_groups=2 kv_channels=16 num_experts=16 moe_ffn_hidden_size=32 "
        "moe_shared_expert_intermediate_size=32",
    ),
    "tiny-deepseek": _tiny(
        "deepseek-v3-layers.yaml",
        "num_layers=2 ffn_hidden_size=128 q_lora_rank=32 kv_lora_rank=32 qk_head_dim=16 v_head_dim=16 "
        "qk_pos_emb_head_dim=8 num_experts=16 moe_ffn_hidden_size=32 moe_router_topk=4 "
        "moe_shared_expert_intermediate_size=32 moe_router_num_groups=4 moe_router_group_topk=2",
    ),
}
"""Name -> run. 65,536 tokens a step on one GPU (32,768 with 8B layers or experts); `mixed` has samples of the usual
lengths (`length_mix`), packed; names with `tiny` are for a CPU, where the bare loop has no latent attention. The
trainer stores all scores of gpt-oss' attention (eager), so a micro-batch is one sequence; `trainer-flex` does not.
`balanced`: random logits choose the experts of megatron-wrap and of the bare loop; the others use the model's own
router."""

"""Contradictions between the architecture and the parallel layout."""

import math
from collections.abc import Sequence

from megatron_wrap.config.checks.experts import check_experts
from megatron_wrap.config.checks.located_errors import check_each, divisors, refuse
from megatron_wrap.config.reading.pipeline_layout import parse_layout
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.fp8 import fp8_settings
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig
from megatron_wrap.metrics.number_format import counted

FLOWS_ON_LOGITS = (
    *("gpt_sft", "gpt_pretrain", "gpt_dpo", "gpt_kto", "gpt_cpo", "gpt_orpo", "gpt_distill", "gpt_grpo"),
)
"""Flows that compute log-probabilities of tokens."""


def check_model(config: RunConfig) -> None:
    """Check the architecture alone, and against `model.parallel`.

    Raises:
        ConfigError, LayoutError: values that contradict each other; see `check_each`.
    """
    latent = [_check_latent_attention] if config.arch.multi_latent_attention else []
    linear = [_check_linear_attention] if config.arch.experimental_attention_variant is not None else []
    ahead = [_check_multi_token_prediction] if config.arch.mtp_num_layers is not None else []
    checks = [_check_output, _check_attention, *latent, *linear, *ahead, _check_model, check_experts]
    check_each(config, [*checks, _check_sharding, _check_hidden_communication, _check_head_exchange, _check_pipeline])


def _check_output(config: RunConfig) -> None:
    """The model must return what a shipped flow needs; other flows may use either."""
    flow, provider = config.flow.flow_key, config.model_provider.provider_key
    keys = ["model_provider.provider_key", "flow.flow_key"]
    if flow == "gpt_reward" and provider == "gpt_model":
        refuse(
            config, keys, f"gpt_reward scores sequences, but gpt_model returns logits; choose {derived.VALUE_PROVIDER}"
        )
    if derived.has_value_head(config) and flow in FLOWS_ON_LOGITS:
        refuse(config, keys, f"{provider} returns one value for each token, but {flow} needs logits; choose gpt_model")


def _check_attention(config: RunConfig) -> None:
    arch = config.arch
    heads, groups = arch.num_attention_heads, derived.num_query_groups(arch)
    if arch.kv_channels is None and arch.hidden_size % heads and not arch.multi_latent_attention:
        refuse(
            config,
            ["arch.num_attention_heads", "arch.hidden_size"],
            f"hidden_size {arch.hidden_size} is not divisible by num_attention_heads {heads}; "
            "change one of them, or set kv_channels",
        )
    if arch.group_query_attention is False and groups != heads:
        rule = f"false contradicts num_query_groups {groups}; delete one of them"
        refuse(config, ["arch.group_query_attention"], rule)
    if heads % groups:
        refuse(
            config,
            ["arch.num_query_groups", "arch.num_attention_heads"],
            f"num_attention_heads {heads} is not divisible by num_query_groups {groups}; "
            f"legal num_query_groups: {divisors(heads)}",
        )
    skip = arch.window_attn_skip_freq
    if isinstance(skip, tuple) and (len(skip) != arch.num_layers or set(skip) - {0, 1}):
        rule = f"{len(skip)} values for {arch.num_layers} layers; write 1 (sliding window) or 0 for each layer"
        refuse(config, ["arch.window_attn_skip_freq", "arch.num_layers"], rule)
    if isinstance(skip, int) and skip < 1:
        refuse(config, ["arch.window_attn_skip_freq"], f"must be at least 1, not {skip}")
    if arch.rope_type == "longrope":
        _check_longrope(config)
    if arch.position_embedding_type == "rope" and not arch.multi_latent_attention and derived.kv_channels(arch) % 2:
        rule = f"rope rotates pairs, and a head is {derived.kv_channels(arch)} wide; make it even"
        refuse(config, ["arch.kv_channels", "arch.hidden_size"], rule)


def _check_longrope(config: RunConfig) -> None:
    arch = config.arch
    pairs = int(derived.kv_channels(arch) * arch.rotary_percent) // 2
    for name in ("longrope_short_factor", "longrope_long_factor"):
        factors = getattr(arch, name) or ()
        if len(factors) != pairs or min(factors) <= 0:
            rule = f"needs a positive factor for each of the {pairs} rotated pairs of a head, not {list(factors)}"
            refuse(config, [f"arch.{name}", "arch.rope_type"], rule)


def _check_latent_attention(config: RunConfig) -> None:
    arch, key = config.arch, "arch.multi_latent_attention"
    if arch.num_query_groups not in (None, arch.num_attention_heads):
        rule = f"multi_latent_attention needs num_query_groups null or {arch.num_attention_heads}"
        refuse(config, ["arch.num_query_groups", key], f"{rule}, not {arch.num_query_groups}")
    if arch.qk_pos_emb_head_dim % 2:
        rule = f"rope rotates pairs, and the rotated part of a head is {arch.qk_pos_emb_head_dim} wide; make it even"
        refuse(config, ["arch.qk_pos_emb_head_dim", key], rule)
    if config.parallel.tensor_model_parallel_size > 1 and not derived.sequence_parallel(config.parallel):
        # multi_latent_attention.py: otherwise each rank would keep only the gradient of its heads
        refuse(
            config,
            ["parallel.sequence_parallel"],
            "false with tensor_model_parallel_size > 1 is not supported for multi_latent_attention; write true or null",
        )


def _check_linear_attention(config: RunConfig) -> None:
    arch = config.arch
    pattern = derived.linear_layer_pattern(arch)
    if isinstance(arch.linear_attention_freq, int) and arch.linear_attention_freq < 1:
        refuse(config, ["arch.linear_attention_freq"], f"must be at least 1, not {arch.linear_attention_freq}")
    if len(pattern) != arch.num_layers or set(pattern) - {0, 1} or 1 not in pattern:
        refuse(
            config,
            ["arch.linear_attention_freq", "arch.num_layers"],
            f"defines {len(pattern)} layers, {pattern.count(1)} of them with linear attention, and num_layers is "
            f"{arch.num_layers}; write 1 (linear) or 0 for each layer, and at least one 1",
        )
    keys, values = arch.linear_num_key_heads, arch.linear_num_value_heads
    if values % keys:
        rule = f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}; change one of them"
        refuse(config, ["arch.linear_num_value_heads", "arch.linear_num_key_heads"], rule)
    ranks = config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size
    if keys % ranks:
        refuse(
            config,
            ["arch.linear_num_key_heads", "parallel.tensor_model_parallel_size", "parallel.context_parallel_size"],
            f"linear_num_key_heads {keys} is not divisible by the {ranks} processes that share the heads of linear "
            f"attention (tensor times context parallelism); legal products: {divisors(keys)}",
        )


def _check_model(config: RunConfig) -> None:
    arch = config.arch
    chosen = [name for name in ("swiglu", "geglu", "quick_geglu", "squared_relu", "openai_gelu") if getattr(arch, name)]
    if len(chosen) > 1:
        rule = f"{' and '.join(chosen)} are both true but select different activations; delete all but one"
        refuse(config, [f"arch.{name}" for name in chosen], rule)
    if not derived.is_gated(arch):
        for name, unused in (("activation_func_clamp_value", None), ("glu_linear_offset", 0.0)):
            if getattr(arch, name) != unused:
                rule = f"{getattr(arch, name)} needs swiglu, geglu or quick_geglu, and the MLP is not gated"
                refuse(config, [f"arch.{name}"], rule)
    positions = derived.max_position_embeddings(config.arch, config.train.seq_length)
    if config.train.seq_length > positions:
        refuse(
            config,
            ["train.seq_length", "arch.max_position_embeddings"],
            f"seq_length {config.train.seq_length} is longer than the model's max_position_embeddings {positions}; "
            "lower seq_length or raise max_position_embeddings",
        )
    if arch.vocab_size is None and config.data.tokenizer is None and not derived.has_mock_tokens(config):
        rule = f"null means the tokenizer's size; set it, or {SECTION_PATHS['data']}.tokenizer"
        refuse(config, ["arch.vocab_size"], rule)


def _check_multi_token_prediction(config: RunConfig) -> None:
    arch, key = config.arch, "arch.mtp_num_layers"
    if isinstance(arch.window_attn_skip_freq, tuple) or isinstance(arch.upstream.get("no_rope_freq"), list | tuple):
        rule = "these layers have no number in window_attn_skip_freq and no_rope_freq; write neither as a list, or null"
        refuse(config, [key], rule)
    if derived.has_value_head(config):
        refuse(config, ["model_provider.provider_key", key], f"{config.model_provider.provider_key} predicts no tokens")
    if fp8_settings(config) is not None:
        refuse(config, [key, "dtype.fp8"], "these layers are not computed in FP8; set either to null")


def _check_sharding(config: RunConfig) -> None:
    arch, tensor = config.arch, config.parallel.tensor_model_parallel_size
    key = "parallel.tensor_model_parallel_size"
    split = {
        "num_attention_heads": arch.num_attention_heads,
        "num_query_groups": derived.num_query_groups(arch),
    }
    if arch.multi_latent_attention:  # MLASelfAttention builds them even if they are replaced later
        split["kv_lora_rank + qk_pos_emb_head_dim"] = arch.kv_lora_rank + arch.qk_pos_emb_head_dim
        split["q_lora_rank"] = arch.q_lora_rank or 0
    if 0 in derived.moe_layer_pattern(arch):
        split["ffn_hidden_size"] = derived.ffn_hidden_size(arch)
    if arch.num_experts is not None and arch.moe_shared_expert_intermediate_size is not None:
        split["moe_shared_expert_intermediate_size"] = arch.moe_shared_expert_intermediate_size
    for name, count in split.items():
        if count % tensor:
            refuse(
                config,
                [key, f"arch.{name.split()[0]}"],
                f"{name} {count} is not divisible by tensor_model_parallel_size {tensor}; "
                f"legal sizes for this model: {divisors(math.gcd(*split.values()))}",
            )


def _check_hidden_communication(config: RunConfig) -> None:
    parallel = config.parallel
    split = parallel.tensor_model_parallel_size > 1 and not derived.sequence_parallel(parallel)
    if parallel.tp_comm_overlap and split:
        rule = "true hides the communication of sequence parallelism; write sequence_parallel: null, or false here"
        refuse(config, ["parallel.tp_comm_overlap", "parallel.sequence_parallel"], rule)


def _check_head_exchange(config: RunConfig) -> None:
    parallel = config.parallel
    if parallel.cp_comm_type != "a2a" or derived.exchanged_groups(config) is not None:
        return
    heads, groups = derived.attention_heads_of_process(config)
    legal = [size for size in range(1, heads + 1) if heads % size == 0 and (groups % size == 0 or size % groups == 0)]
    refuse(
        config,
        ["parallel.cp_comm_type", "parallel.context_parallel_size", "arch.num_attention_heads"],
        f"a2a gives each of {parallel.context_parallel_size} context-parallel processes an equal share of heads, and a "
        f"tensor-parallel process has {counted(heads, 'head')} of {counted(groups, 'query group')}; legal "
        f"context_parallel_size: {', '.join(map(str, legal))}; or write all_gather or null",
    )


def _check_pipeline(config: RunConfig) -> None:
    parallel, layers = config.parallel, config.arch.num_layers
    stages = parallel.pipeline_model_parallel_size
    chunks, per_chunk = parallel.virtual_pipeline_model_parallel_size, parallel.num_layers_per_virtual_pipeline_stage
    virtual_keys = ["parallel.num_layers_per_virtual_pipeline_stage", "parallel.virtual_pipeline_model_parallel_size"]
    if chunks is not None and per_chunk is not None:
        refuse(
            config,
            virtual_keys,
            "both virtual-pipeline keys are set, and each defines the number of chunks; delete one",
        )
    if parallel.pipeline_model_parallel_layout is not None:
        _check_layout(config, parallel.pipeline_model_parallel_layout)
        return
    if derived.splits_by_cost(config):
        _check_enough_layers(config, stages * (chunks or 1))
        return
    key = virtual_keys[0 if per_chunk is not None else 1]
    ends = [f"decoder_{end}_pipeline_num_layers" for end in ("first", "last")]
    uneven = [name for name in ends if getattr(parallel, name) is not None]
    if uneven:
        _check_uneven(config, uneven)
    elif derived.accounts_for_ends(config):
        return  # Megatron-Core checks these splits itself
    elif layers % stages:
        refuse(
            config,
            ["parallel.pipeline_model_parallel_size", "arch.num_layers"],
            f"num_layers {layers} is not divisible by pipeline_model_parallel_size {stages}; legal sizes: "
            f"{divisors(layers)}; or split unevenly with pipeline_split cost or {ends[0]} and {ends[1]}",
        )
    elif per_chunk is not None and layers // stages % per_chunk:
        refuse(
            config,
            [key],
            f"{per_chunk} does not divide the {layers // stages} layers of a stage; "
            f"legal: {divisors(layers // stages)}",
        )
    if chunks is not None:
        for count in derived.layers_per_stage(config):
            if count % chunks:
                rule = f"{chunks} chunks do not divide a stage of {counted(count, 'layer')}; legal: {divisors(count)}"
                refuse(config, [key], rule)


def _check_layout(config: RunConfig, text: str) -> None:
    parallel, key = config.parallel, "parallel.pipeline_model_parallel_layout"
    names = (
        *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
        "num_layers_per_virtual_pipeline_stage",
    )
    for name in names:
        if getattr(parallel, name) is not None:
            refuse(config, [key, f"parallel.{name}"], f"defines the layers of all stages, as does {name}; delete one")
    try:
        layout = parse_layout(text, config.arch.num_layers, parallel.pipeline_model_parallel_size)
    except ValueError as error:
        refuse(config, [key], f"{text} {error}")
    chunks = parallel.virtual_pipeline_model_parallel_size
    if chunks is not None and chunks != layout.chunks_per_stage:
        other = "parallel.virtual_pipeline_model_parallel_size"
        rule = f"{text} has {counted(layout.chunks_per_stage, 'part')} for each stage, not {chunks}; delete {other}"
        refuse(config, [key, other], rule)


def _check_enough_layers(config: RunConfig, num_chunks: int) -> None:
    layers, stages = config.arch.num_layers, config.parallel.pipeline_model_parallel_size
    if layers < num_chunks:
        refuse(
            config,
            ["parallel.pipeline_model_parallel_size", "arch.num_layers"],
            f"{counted(layers, 'layer')} cannot be split over {stages} stages of "
            f"{counted(num_chunks // stages, 'chunk')}; lower pipeline_model_parallel_size or "
            "virtual_pipeline_model_parallel_size",
        )


def _check_uneven(config: RunConfig, ends: Sequence[str]) -> None:
    parallel, layers = config.parallel, config.arch.num_layers
    stages = parallel.pipeline_model_parallel_size
    keys = [f"parallel.{name}" for name in ends]
    if parallel.num_layers_per_virtual_pipeline_stage is not None:
        rule = "stages of an uneven split differ; set virtual_pipeline_model_parallel_size (chunks per stage) instead"
        refuse(config, ["parallel.num_layers_per_virtual_pipeline_stage"], rule)
    at_ends = sum(getattr(parallel, name) for name in ends)
    middle_stages, middle = stages - len(ends), layers - at_ends
    if middle < 0 or bool(middle) != bool(middle_stages) or (middle_stages and middle % middle_stages):
        refuse(
            config,
            keys,
            f"{' and '.join(ends)} take {at_ends} of {layers} layers and leave {middle} for {middle_stages} other "
            f"stages, which must be a positive multiple of {middle_stages}"
            if middle_stages
            else f"{' and '.join(ends)} take {at_ends} of {layers} layers, and no stage is left for the rest",
        )

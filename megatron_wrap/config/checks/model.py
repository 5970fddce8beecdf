"""Contradictions within the architecture, its experts among them."""

from megatron_wrap.config.checks.contradictions import check_each, divisors, refuse
from megatron_wrap.config.checks.layout import check_parallel
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig

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
    alone = [_check_output, _check_attention, *latent, *linear, *ahead, _check_model, _check_experts]
    check_each(config, [*alone, check_parallel])


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


def _check_experts(config: RunConfig) -> None:
    """Check the requirements of `num_experts` on other keys.

    Raises:
        ConfigError, LayoutError: values that contradict each other.
    """
    if config.arch.num_experts is None:
        return
    _check_expert_layers(config)
    _check_router(config)
    _check_replay(config)
    _check_router_losses(config)
    _check_expert_layout(config, config.arch.num_experts)


def _check_expert_layers(config: RunConfig) -> None:
    arch, key = config.arch, ["arch.moe_layer_freq"]
    if isinstance(arch.moe_layer_freq, int) and arch.moe_layer_freq < 1:
        refuse(config, key, f"must be at least 1, not {arch.moe_layer_freq}")
    try:
        pattern = derived.moe_layer_pattern(arch)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        refuse(config, key, f"{arch.moe_layer_freq!r} is not a list of 0 and 1 such as ([0]*3+[1]*58)")
    if len(pattern) != arch.num_layers or set(pattern) - {0, 1} or 1 not in pattern:
        refuse(
            config,
            [*key, "arch.num_layers"],
            f"defines {len(pattern)} layers, {pattern.count(1)} of them with experts, and num_layers is "
            f"{arch.num_layers}; write 0 (dense) or 1 for each layer, and at least one 1",
        )
    if arch.moe_grouped_gemm is not None and arch.experts_impl not in (
        "auto",
        "transformer_engine" if arch.moe_grouped_gemm else "sequential",
    ):
        rule = f"contradicts moe_grouped_gemm: {str(arch.moe_grouped_gemm).lower()}, its older form; remove that key"
        refuse(config, ["arch.experts_impl", "arch.moe_grouped_gemm"], f"{arch.experts_impl} {rule}")
    if config.dtype.fp8 is not None and arch.experts_impl in ("grouped_mm", "sequential"):
        rule = "FP8 experts are computed by Transformer Engine; write auto"
        refuse(config, ["arch.experts_impl", "dtype.fp8"], f"{arch.experts_impl}: {rule}")
    if arch.add_bias_linear:
        _check_biases(config)


def _check_biases(config: RunConfig) -> None:
    """Refuse biases of experts, which Megatron-Core cannot train: mlp.py, forward, adds them to a view in place;
    shared_experts.py and experts.py assert that there are none."""
    arch, instead = config.arch, "write add_bias_linear: false (add_qkv_bias may be true)"
    if arch.experts_impl in ("transformer_engine", "sequential") or arch.moe_grouped_gemm is not None:
        key = "experts_impl" if arch.moe_grouped_gemm is None else "moe_grouped_gemm"
        rule = f"biases of experts need experts_impl grouped_mm; write auto, or {instead}"
        refuse(config, [f"arch.{key}", "arch.add_bias_linear"], rule)
    if config.dtype.fp8 is not None:
        rule = f"experts in FP8 are Transformer Engine's, which cannot train biases; write null, or {instead}"
        refuse(config, ["dtype.fp8", "arch.add_bias_linear"], rule)
    if arch.moe_shared_expert_intermediate_size is not None:
        rule = f"shared experts cannot have biases; {instead}"
        refuse(config, ["arch.add_bias_linear", "arch.moe_shared_expert_intermediate_size"], rule)


def _check_router(config: RunConfig) -> None:
    arch, topk = config.arch, config.arch.moe_router_topk
    experts, groups, group_topk = arch.num_experts or 0, arch.moe_router_num_groups, arch.moe_router_group_topk
    if topk > experts:
        refuse(config, ["arch.moe_router_topk"], f"{topk} is more than num_experts {experts}; lower it")
    if topk == 1 and arch.moe_router_score_function == "softmax" and not arch.moe_router_pre_softmax:
        refuse(
            config,
            ["arch.moe_router_topk"],
            "1 with a softmax over only the chosen expert means weight 1 and no gradient of the router; set "
            "moe_router_pre_softmax: true",
        )
    if groups is None or group_topk is None:
        return
    if experts % groups or group_topk > groups or group_topk * (experts // groups) < topk:
        refuse(
            config,
            ["arch.moe_router_num_groups", "arch.moe_router_group_topk"],
            f"{group_topk} of {groups} groups of {experts} experts are too few for moe_router_topk {topk}; the "
            "number of groups must divide num_experts, and moe_router_group_topk groups must have enough experts",
        )
    score_experts = arch.moe_router_group_score_experts
    if score_experts is None and topk < group_topk:
        refuse(
            config,
            ["arch.moe_router_group_topk"],
            f"{group_topk} is more than moe_router_topk {topk}, so no score ranks the groups; set "
            "moe_router_group_score_experts",
        )
    if score_experts is not None and score_experts > experts // groups:
        rule = f"{score_experts} is more than the {experts // groups} experts of a group; lower it"
        refuse(config, ["arch.moe_router_group_score_experts"], rule)


def _check_replay(config: RunConfig) -> None:
    arch, mode = config.arch, config.train.router_replay
    if arch.upstream.get("moe_enable_routing_replay"):
        rule = "true alone replays nothing; write false, and set megatron_lm.train.common.router_replay: R2 or R3"
        refuse(config, ["arch.moe_enable_routing_replay"], rule)
    if mode == "disabled":
        return
    if arch.upstream.get("moe_router_fusion"):
        rule = f"true selects experts within a kernel, which replays no routing; write false for router_replay {mode}"
        refuse(config, ["arch.moe_router_fusion", "train.router_replay"], rule)
    if arch.moe_router_load_balancing_type == "sinkhorn":
        rule = f"sinkhorn selects experts itself and replays no routing; choose another type for {mode}"
        refuse(config, ["arch.moe_router_load_balancing_type", "train.router_replay"], rule)


def _check_router_losses(config: RunConfig) -> None:
    kinds, coefficients = config.arch.moe_router_load_balancing_type, config.arch.moe_aux_loss_coeff
    lists = [isinstance(value, tuple) for value in (kinds, coefficients)]
    if any(lists) and not (all(lists) and len(kinds) == len(coefficients)):  # type: ignore[arg-type]
        rule = "a list of load balancing types needs a list of as many coefficients; write one per type"
        refuse(config, ["arch.moe_aux_loss_coeff", "arch.moe_router_load_balancing_type"], rule)
    if min(coefficients if isinstance(coefficients, tuple) else (coefficients,)) < 0:
        refuse(config, ["arch.moe_aux_loss_coeff"], f"must be at least 0, not {coefficients}")
    if kinds in ("sinkhorn", "none") and coefficients:
        refuse(
            config,
            ["arch.moe_aux_loss_coeff"],
            f"{coefficients} does not apply to moe_router_load_balancing_type {kinds}; set it to 0, or choose aux_loss",
        )


def _check_expert_layout(config: RunConfig, experts: int) -> None:
    arch, parallel = config.arch, config.parallel
    size, tensor = parallel.expert_model_parallel_size, derived.expert_tensor_parallel_size(parallel)
    if experts % size:
        rule = f"{size} does not divide num_experts {experts}; legal sizes: {divisors(experts)}"
        refuse(config, ["parallel.expert_model_parallel_size"], rule)
    width = derived.moe_ffn_hidden_size(arch)
    keys = ["parallel.expert_tensor_parallel_size", "parallel.tensor_model_parallel_size"]
    if width % tensor:
        refuse(
            config,
            keys,
            f"moe_ffn_hidden_size {width} is not divisible by the experts' tensor-parallel size {tensor}; legal sizes: "
            f"{divisors(width)}",
        )
    if parallel.tensor_model_parallel_size > 1 and not derived.sequence_parallel(parallel):
        # moe_layer.py, forward: without it every process would route all tokens
        rule = "false with tensor_model_parallel_size > 1 is not supported for a model with experts; write true or null"
        refuse(config, ["parallel.sequence_parallel"], rule)

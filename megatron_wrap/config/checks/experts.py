"""Contradictions within the MoE settings, and between the experts and the parallel layout."""

from megatron_wrap.config.checks.located_errors import divisors, refuse
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import RunConfig


def check_experts(config: RunConfig) -> None:
    """Check the requirements of `num_experts` on other keys.

    Raises:
        ConfigError, LayoutError: values that contradict each other.
    """
    if config.arch.num_experts is None:
        return
    _check_layers(config)
    _check_router(config)
    _check_replay(config)
    _check_losses(config)
    _check_layout(config, config.arch.num_experts)


def _check_layers(config: RunConfig) -> None:
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


def _check_losses(config: RunConfig) -> None:
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


def _check_layout(config: RunConfig, experts: int) -> None:
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

"""Contradictions within optimizer, precision, FP8 and recomputation; those of FP8 with the GPU:
`platform/gpu/platform.py`.
"""

from collections.abc import Iterator

from megatron_wrap.config.checks.contradictions import check_each, refuse
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.derived import BLOCK, MULTIPLE, Fp8Settings, fp8_settings
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig

_OTHER_MUON = {
    **dict.fromkeys(("muon_scale_mode", "muon_extra_scale_factor"), "muon_adjust_lr_fn"),
    "muon_use_nesterov": "muon_nesterov",
    "muon_fp32_matmul_prec": "muon_ns_dtype",
    **dict.fromkeys(("muon_tp_mode", "muon_coefficient_type", "muon_scalar_optimizer"), "muon_num_ns_steps"),
}
"""Keys of Megatron-Core's Muon -> the closest key of this package's Muon."""


def check_numerics(config: RunConfig) -> None:
    """Check optimizer, precision, FP8 and recomputation.

    Raises:
        ConfigError: values that contradict each other; see `check_each`.
    """
    check_each(config, (_check_optimizer, _check_precision, _check_fp8, _check_recompute))


def _check_optimizer(config: RunConfig) -> None:
    optimizer = config.optimizer
    start = optimizer.weight_decay if optimizer.start_weight_decay is None else optimizer.start_weight_decay
    end = optimizer.weight_decay if optimizer.end_weight_decay is None else optimizer.end_weight_decay
    ends = ["optimizer.end_weight_decay", "optimizer.start_weight_decay"]
    if optimizer.weight_decay_incr_style == "constant" and start != end:
        rule = f"weight decay from {start} to {end} needs weight_decay_incr_style linear or cosine, which is constant"
        refuse(config, ends, rule)
    if end < start:  # optimizer_param_scheduler.py: assert self.end_wd >= self.start_wd
        refuse(config, ends, f"weight decay from {start} to {end} decreases, but it can only grow; raise the end")
    _check_offload(config)
    _check_muon(config)


def _check_muon(config: RunConfig) -> None:
    """Refuse keys that Megatron-Core's own Muon reads and this package's Muon does not."""
    path = SECTION_PATHS["optimizer"]
    for name, key in _OTHER_MUON.items():
        if name in config.optimizer.upstream:
            rule = f"it is of Megatron-Core's Muon, which needs emerging_optimizers; delete it, or set {path}.{key}"
            refuse(config, [f"optimizer.{name}"], rule)


def _check_offload(config: RunConfig) -> None:
    upstream, path = config.optimizer.upstream, SECTION_PATHS["optimizer"]
    if not upstream.get("optimizer_cpu_offload"):
        return
    # Megatron-LM's arguments.py; otherwise Megatron-Core fails, or offloads nothing
    needed = {
        "use_precision_aware_optimizer": config.optimizer.use_precision_aware_optimizer,
        "use_distributed_optimizer": config.optimizer.use_distributed_optimizer is not False,
        "optimizer_offload_fraction": upstream.get("optimizer_offload_fraction", 0.0) > 0,
    }
    for name, fulfilled in needed.items():
        if not fulfilled:
            value = "above 0" if name == "optimizer_offload_fraction" else "true"
            refuse(config, ["optimizer.optimizer_cpu_offload"], f"true needs {path}.{name} {value}")


def _check_precision(config: RunConfig) -> None:
    dtype = config.dtype
    if dtype.initial_loss_scale < dtype.min_loss_scale:
        rule = f"initial_loss_scale {dtype.initial_loss_scale} is below min_loss_scale {dtype.min_loss_scale}"
        refuse(config, ["dtype.initial_loss_scale", "dtype.min_loss_scale"], rule)


def _check_fp8(config: RunConfig) -> None:
    """Check the FP8 settings against precision, optimizer, recomputation and the model's sizes.

    Raises:
        ConfigError: a setting has no effect, or a combination that Megatron-Core or Transformer Engine cannot run.
    """
    fp8 = fp8_settings(config)
    if fp8 is None:
        return
    _check_bf16_layers(config, fp8)
    if fp8.param_gather and fp8.recipe != "delayed" and config.optimizer.upstream.get("optimizer_cpu_offload"):
        rule = f"with optimizer_cpu_offload, fp8_param_gather needs fp8_recipe delayed, which is {fp8.recipe}"
        refuse(config, ["dtype.fp8_param_gather", "dtype.fp8_recipe"], rule)
    _check_fp8_sizes(config, BLOCK if fp8.param_gather and fp8.recipe == "blockwise" else MULTIPLE)


def _check_bf16_layers(config: RunConfig, fp8: Fp8Settings) -> None:
    most = config.arch.num_layers // config.parallel.pipeline_model_parallel_size
    for name, count in (
        ("num_layers_at_start_in_bf16", fp8.layers_at_start_in_bf16),
        ("num_layers_at_end_in_bf16", fp8.layers_at_end_in_bf16),
    ):
        if count > most:
            refuse(config, [f"dtype.{name}"], f"{count} is more than the {most} layers of a pipeline stage")


def _check_fp8_sizes(config: RunConfig, multiple: int) -> None:
    tensor = config.parallel.tensor_model_parallel_size
    for name, size, parts in _fp8_dimensions(config):
        if size % (multiple * parts):
            shared = f" over {tensor} tensor-parallel processes" if parts > 1 else ""
            refuse(
                config,
                ["dtype.fp8", f"arch.{name}"],
                f"FP8 needs dimensions that are multiples of {multiple}, but {name} is {size}{shared}; change it, "
                "or set fp8: null",
            )


def _fp8_dimensions(config: RunConfig) -> Iterator[tuple[str, int, int]]:
    """(key of `model.arch` that determines it, size, processes that share it) of each dimension of the layers'
    matrices."""
    arch, parallel = config.arch, config.parallel
    tensor = parallel.tensor_model_parallel_size
    yield "hidden_size", arch.hidden_size, 1
    if 0 in derived.moe_layer_pattern(arch):
        yield "ffn_hidden_size", derived.ffn_hidden_size(arch), tensor
    if arch.num_experts is not None:
        yield (
            "moe_ffn_hidden_size",
            derived.moe_ffn_hidden_size(arch),
            derived.expert_tensor_parallel_size(parallel),
        )
    if arch.moe_shared_expert_intermediate_size is not None:
        yield "moe_shared_expert_intermediate_size", arch.moe_shared_expert_intermediate_size, tensor
    if arch.multi_latent_attention:
        yield "kv_lora_rank", arch.kv_lora_rank, 1
        yield "qk_pos_emb_head_dim", arch.qk_pos_emb_head_dim, 1
        yield "v_head_dim", arch.num_attention_heads * arch.v_head_dim, tensor
        yield "qk_head_dim", arch.num_attention_heads * (arch.qk_head_dim + arch.qk_pos_emb_head_dim), tensor
        if arch.q_lora_rank is not None:
            yield "q_lora_rank", arch.q_lora_rank, 1
        return
    width, groups = derived.kv_channels(arch), derived.num_query_groups(arch)
    yield "num_attention_heads", arch.num_attention_heads * width, tensor
    yield "num_query_groups", (arch.num_attention_heads + 2 * groups) * width, tensor


def _check_recompute(config: RunConfig) -> None:
    if config.recompute.distribute_saved_activations:
        granularity = config.recompute.recompute_granularity
        tensor, sequence = config.parallel.tensor_model_parallel_size, derived.sequence_parallel(config.parallel)
        if granularity != "full" or tensor == 1 or sequence:
            refuse(
                config,
                ["recompute.distribute_saved_activations"],
                "true needs recompute_granularity full, tensor_model_parallel_size > 1 and sequence_parallel false; "
                f"they are {granularity or 'null'}, {tensor} and {str(sequence).lower()}",
            )

"""Contradictions between FP8 settings and the rest of a run; those with the GPU: `platform/gpu/platform.py`."""

from collections.abc import Iterator

from megatron_wrap.config.checks.located_errors import refuse
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.fp8 import BLOCK, MULTIPLE, Fp8Settings, fp8_settings
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig


def check_fp8(config: RunConfig) -> None:
    """Check the FP8 settings against precision, optimizer, recomputation and the model's sizes.

    Raises:
        ConfigError: a setting has no effect, or a combination that Megatron-Core or Transformer Engine cannot run.
    """
    fp8 = fp8_settings(config)
    if fp8 is None:
        for name in ("fp8_param_gather", "first_last_layers_bf16"):
            if getattr(config.dtype, name):
                rule = f"true only applies with {SECTION_PATHS['dtype']}.fp8, which is null; set it to hybrid"
                refuse(config, [f"dtype.{name}"], rule)
        return
    if not config.dtype.bf16:
        refuse(config, ["dtype.fp8"], f"{fp8.format} needs bf16: true; select dtype bf16")
    if config.arch.transformer_impl == "torch":
        refuse(
            config,
            ["dtype.fp8", "arch.transformer_impl"],
            f"{fp8.format} needs the layers of Transformer Engine, but transformer_impl is torch; "
            "set transformer_impl: auto or transformer_engine, or fp8: null",
        )
    _check_bf16_layers(config, fp8)
    if fp8.param_gather and config.optimizer.use_distributed_optimizer is False:
        rule = f"true needs {SECTION_PATHS['optimizer']}.use_distributed_optimizer, which is false; set either to null"
        refuse(config, ["dtype.fp8_param_gather"], rule)
    if fp8.param_gather and fp8.recipe != "delayed" and config.optimizer.upstream.get("optimizer_cpu_offload"):
        rule = f"with optimizer_cpu_offload, fp8_param_gather needs fp8_recipe delayed, which is {fp8.recipe}"
        refuse(config, ["dtype.fp8_param_gather", "dtype.fp8_recipe"], rule)
    _check_sizes(config, BLOCK if fp8.param_gather and fp8.recipe == "blockwise" else MULTIPLE)


def _check_bf16_layers(config: RunConfig, fp8: Fp8Settings) -> None:
    if not fp8.first_last_layers_bf16:
        return
    if fp8.recipe == "delayed":  # transformer_config.py: FP8 is then entered once for all layers
        rule = "true does not work with fp8_recipe delayed; choose fp8_recipe tensorwise or blockwise"
        refuse(config, ["dtype.first_last_layers_bf16", "dtype.fp8_recipe"], rule)
    most = config.arch.num_layers // config.parallel.pipeline_model_parallel_size
    for name, count in (
        ("num_layers_at_start_in_bf16", fp8.layers_at_start_in_bf16),
        ("num_layers_at_end_in_bf16", fp8.layers_at_end_in_bf16),
    ):
        if count > most:
            refuse(config, [f"dtype.{name}"], f"{count} is more than the {most} layers of a pipeline stage")


def _check_sizes(config: RunConfig, multiple: int) -> None:
    tensor = config.parallel.tensor_model_parallel_size
    for name, size, parts in _dimensions(config):
        if size % (multiple * parts):
            shared = f" over {tensor} tensor-parallel processes" if parts > 1 else ""
            refuse(
                config,
                ["dtype.fp8", f"arch.{name}"],
                f"FP8 needs dimensions that are multiples of {multiple}, but {name} is {size}{shared}; change it, "
                "or set fp8: null",
            )


def _dimensions(config: RunConfig) -> Iterator[tuple[str, int, int]]:
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

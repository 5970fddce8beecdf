"""Advice on keys that are retired, misplaced, or set by the program from another key."""

from collections.abc import Mapping
from dataclasses import fields
from typing import get_type_hints

from megatron_wrap.config.schema.run import CATCH_ALL, SECTION_AT, SECTION_PATHS, RunConfig
from megatron_wrap.config.schema.training import RecomputeConfig

_ARCH, _PARALLEL = SECTION_PATHS["arch"], SECTION_PATHS["parallel"]
_TRAIN, _RATE = SECTION_PATHS["train"], SECTION_PATHS["learning_rate"]
_OPTIMIZER, _DTYPE = SECTION_PATHS["optimizer"], SECTION_PATHS["dtype"]
_RECOMPUTE, _DDP = SECTION_PATHS["recompute"], SECTION_PATHS["ddp"]
_INIT, _LOGGER, _DATA = (SECTION_PATHS[name] for name in ("init", "logger", "data"))
_PROVIDER = SECTION_PATHS["model_provider"]

_PIP = "Megatron-Core comes from pip now; delete this key"
_NO_COMPILE = "nothing is compiled here; delete this key"
_ENGINE = "the program sets it itself; delete this key"
_IMPLEMENTATION = f"choose the implementation with {_ARCH}.transformer_impl (auto, transformer_engine, torch)"
_DATASET = f"samples come from {_DATA} or from the caller of wrap.train; delete this key"
_FORMAT = "retired, checkpoints are Megatron-Core's torch_dist format; delete this key"
_TOKENIZER = f"retired; set {_DATA}.tokenizer to a Hugging Face tokenizer folder"

RETIRED: Mapping[str, str] = {
    "megatron_lm_project_path": _PIP,
    "skip_compile_dependencies": _PIP,
    "use_flash_attn": f"retired; {_IMPLEMENTATION}",
    "use_legacy_models": "retired, Megatron-Core's models are the only ones; delete this key",
    "use_mcore_models": "retired, Megatron-Core's models are the only ones; delete this key",
    "use_rotary_position_embeddings": f"retired; write {_ARCH}.position_embedding_type: rope",
    "add_position_embedding": f"retired; write {_ARCH}.position_embedding_type: learned_absolute, rope or none",
    "no_position_embedding": f"retired; write {_ARCH}.position_embedding_type: none",
    "use_rope_scaling_factor": f"retired; write {_ARCH}.rope_scaling_factor",
    "encoder_decoder_type": "retired, only decoder models are built; delete this key",
    "encoder_num_layers": f"retired; write {_ARCH}.num_layers",
    "decoder_num_layers": f"retired; write {_ARCH}.num_layers",
    "encoder_seq_length": f"retired; write {_TRAIN}.seq_length",
    "decoder_seq_length": f"retired; write {_TRAIN}.seq_length",
    "encoder_tensor_model_parallel_size": "retired, only decoder models are built; delete this key",
    "encoder_pipeline_model_parallel_size": "retired, only decoder models are built; delete this key",
    "parallel_output": "retired, logits are always split over the vocabulary; delete this key",
    "model_type": f"retired; the model is chosen by {_PROVIDER}.provider_key",
    "use_checkpoint_args": f"retired, the YAML is the only source of arguments; delete this key and set {_ARCH}",
    "use_mp_args_from_checkpoint_args": f"retired, a checkpoint loads into any layout; delete it and set {_PARALLEL}",
    "use_tokenizer_model_from_checkpoint_args": f"retired; set {_DATA}.tokenizer",
    "exit_on_missing_checkpoint": "retired, a missing load folder is always an error; delete this key",
    **dict.fromkeys(("ckpt_format", "dist_ckpt_format", "use_dist_ckpt", "auto_detect_ckpt_format"), _FORMAT),
    **dict.fromkeys(("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file"), _TOKENIZER),
    "padded_vocab_size": f"computed from {_ARCH}.vocab_size and make_vocab_size_divisible_by; delete this key",
    "data_path": f"retired; write {_DATA}: {{__select__: indexed, __override__: {{train: PREFIX}}}}",
    "dataloader_type": f"retired; {_DATASET}",
    "distributed_backend": f"retired; write {_INIT}.platform: cuda (NCCL) or cpu (gloo)",
    "wandb_exp_name": f"renamed; write {_LOGGER}.wandb_name",
    "wandb_save_dir": f"retired; write {_LOGGER}.output_dir",
    "log_params_norm": f"renamed; write {_LOGGER}.add_params_norm_to_metrics",
    "log_num_zeros_in_grad": f"renamed; write {_LOGGER}.add_num_zeros_in_grad_to_metrics",
    "log_throughput": f"renamed; write {_LOGGER}.add_throughput_to_metrics",
    "log_memory_to_tensorboard": f"renamed; write {_LOGGER}.add_memory_to_metrics",
    "disable_bias_linear": f"renamed; write {_ARCH}.add_bias_linear: false",
    "recompute_activations": f"retired; write {_RECOMPUTE}: {{__select__: selective}}",
    "checkpoint_activations": f"retired; write {_RECOMPUTE}: {{__select__: full}}",
    "no_masked_softmax_fusion": f"renamed; write {_ARCH}.masked_softmax_fusion: false",
    "no_gradient_accumulation_fusion": f"renamed; write {_ARCH}.gradient_accumulation_fusion: false",
    "fp8_format": f"renamed; write {_DTYPE}.fp8",
    "lazy_mpu_init": f"retired; {_ENGINE}",
    "use_cpu_initialization": f"retired, initial weights do not depend on the device; {_ENGINE}",
    "local_rank": f"retired; {_ENGINE}",
    "calculate_per_token_loss": "the flow's get_loss_weight defines the average; delete this key",
}
"""Retired keys of Megatron-LM and of earlier versions, in any section -> what to do."""


def _set_as(path: str, *same_named: str, **renamed: str) -> dict[str, str]:
    """Megatron-Core's field -> the key below `path` that sets it."""
    keys = {name: name for name in same_named} | renamed
    return {field: f"set it as {path}.{key}" for field, key in keys.items()}


_DTYPE_RULE = f"follows from {_DTYPE}; write dtype: {{__select__: NAME}} with bf16, fp16 or fp32"
_BY_ENGINE = dict.fromkeys(
    (
        *("perform_initialization", "use_cpu_initialization", "init_model_with_meta_device", "timers"),
        *("finalize_model_grads_func", "grad_scale_func", "moe_grad_scale_func", "mtp_grad_scale_func"),
        *("no_sync_func", "grad_sync_func", "param_sync_func", "experimental_attention_variant_loss_scale_func"),
        *("variable_seq_lengths", "overlap_p2p_comm", "batch_p2p_comm", "batch_p2p_sync"),
        *("deallocate_pipeline_outputs", "config_logger_dir"),
    ),
    _ENGINE,
)

SET_ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "arch": {
        **_BY_ENGINE,
        **dict.fromkeys(("fp16", "bf16", "params_dtype"), _DTYPE_RULE),
        **dict.fromkeys(("pipeline_dtype", "autocast_dtype", "enable_autocast"), _DTYPE_RULE),
        **_set_as(_PARALLEL, "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
        **_set_as(_PARALLEL, "expert_model_parallel_size", "expert_tensor_parallel_size", "sequence_parallel"),
        **_set_as(_PARALLEL, "cp_comm_type", "tp_comm_overlap"),
        **_set_as(_PARALLEL, "virtual_pipeline_model_parallel_size", "pipeline_model_parallel_layout"),
        **_set_as(_RECOMPUTE, *(field.name for field in fields(RecomputeConfig))),
        **_set_as(
            _PARALLEL,
            num_layers_in_first_pipeline_stage="decoder_first_pipeline_num_layers",
            num_layers_in_last_pipeline_stage="decoder_last_pipeline_num_layers",
        ),
        **_set_as(
            _ARCH,
            layernorm_epsilon="norm_epsilon",
            layernorm_zero_centered_gamma="apply_layernorm_1p",
            gated_linear_unit="swiglu",
            num_moe_experts="num_experts",
            init_method="init_method_std",
            output_layer_init_method="init_method_std",
        ),
        **dict.fromkeys(
            ("mtp_standalone", "mtp_use_repeated_layer", "mtp_detach_heads", "mtp_hybrid_override_pattern"),
            f"has no effect, the layers of {_ARCH}.mtp_num_layers are not Megatron-Core's own; delete it",
        ),
        "activation_func": f"choose it with {_ARCH}.swiglu, squared_relu or openai_gelu",
        "calculate_per_token_loss": RETIRED["calculate_per_token_loss"],
    },
    "optimizer": {
        **dict.fromkeys(("fp16", "bf16", "params_dtype"), _DTYPE_RULE),
        **_set_as(_RATE, "lr", "min_lr"),
        **_set_as(_DTYPE, "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        **_set_as(_DDP, "overlap_param_gather"),
        **_set_as(_LOGGER, log_num_zeros_in_grad="add_num_zeros_in_grad_to_metrics"),
        "timers": _ENGINE,
        "config_logger_dir": _ENGINE,
    },
    "ddp": {
        **_set_as(_OPTIMIZER, "use_distributed_optimizer"),
        **_set_as(_DDP, grad_reduce_in_fp32="accumulate_allreduce_grads_in_fp32", bucket_size="ddp_bucket_size"),
        **_set_as(_TRAIN, check_for_nan_in_grad="check_for_nan_in_loss_and_grad"),
    },
}
"""Section -> Megatron-Core's fields that the program fills from other keys -> what to do."""


def key_advice(section_path: str, key: str) -> str | None:
    """What to do about a key that does not belong in this section; None for an unknown key."""
    elsewhere = SET_ELSEWHERE.get(SECTION_AT.get(section_path, ""), {})
    if key in elsewhere:
        return elsewhere[key]
    if key in RETIRED:
        return RETIRED[key]
    hints = get_type_hints(RunConfig)
    for section, path in SECTION_PATHS.items():
        if path != section_path and key in {field.name for field in fields(hints[section])} - CATCH_ALL:
            return f"belongs to {path}"
    return None

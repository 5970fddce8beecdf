"""The form of every error about a value, and the table of pairs of keys that contradict each other: a key that needs a
value of another key, without which it has no effect or does not work.

Computed contradictions, and those of more keys, are in the files of the sections.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from operator import attrgetter
from typing import Any, NoReturn

from megatron_wrap.config.reading.tree import SetBy
from megatron_wrap.config.reading.yaml_nodes import inline_yaml
from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.config.schema.keys import Range
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig
from megatron_wrap.errors import ConfigError, LayoutError, Mistakes


def refuse(config: RunConfig, keys: Sequence[str], rule: str, error: type[Exception] | None = None) -> NoReturn:
    """Raises `error` about the first of `keys` (each section.key) that the command line sets, else the first that the
    run's YAML sets, else the first. By default, `error` is LayoutError if the first key is one of the parallel layout,
    else ConfigError."""
    error = error or (LayoutError if keys[0].startswith("parallel.") else ConfigError)
    paths = [f"{SECTION_PATHS[section]}.{key}" for section, _, key in (name.partition(".") for name in keys)]
    # the value that was set last is the likeliest mistake
    path = max(paths, key=lambda path: max(config.set_by(path), SetBy.HF_PATH))
    raise error(f"{config.located(path)}: {rule}")


def check_each(config: RunConfig, checks: Iterable[Callable[[RunConfig], object]]) -> None:
    """Calls all of these checks.

    Raises:
        MegatronWrapError: the first mistake; `further` are the first ones of the other checks.
    """
    mistakes = Mistakes()
    for check in checks:
        with mistakes.collected():
            check(config)
    mistakes.raise_first()


def divisors(number: int) -> str:
    """All divisors as text."""
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)


def neighbours(size: int, unit: int) -> str:
    """The multiples of `unit` around `size` as text."""
    lower = size // unit * unit
    return f"{lower} and {lower + unit}" if lower else str(unit)


@dataclass(frozen=True)
class Need:
    """`key` needs one of some values of `other`; both are section.key of `RunConfig`."""

    key: str
    other: str
    values: Range | tuple[Any, ...] = ()
    """Allowed values of `other`; empty: any value but null."""
    when: Any = None
    """The value, or the range of values, of `key` that needs `other`; None: all values but its default, null and
    false."""
    remedy: str = ""
    """Advice on setting `other`, where its name and values do not define it."""
    reason: str = ""
    """Reason of the need, where the keys alone do not explain it."""

    def is_met_by(self, value: Any) -> bool:
        """Whether a value of `other` satisfies the need of `key`."""
        if isinstance(self.values, Range):
            return self.values.holds(value)
        return value in self.values if self.values else value is not None


_WITH_SAMPLES = "write data: {__select__: dataset}"
_INDEXED = "write data: {__select__: indexed}"
_NOT_INDEXED = ("none", "dataset", "jsonl", "mock")
_FLOWS_ON_TEXT = (*("gpt_sft", "gpt_dpo", "gpt_kto", "gpt_cpo", "gpt_orpo", "gpt_distill", "gpt_grpo", "gpt_reward"),)
_INDEXED_ONLY = (
    *("split", "mock_data", "eod_token", "eod_mask_loss", "reset_position_ids", "reset_attention_mask"),
    "index_samples",
)
_MUON = ("muon_momentum", "muon_nesterov", "muon_num_ns_steps", "muon_adjust_lr_fn", "muon_split_qkv", "muon_ns_dtype")
_DTYPES_OF_ADAM = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "main_params_dtype")

_UNSCALED_ROPE = (
    ("position_embedding_type", ("rope",)),
    ("use_rope_scaling", (False,)),
    ("rotary_seq_len_interpolation_factor", (None,)),
)
"""Keys and values that rope_type yarn and longrope need: Megatron-Core's code for them ignores other scalings."""
_WHOLE_HEADS_BY_HALVES = (("rotary_interleaved", (False,)), ("rotary_percent", (1.0,)))
"""Keys and values that Megatron-Core's YaRN needs (yarn_rotary_pos_embedding.py)."""
_LATENT_ATTENTION = (
    *(*_UNSCALED_ROPE, *_WHOLE_HEADS_BY_HALVES),
    *((name, (False,)) for name in ("add_qkv_bias", "add_bias_linear", "attention_output_gate")),
    *(("window_size", (None,)), ("softmax_type", ("vanilla",)), ("correction_range_round_to_int", (True,))),
)
_OF_FP8 = ("fp8_param_gather", "first_last_layers_bf16")
_VIRTUAL_SIZE = "virtual_pipeline_model_parallel_size"
_NUMBERS_OF_LAYERS = (
    *("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    "num_layers_per_virtual_pipeline_stage",
)
_QUANTIZED_AT_START = "checkpoints cannot contain weights that are quantized from those of hf_path"
_OWN_VALUES = "it needs the weights' own values"

NEEDS = (
    Need("bad_steps.on_bad_step", "train.check_for_nan_in_loss_and_grad", (True,)),
    Need("bad_steps.max_in_a_row", "bad_steps.on_bad_step", ("skip",)),
    Need("bad_steps.max_rollbacks", "bad_steps.on_bad_step", ("rollback",)),
    Need("bad_steps.on_bad_step", "train.save", when="rollback"),
    *(
        Need("bad_steps.on_bad_step", f"train.{name}", (False,), when="rollback")
        for name in ("no_save_optim", "no_load_optim", "no_save_rng", "no_load_rng")
    ),
    Need("bad_steps.spike_threshold", "train.check_for_nan_in_loss_and_grad", (True,)),
    Need("bad_steps.spike_window", "bad_steps.spike_threshold"),
    Need("arch.group_query_attention", "arch.num_query_groups"),
    Need("arch.window_attn_skip_freq", "arch.window_size"),
    Need("arch.window_rotary_base", "arch.window_size"),
    Need("arch.qk_layernorm_type", "arch.qk_layernorm", (True,), when="per_layer"),
    Need("arch.qk_layernorm_type", "arch.multi_latent_attention", (False,), when="per_layer"),
    Need("arch.qk_layernorm_type", "arch.normalization", ("RMSNorm",), when="per_layer"),
    Need("arch.window_rotary_base", "arch.position_embedding_type", ("rope",), when=Range(above=0)),
    Need("arch.window_rotary_base", "arch.multi_latent_attention", (False,), when=Range(above=0)),
    Need("arch.window_rotary_base", "arch.rope_type", ("rope", "yarn"), when=Range(above=0)),
    Need("arch.use_rope_scaling", "arch.position_embedding_type", ("rope",)),
    *(Need("arch.rope_type", f"arch.{name}", values, when="yarn") for name, values in _UNSCALED_ROPE),
    *(Need("arch.rope_type", f"arch.{name}", values, when="yarn") for name, values in _WHOLE_HEADS_BY_HALVES),
    *(Need("arch.rope_type", f"arch.{name}", values, when="longrope") for name, values in _UNSCALED_ROPE),
    Need("arch.rope_type", "arch.multi_latent_attention", (False,), when="longrope"),
    Need("arch.attn_logit_softcapping", "arch.multi_latent_attention", (False,), when=Range(above=0)),
    Need("arch.attn_logit_softcapping", "arch.softmax_type", ("vanilla",), when=Range(above=0)),
    Need("arch.attn_logit_softcapping", "arch.transformer_impl", ("auto", "torch"), when=Range(above=0)),
    *(
        Need("arch.norm_placement", f"arch.{name}", (value,), when=placement)
        for name, value in (("multi_latent_attention", False), ("experimental_attention_variant", None))
        for placement in ("after", "both")
    ),
    *(Need("arch.multi_latent_attention", f"arch.{name}", values, when=True) for name, values in _LATENT_ATTENTION),
    Need("arch.mtp_loss_scaling_factor", "arch.mtp_num_layers"),
    Need("arch.mtp_num_layers", "arch.position_embedding_type", ("rope", "none"), when=Range(at_least=1)),
    Need("arch.mtp_num_layers", "arch.window_rotary_base", (None,), when=Range(at_least=1)),
    Need("arch.mtp_num_layers", "dtype.fp8", (None,)),
    Need("arch.mtp_num_layers", "adapter.adapter_type", ("none",), reason="an adapter does not train these layers"),
    Need("arch.moe_ffn_hidden_size", "arch.num_experts"),
    Need("arch.moe_shared_expert_intermediate_size", "arch.num_experts"),
    Need("arch.moe_shared_expert_gate", "arch.moe_shared_expert_intermediate_size", when=True),
    Need("arch.moe_router_enable_expert_bias", "arch.moe_router_score_function", ("sigmoid",), when=True),
    Need("arch.moe_router_num_groups", "arch.moe_router_group_topk", when=Range(at_least=1)),
    Need("arch.moe_router_group_topk", "arch.moe_router_num_groups", when=Range(at_least=1)),
    Need("arch.moe_router_group_score_experts", "arch.moe_router_num_groups", when=Range(at_least=1)),
    Need("train.router_replay", "arch.num_experts"),
    Need("parallel.expert_model_parallel_size", "arch.num_experts"),
    Need("parallel.expert_tensor_parallel_size", "arch.num_experts"),
    Need("parallel.tp_comm_overlap", "arch.multi_latent_attention", (False,)),
    Need("parallel.tp_comm_overlap", "adapter.adapter_type", ("none",)),
    Need("parallel.sequence_parallel", "parallel.tensor_model_parallel_size", Range(above=1)),
    Need(
        "parallel.virtual_pipeline_model_parallel_size",
        "parallel.pipeline_model_parallel_size",
        Range(above=1),
        when=Range(above=1),
    ),
    Need("parallel.num_layers_per_virtual_pipeline_stage", "parallel.pipeline_model_parallel_size", Range(above=1)),
    Need("parallel.decoder_first_pipeline_num_layers", "parallel.pipeline_model_parallel_size", Range(above=1)),
    Need("parallel.decoder_last_pipeline_num_layers", "parallel.pipeline_model_parallel_size", Range(above=1)),
    Need("parallel.pipeline_model_parallel_layout", "parallel.pipeline_model_parallel_size", Range(above=1)),
    Need(f"parallel.{_NUMBERS_OF_LAYERS[-1]}", f"parallel.{_VIRTUAL_SIZE}", (None,), when=Range(at_least=1)),
    *(Need("parallel.pipeline_model_parallel_layout", f"parallel.{name}", (None,)) for name in _NUMBERS_OF_LAYERS),
    Need("learning_rate.lr_wsd_decay_iters", "learning_rate.lr_decay_style", ("WSD",)),
    Need("learning_rate.lr_wsd_decay_samples", "learning_rate.lr_decay_style", ("WSD",)),
    Need("optimizer.use_distributed_optimizer", "optimizer.optimizer", ("adam",)),
    *(Need(f"optimizer.{name}", "optimizer.optimizer", ("muon",)) for name in _MUON),
    Need("optimizer.use_precision_aware_optimizer", "optimizer.optimizer", ("adam",)),
    Need("optimizer.use_precision_aware_optimizer", "optimizer.use_distributed_optimizer", (None, True)),
    Need("optimizer.use_precision_aware_optimizer", "init.platform", ("auto", "cuda")),
    *(Need(f"optimizer.{name}", "optimizer.use_precision_aware_optimizer", (True,)) for name in _DTYPES_OF_ADAM),
    Need("optimizer.fused_clipping", "optimizer.optimizer", ("adam",)),
    Need("optimizer.fused_clipping", "optimizer.use_precision_aware_optimizer", (False,)),
    Need("optimizer.main_grads_dtype", "ddp.accumulate_allreduce_grads_in_fp32", (False,)),
    Need("optimizer.main_params_dtype", "dtype.bf16", (True,)),
    Need("ddp.overlap_param_gather", "optimizer.optimizer", ("adam",)),
    Need("ddp.overlap_param_gather", "optimizer.use_distributed_optimizer", (None, True)),
    Need("ddp.overlap_param_gather", "ddp.overlap_grad_reduce", (None, True)),
    Need("optimizer.override_opt_param_scheduler", "optimizer.use_checkpoint_opt_param_scheduler", (False,)),
    Need("dtype.fp16", "dtype.bf16", (False,), reason="select one of bf16, fp16, fp32"),
    Need("dtype.loss_scale", "dtype.fp16", (True,)),
    Need("recompute.recompute_granularity", "recompute.recompute_method", when="full"),
    Need("recompute.recompute_granularity", "recompute.recompute_num_layers", when="full"),
    Need("recompute.recompute_method", "recompute.recompute_granularity", ("full",)),
    Need("recompute.recompute_num_layers", "recompute.recompute_granularity", ("full",)),
    Need("recompute.recompute_modules", "recompute.recompute_granularity", ("selective",)),
    Need("data.train", "data.data_key", ("dataset", "jsonl", "indexed"), remedy=_WITH_SAMPLES),
    Need("data.validation", "data.data_key", ("dataset", "jsonl", "indexed"), remedy=_WITH_SAMPLES),
    *(Need(f"data.{name}", "data.data_key", ("indexed",), remedy=_INDEXED) for name in _INDEXED_ONLY),
    Need("data.reset_attention_mask", "flow.packing", (True,)),
    Need("flow.flow_key", "data.data_key", ("none", "dataset", "jsonl", "indexed"), "gpt_pretrain", _INDEXED),
    *(
        Need("flow.flow_key", "data.data_key", ("none", "dataset", "jsonl"), when=flow, remedy=_WITH_SAMPLES)
        for flow in _FLOWS_ON_TEXT
    ),
    Need("arch.linear_attention_freq", "arch.experimental_attention_variant"),
    Need("arch.experimental_attention_variant", "arch.linear_attention_freq"),
    Need("arch.experimental_attention_variant", "arch.multi_latent_attention", (False,), when="gated_delta_net"),
    Need("arch.experimental_attention_variant", "dtype.fp8", (None,)),
    Need("arch.transformer_impl", "init.platform", ("auto", "cuda"), when="transformer_engine"),
    Need("arch.moe_token_dispatcher_type", "init.platform", ("auto", "cuda"), when="flex"),
    Need("arch.experts_impl", "init.platform", ("auto", "cuda"), when="transformer_engine"),
    Need("arch.experts_impl", "arch.transformer_impl", ("auto", "transformer_engine"), when="transformer_engine"),
    Need("arch.moe_grouped_gemm", "init.platform", ("auto", "cuda")),
    Need("arch.moe_grouped_gemm", "arch.transformer_impl", ("auto", "transformer_engine")),
    Need("dtype.fp8", "init.platform", ("auto", "cuda")),
    *(Need("dtype.fp8", "dtype.bf16", (True,), when, "select dtype bf16") for when in ("hybrid", "e4m3")),
    Need("dtype.fp8", "arch.transformer_impl", ("auto", "transformer_engine")),
    *(Need(f"dtype.{name}", "dtype.fp8", when=True, remedy="set it to hybrid") for name in _OF_FP8),
    Need("dtype.fp8_param_gather", "optimizer.use_distributed_optimizer", (None, True)),
    Need("dtype.fp8_param_gather", "adapter.adapter_type", ("none",), reason="its frozen weights are not gathered"),
    # transformer_config.py: FP8 is then entered once for all layers
    Need("dtype.first_last_layers_bf16", "dtype.fp8_recipe", ("tensorwise", "blockwise"), when=True),
    Need("train.freeze", "adapter.adapter_type", ("none",), reason="an adapter freezes all other weights"),
    Need("adapter.use_dora", "adapter.lora_dropout", (0.0,), when=True, reason="DoRA scales the base's output"),
    Need("adapter.use_dora", "adapter.target_parameters", ((),), when=True, remedy="write []"),
    Need("adapter.use_dora", "adapter.base_weights", ("bf16",), when=True, reason=_OWN_VALUES),
    Need("adapter.use_dora", "arch.transformer_impl", ("auto", "torch")),
    Need("adapter.use_dora", "dtype.fp8", (None,)),
    *(
        Need("adapter.init_lora_weights", f"adapter.{name}", (value,), "pissa", reason=reason)
        for name, value, reason in (
            ("target_parameters", (), "it decomposes linear layers, not those of fused experts, as in peft"),
            ("base_weights", "bf16", _OWN_VALUES),
            ("use_dora", False, "peft's conversion to an adapter of the original base loses DoRA's norms"),
        )
    ),
    Need("adapter.base_weights", "arch.transformer_impl", ("auto", "torch")),
    Need("adapter.base_weights", "dtype.fp8", (None,)),
    Need("adapter.keep_base", "adapter.base_weights", ("bf16",), when=True, reason=_QUANTIZED_AT_START),
    Need("model_provider.verify_hf", "adapter.base_weights", ("bf16",)),
    Need("train.global_batch_tokens", "train.rampup_batch_size", (None,), reason="it counts samples"),
    Need("train.global_batch_tokens", "train.train_samples", (None,), reason="it counts samples"),
    Need("train.global_batch_tokens", "data.data_key", _NOT_INDEXED, reason="windows have seq_length tokens each"),
    Need("train.save_interval", "train.save"),
    Need("checkpoint.keep", "train.save"),
    Need("checkpoint.export_hf", "train.save"),
    Need("model_provider.verify_hf", "model_provider.hf_path"),
    Need("train.finetune", "train.load"),
    Need("train.early_stop_patience", "checkpoint.best_metric"),
    Need("checkpoint.best_metric", "train.eval_interval"),
)


def applies(section_path: str, key: str, values: Mapping[str, Any]) -> bool:
    """Whether the other keys of the section have the values that `key` needs, whatever its own value is."""
    for need in NEEDS:
        (section, _, name), (other_section, _, other) = need.key.partition("."), need.other.partition(".")
        is_rule = (SECTION_PATHS[section], name, other_section) == (section_path, key, section) and need.when is None
        if is_rule and not need.is_met_by(values.get(other)):
            return False
    return True


def check_needs(config: RunConfig) -> None:
    """Check `NEEDS`.

    Raises:
        ConfigError, LayoutError: a key is set, and the other does not have the value that it needs.
    """
    mistakes = Mistakes()
    for need in NEEDS:
        (value, other), unused = attrgetter(need.key, need.other)(config), _default(config, need.key)
        if need.when is None:
            applies = value is not None and value is not False and value != unused
        elif isinstance(need.when, Range):
            applies = value is not None and need.when.holds(value)
        else:
            applies = value == need.when
        if applies and not need.is_met_by(other):
            with mistakes.collected():
                refuse(config, [need.key, need.other], _rule(need, value, other, unused))
    mistakes.raise_first()


def _default(config: RunConfig, name: str) -> Any:
    section, _, key = name.partition(".")
    field = type(getattr(config, section)).__dataclass_fields__[key]
    return field.default if field.default_factory is MISSING else field.default_factory()


def _rule(need: Need, value: Any, other: Any, unused: Any) -> str:
    (section, _, key), (other_section, _, other_key) = need.key.partition("."), need.other.partition(".")
    path = other_key if section == other_section else f"{SECTION_PATHS[other_section]}.{other_key}"
    if isinstance(need.values, Range):
        wanted = str(need.values)
    else:
        *others, last = [*map(_text, need.values)] or [""]
        wanted = f"{', '.join(others)} or {last}" if others else last
    needed = f"{key} {_text(value)} needs {path} {wanted}".rstrip()
    remedy = need.remedy or ("set it" if other is None else "change it")
    without = f"choose another {key}" if unused is MISSING else f"write {key}: {_text(unused)}"
    reason = f" ({need.reason})" if need.reason else ""
    return f"{needed}, which is {_text(other)}{reason}; {remedy}, or {without}"


def _text(value: Any) -> str:
    """A value as YAML; a list of sources as their names."""
    if isinstance(value, Mapping):
        value = tuple(value)
    if isinstance(value, tuple):
        names = [item.name if isinstance(item, SourceConfig) else str(item) for item in value]
        return f"[{', '.join(names)}]"
    return inline_yaml(value)

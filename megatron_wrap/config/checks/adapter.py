"""Contradictions between `megatron_wrap.adapter` and the rest of the run."""

import re

from megatron_wrap.config.checks.contradictions import refuse
from megatron_wrap.config.schema.model import AdapterConfig
from megatron_wrap.config.schema.run import RunConfig


def check_adapter(config: RunConfig) -> None:
    """Check `megatron_wrap.adapter`, and the requirements of an adapter on the rest of the run.

    Raises:
        ConfigError: values that contradict each other or are not supported together.
    """
    adapter, settings = config.adapter, config.models.reference_or_teacher
    if adapter.adapter_type == "none":
        if settings is not None and settings.is_policy:
            key = f"models.{config.models.role}"
            refuse(config, [key], "base is the policy without its adapter; select megatron_wrap.adapter: lora, or copy")
        if adapter != AdapterConfig():
            changed = next(name for name in vars(adapter) if getattr(adapter, name) != getattr(AdapterConfig(), name))
            refuse(
                config, [f"adapter.{changed}"], "has no effect without an adapter; select megatron_wrap.adapter: lora"
            )
        return
    if settings is not None and settings.copy:
        key = f"models.{config.models.role}"
        refuse(config, [key], "with an adapter the first policy is its base, which needs no copy; write base")
    _check_layers(config)
    if adapter.path is not None and config.train.load is not None:
        refuse(
            config,
            ["adapter.path", "train.load"],
            f"adapter.path {adapter.path!r} and train.common.load {config.train.load!r} both name weights to "
            "start from, and path is read only with the weights of model_provider.hf_path; delete one of the two",
        )
    for name in adapter.others or {}:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name == "default":
            text = f"{name} cannot be a name; write letters, digits, _ and -, and not default, the trained adapter's"
            refuse(config, ["adapter.others"], text)
    if settings is not None and settings.adapter is not None and settings.adapter not in (adapter.others or {}):
        text = f"{settings.adapter} is no adapter of megatron_wrap.adapter.others; add it there"
        refuse(config, [f"models.{config.models.role}"], text)
    if adapter.base_weights != "bf16":
        _check_quantized(config)
    if adapter.target_parameters:
        _check_experts(config)
    _check_patterns(config)


def _check_quantized(config: RunConfig) -> None:
    kind = config.adapter.base_weights
    if config.model_provider.hf_path is None and config.train.save is not None:
        text = f"weights in {kind} are quantized from a Hugging Face folder, which a resumed run needs; set hf_path"
        refuse(config, ["adapter.base_weights", "model_provider.hf_path"], text)


def _check_experts(config: RunConfig) -> None:
    """Refuse settings that adapters of experts do not support; peft does not support them either."""
    arch = config.arch
    if config.adapter.lora_dropout:
        rule = "target_parameters cannot drop an adapter's inputs, as in peft; write 0.0"
        refuse(config, ["adapter.target_parameters", "adapter.lora_dropout"], rule)
    if all(entry.endswith(".weight") for entry in config.adapter.target_parameters):
        return  # only linear layers have adapters
    if arch.experts_impl not in ("auto", "grouped_mm") or arch.moe_grouped_gemm is not None:
        key = "arch.moe_grouped_gemm" if arch.moe_grouped_gemm is not None else "arch.experts_impl"
        rule = "adapters of experts are computed in grouped products; set experts_impl to grouped_mm"
        refuse(config, ["adapter.target_parameters", key], rule)


def _check_layers(config: RunConfig) -> None:
    """Refuse layers that cannot have adapters."""
    if config.arch.num_experts is not None:
        if config.arch.transformer_impl == "transformer_engine":
            rule = "adapters in a mixture of experts need torch's layers; write auto or torch"
            refuse(config, ["arch.transformer_impl"], rule)
        if config.dtype.fp8 is not None:
            refuse(config, ["dtype.fp8"], "adapters in a mixture of experts are trained in bf16 or fp32; write null")


def _check_patterns(config: RunConfig) -> None:
    adapter = config.adapter
    if adapter.layers_to_transform and isinstance(adapter.target_modules, str):
        refuse(config, ["adapter.layers_to_transform"], "needs a list of target_modules, as in peft")
    for index in adapter.layers_to_transform:
        if not 0 <= index < config.arch.num_layers:
            refuse(config, ["adapter.layers_to_transform"], f"there is no layer {index} of {config.arch.num_layers}")
    for key in ("target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"):
        patterns = getattr(adapter, key) or ()
        for pattern in [patterns] if isinstance(patterns, str) else patterns if "pattern" in key else ():
            try:
                re.compile(pattern)
            except re.error as error:
                refuse(config, [f"adapter.{key}"], f"{pattern} is not a regular expression: {error}")
    for key, kind in (("rank_pattern", int), ("alpha_pattern", (int, float))):
        for pattern, value in (getattr(adapter, key) or {}).items():
            if not isinstance(value, kind) or isinstance(value, bool) or value <= 0:
                number = "a positive integer" if kind is int else "a positive number"
                refuse(config, [f"adapter.{key}"], f"{pattern} must be {number}, not {value!r}")

"""Builds Megatron-Core's optimizer and its schedule of learning rate and weight decay from the configuration."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.derived import fp8_settings
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.engine.state.muon import MatrixLayout
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.model.initial_weights import is_expert, split_dim
from megatron_wrap.model.transformer_config import parameter_dtype, same_named
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.platform.megatron_core.adam import another_adam, another_sgd
from megatron_wrap.platform.megatron_core.versions import accepts

if TYPE_CHECKING:
    from megatron_wrap.engine.state.checked_optimizer import CheckedOptimizer


_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.uint8}
"""Dtypes of optimizer states by name, as in Megatron-LM's arguments.py; Transformer Engine keeps FP8 in bytes."""
_OF_DTYPE = ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "main_params_dtype")


def build_optimizer(
    config: RunConfig, model_config: Any, chunks: list[torch.nn.Module], parallel: ParallelState
) -> CheckedOptimizer:
    """Megatron-Core's optimizer over all chunks. In half precision it also scales the loss: `grad_scale_func` of
    `model_config` is extended by the loss scale."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from megatron_wrap.engine.state.checked_optimizer import CheckedOptimizer, KernelAdam

    optim, dtype, fp8 = config.optimizer, config.dtype, fp8_settings(config)
    settings: dict[str, Any] = {
        **same_named(optim, OptimizerConfig),
        **same_named(config.learning_rate, OptimizerConfig),
        **same_named(dtype, OptimizerConfig),
        "fp8_recipe": None if fp8 is None else fp8.recipe,
        "overlap_param_gather": config.ddp.overlap_param_gather,
        "log_num_zeros_in_grad": config.logger.add_num_zeros_in_grad_to_metrics,
        "params_dtype": parameter_dtype(config),
        **optim.upstream,
        "optimizer": "sgd" if optim.optimizer == "sgd" else "adam",  # in addition to Muon
        **{name: _DTYPES[getattr(optim, name)] for name in _OF_DTYPE},
    }
    optimizer_config = OptimizerConfig(**accepts(OptimizerConfig, settings))
    overrides = _loraplus(config, optimizer_config)
    if optim.optimizer == "muon":
        parts = _with_muon(config, optimizer_config, chunks, parallel, overrides)
    else:
        with another_adam(KernelAdam if optim.fused_clipping else None):
            parts = get_megatron_optimizer(optimizer_config, chunks, **overrides).chained_optimizers
    optimizer = CheckedOptimizer(parts)
    average = model_config.grad_scale_func
    if dtype.bf16 or dtype.fp16:
        model_config.grad_scale_func = lambda loss: optimizer.scale_loss(loss if average is None else average(loss))
    return optimizer


def _with_muon(
    config: RunConfig,
    optimizer_config: Any,
    chunks: list[torch.nn.Module],
    parallel: ParallelState,
    overrides: Mapping[str, Any],
) -> list[Any]:
    """Megatron-Core's optimizers with AdamW and with Muon, each for its parameters; an optimizer is left out if no
    process has parameters for it."""
    from megatron.core.optimizer import get_megatron_optimizer

    from megatron_wrap.engine.state.muon import Muon

    optim, of_muon = config.optimizer, muon_layouts(config, chunks, parallel)
    trained = [parameter for chunk in chunks for parameter in chunk.parameters() if parameter.requires_grad]
    with left_out(of_muon):
        parts = get_megatron_optimizer(optimizer_config, chunks, **overrides).chained_optimizers
    layouts: dict[torch.Tensor, MatrixLayout] = {}

    def muon(params: Any, lr: float, weight_decay: float, momentum: float) -> Muon:
        adjustment, dtype = optim.muon_adjust_lr_fn, _DTYPES[optim.muon_ns_dtype]
        of_iteration = (optim.muon_momentum, optim.muon_nesterov, optim.muon_num_ns_steps, adjustment, dtype)
        return Muon(params, lr, weight_decay, *of_iteration, layouts)

    with (
        left_out([parameter for parameter in trained if parameter not in of_muon]),
        another_sgd(optimizer_config, muon),
    ):
        parts += get_megatron_optimizer(optimizer_config, chunks, **overrides).chained_optimizers
    # in half precision the optimizer updates an fp32 copy
    layouts.update({getattr(parameter, "main_param", parameter): layout for parameter, layout in of_muon.items()})
    return [part for part in parts if part.optimizer is not None]


def _loraplus(config: RunConfig, optimizer_config: Any) -> dict[str, Any]:
    """Argument of `get_megatron_optimizer` for another learning rate of the factors B (LoRA+, arXiv:2402.12354)."""
    ratio, rate = config.adapter.loraplus_lr_ratio, config.learning_rate
    if config.adapter.adapter_type == "none" or ratio is None:
        return {}
    from megatron.core.optimizer import get_standard_config_overrides
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

    is_b = ParamWithNamePredicate(name="lora_B", fn=lambda _parameter, name: ".lora_B_" in name)
    faster = {"max_lr": rate.lr * ratio, "min_lr": rate.min_lr * ratio}
    standard = get_standard_config_overrides(config=optimizer_config)
    return {"config_overrides": {**standard, ParamKey(with_name_predicate=is_b): faster}}


def build_lr_scheduler(config: RunConfig, optimizer: CheckedOptimizer) -> Any:
    """Megatron-Core's schedule of learning rate and weight decay; it counts samples, as in Megatron-LM."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    rate, optim = config.learning_rate, config.optimizer
    return OptimizerParamScheduler(
        optimizer,
        init_lr=rate.lr_warmup_init,
        **derived.schedule_values(config),
        use_checkpoint_opt_param_scheduler=optim.use_checkpoint_opt_param_scheduler,
        override_opt_param_scheduler=optim.override_opt_param_scheduler,
        wsd_decay_steps=derived.lr_wsd_decay_samples(config),
        lr_wsd_decay_style=rate.lr_wsd_decay_style,
    )


_ENDS = ("embedding.", "output_layer.", "output_layer_adapter.")
"""Prefixes of the names of parameters at the model's ends, whose rows are tokens: Muon is not made for them."""


def is_muon_matrix(name: str, parameter: Tensor) -> bool:
    """Whether Muon updates a parameter of a bare chunk: matrices of the layers and their adapters, as in Megatron-Core
    (optimizer/muon.py). AdamW updates the rows of new tokens and everything else."""
    is_matrix = parameter.dim() == 2 or (parameter.dim() == 3 and is_expert(name))
    is_bias = name.rsplit(".", 1)[-1].startswith("bias")
    ends = name.startswith(_ENDS) or getattr(parameter, "is_embedding_or_output_parameter", False)
    return is_matrix and not (is_bias or ends or "token_rows" in name)


def muon_layouts(config: RunConfig, chunks: Sequence[Any], parallel: ParallelState) -> dict[Tensor, MatrixLayout]:
    """The trained parameters of this process that Muon updates, with their layouts."""
    return {
        parameter: _layout(config, name, parameter, parallel)
        for chunk in chunks
        for name, parameter in bare_model(chunk).named_parameters()
        if parameter.requires_grad and is_muon_matrix(name, parameter)
    }


def _layout(config: RunConfig, name: str, parameter: Tensor, parallel: ParallelState) -> MatrixLayout:
    experts = is_expert(name)
    tp, replicas = (parallel.expert_tp, parallel.expert_dp) if experts else (parallel.tp, parallel.dp_cp)
    # the rule for names of one expert's parameters, whose end is "weight" however the experts are stored
    dim = split_dim(name.rstrip("0123456789"), parameter)
    whole_rows = parameter.shape[-2] * (tp.size if dim == 0 else 1)
    if name.endswith("self_attention.linear_qkv.weight") and config.optimizer.muon_split_qkv:
        groups, head = derived.num_query_groups(config.arch), derived.kv_channels(config.arch)
        queries = whole_rows // groups - 2 * head  # with the gate of the output, as Hugging Face's q_proj has it
        return MatrixLayout(tp, dim, replicas, groups, (queries, head, head))
    if ".linear_fc1.weight" in name and derived.is_gated(config.arch):
        half = parameter.shape[-2] // 2  # each shard contains its part of the gate, then its part of up
        return MatrixLayout(tp, dim, replicas, tp.size if dim == 0 else 1, (half, half))
    return MatrixLayout(tp, dim, replicas)


@contextlib.contextmanager
def left_out(parameters: Collection[Tensor]) -> Iterator[None]:
    """Context in which these parameters require no gradient, so that Megatron-Core builds an optimizer of the
    others."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)

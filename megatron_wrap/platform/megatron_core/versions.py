"""The differences between Megatron-Core 0.16 and 0.19, detected by attribute or signature; handled only here."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.metadata
import inspect
import json
import math
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_wrap.errors import CheckpointError, ConfigError, PlatformError
from megatron_wrap.nearest_names import did_you_mean

SUPPORTED = (">=0.16.1,<0.17", ">=0.19,<0.20")

# 0.19 imports triton unconditionally in this module only; see `torch_view.py`.
TRITON_MODULES = ("megatron.core.transformer.moe.ops.paged_stash",)


def version() -> str:
    """The installed Megatron-Core's version from its package metadata, such as "0.16.1"; does not import it.

    Raises:
        PlatformError: it is not installed.
    """
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError as error:
        raise PlatformError(
            f"megatron-core is not installed; pip install 'megatron-core{SUPPORTED[0]}' "
            f"(Python 3.12 and later: {SUPPORTED[1]})"
        ) from error


def check_version() -> tuple[int, ...]:
    """The installed Megatron-Core's release, such as (0, 16, 1).

    Raises:
        PlatformError: not installed, or not in `SUPPORTED`.
    """
    # 0.19 runs git at import to add a commit to its version string, even one of an unrelated repository.
    os.environ.setdefault("NO_VCS_VERSION", "1")
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    installed = version()
    if not any(SpecifierSet(range_).contains(installed, prereleases=True) for range_ in SUPPORTED):
        raise PlatformError(
            f"megatron-core {installed} is not supported; install one of {' or '.join(SUPPORTED)} "
            "(pip installs 0.16.1 before Python 3.12 and 0.19 from 3.12)"
        )
    return Version(installed).release


def unexpected(difference: str) -> PlatformError:
    """The error for a part of Megatron-Core that differs from what this package expects."""
    return PlatformError(
        f"megatron-core {version()} is not supported: {difference}; install an unmodified release of "
        f"{' or '.join(SUPPORTED)}"
    )


def accepts(cls: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings, validated as arguments of one of Megatron-Core's dataclasses.

    Raises:
        ConfigError: this version's dataclass has no such field.
    """
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    for name in settings:
        if name not in known:
            raise ConfigError(
                f"{name}: megatron-core {version()} has no such field in {cls.__name__}{did_you_mean(name, known)}"
            )
    return dict(settings)


# --- layer specs -----------------------------------------------------------------------------------------------------


_ATTENTION_NORM_PREFIXES: dict[bool, dict[str, str]] = {
    False: {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    True: {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    },
}
"""Whether attention is multi-latent -> parameter prefix in local layers -> prefix in Transformer Engine's layers."""


def local_layer_spec(*, norm: type | None = None, core_attention: type | None = None, **arguments: Any) -> Any:
    """The spec of a decoder layer of Megatron-Core's local modules.

    Args:
        norm: replaces every norm of the layer, including query and key norms but not L2 norms.
        core_attention: replaces DotProductAttention.
        arguments: arguments of `get_gpt_layer_local_spec`: num_experts, moe_grouped_gemm, qk_layernorm, normalization,
            qk_l2_norm (0.19: the config's `qk_l2_norm` must agree), multi_latent_attention, ...

    Returns:
        A ModuleSpec.

    Raises:
        ConfigError: an argument that this version's function does not take.
    """
    spec = _layer_spec("get_gpt_layer_local_spec", arguments)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    if core_attention is not None:
        attention.core_attention = core_attention
    if norm is not None:
        norms = [(layer, "input_layernorm"), (layer, "pre_mlp_layernorm")]
        norms += [(attention, name) for name in ("q_layernorm", "k_layernorm", "kv_layernorm")]
        for owner, name in norms:
            if getattr(getattr(owner, name, None), "__name__", "") in ("WrappedTorchNorm", "FusedLayerNorm"):
                setattr(owner, name, norm)
    # Save parameters under their names in Transformer Engine's layers, which fuse a norm into the linear layer that
    # follows it, except before experts and at the input of multi-latent attention.
    layer.sharded_state_dict_keys_map = {
        **_ATTENTION_NORM_PREFIXES[bool(arguments.get("multi_latent_attention"))],
        **({} if arguments.get("num_experts") is not None else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}),
    }
    return spec


def expert_submodules(layer: Any) -> Any:
    """Submodules of the MLP of a layer spec; for a layer with experts `MoESubmodules` (router, experts,
    shared_experts).

    0.16 stores them in a ModuleSpec, 0.19 in a partial.
    """
    mlp = layer.submodules.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


def use_moe_layer(layer: Any, moe_layer: type) -> None:
    """Build the MoE layer of a layer spec as `moe_layer`, a subclass of `MoELayer`; see `expert_submodules`."""
    mlp = layer.submodules.mlp
    if isinstance(mlp, functools.partial):
        layer.submodules.mlp = functools.partial(moe_layer, *mlp.args, **mlp.keywords)
    else:
        mlp.module = moe_layer


def te_layer_spec(**arguments: Any) -> Any:
    """The spec of a decoder layer of Transformer Engine's modules.

    Raises:
        ConfigError: an argument that this version's function does not take.
    """
    return _layer_spec("get_gpt_layer_with_transformer_engine_spec", arguments)


def linear_layers(transformer_engine: bool) -> tuple[type, type]:
    """The classes of a column-parallel and of a row-parallel linear layer."""
    if transformer_engine:
        te = importlib.import_module("megatron.core.extensions.transformer_engine")
        return te.TEColumnParallelLinear, te.TERowParallelLinear
    local = importlib.import_module("megatron.core.tensor_parallel")
    return local.ColumnParallelLinear, local.RowParallelLinear


def use_attention(layer: Any, attention: Any, norm: Any) -> None:
    """Build the attention of a layer spec from another spec, after a norm that is a module of its own and has its own
    name in checkpoints."""
    layer.submodules.self_attention = attention
    layer.submodules.input_layernorm = norm
    names = layer.submodules.sharded_state_dict_keys_map
    layer.submodules.sharded_state_dict_keys_map = {
        ours: saved for ours, saved in names.items() if ours != "input_layernorm."
    }


def use_linears(layer: Any, column: type, row: type, in_mlp: bool = True) -> None:
    """Build the linear layers of a local layer spec as other classes; norms stay modules of their own.

    Args:
        column, row: replace ColumnParallelLinear and RowParallelLinear.
        in_mlp: also in the MLP, which must not have experts then.
    """
    replaced = {"ColumnParallelLinear": column, "RowParallelLinear": row}
    parts = [layer.submodules.self_attention.submodules, *([expert_submodules(layer)] if in_mlp else [])]
    for part in parts:
        for name, module in vars(part).items():
            if (name_of := getattr(module, "__name__", "")) in replaced:
                setattr(part, name, replaced[name_of])


def _layer_spec(name: str, arguments: dict[str, Any]) -> Any:
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    # In 0.19 the function takes **kwargs and passes them to the second one, which has the parameter names.
    submodules_name = name.removesuffix("_spec") + "_submodules"
    known = inspect.signature(getattr(specs, submodules_name, None) or getattr(specs, name)).parameters
    for argument in arguments:
        if argument not in known:
            raise ConfigError(f"{argument}: megatron-core {version()} has no such argument of {name}")
    return getattr(specs, name)(**arguments)


# --- experts ---------------------------------------------------------------------------------------------------------


BALANCE_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Load-balancing type -> the loss's name in `router_loss_values`."""


def router_loss_values() -> dict[str, Any]:
    """Name -> this rank's sums of the routers' losses without their coefficients, [layers]. Returns the tensors
    themselves, so that a caller may zero them. 0.16 stores them in a dictionary, 0.19 in an object."""
    try:
        tracker = importlib.import_module("megatron.core.transformer.moe.moe_logging").get_moe_metrics_tracker()
        return {name: entry.values for name, entry in tracker.metrics.items()}
    except ModuleNotFoundError:
        moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        return {name: entry["values"] for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()}


def router_loss_total(name: str, layer_number: int, layers: int, device: Any) -> Any:
    """The scalar in `router_loss_values` of a loss and a layer, counted from 1; zero if nothing was added yet. It is
    the stored tensor itself, to which a caller may add; it is valid as long as the model."""
    import torch

    zero = torch.zeros((), device=device)
    try:
        tracker = importlib.import_module("megatron.core.transformer.moe.moe_logging").get_moe_metrics_tracker()
        tracker.record(name, zero, layer_number, layers)
    except ModuleNotFoundError:
        moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        moe_utils.save_to_aux_losses_tracker(name, zero, layer_number, layers)
    return router_loss_values()[name][layer_number - 1]


def forget_router_losses() -> None:
    """Drop the tensors of `router_loss_values`. They have the number of layers of the first model, and refer to its
    process groups, so a later model must start without them."""
    moe = "megatron.core.transformer.moe"
    if (logging := sys.modules.get(f"{moe}.moe_logging")) is not None:
        logging.destroy_moe_metrics_tracker()
    elif (utils := sys.modules.get(f"{moe}.moe_utils")) is not None:
        utils.get_moe_layer_wise_logging_tracker().clear()


# --- checkpoints -----------------------------------------------------------------------------------------------------


def save_arguments(async_save: bool) -> dict[str, Any]:
    """Arguments of `dist_checkpointing.save` besides the state, the folder and the strategy.

    For asynchronous saves, 0.19 uses the package nvidia-resiliency-ext by default; this selects the built-in strategy.
    """
    arguments: dict[str, Any] = {"async_sharded_save": async_save}
    saving = importlib.import_module("megatron.core.dist_checkpointing").save
    if async_save and "async_strategy" in inspect.signature(saving).parameters:
        arguments["async_strategy"] = "mcore"
    return arguments


def common_state_file(folder: str | Path) -> bool:
    """Write a missing `common.pt` into a saved checkpoint, so that 0.16 can load a checkpoint of 0.19.

    0.19 stores the non-sharded state inside the distributed format, 0.16 in this file. Call it on one process, after
    the save and before the folder is published. Returns whether a file was written.

    Raises:
        CheckpointError: `folder` contains no distributed checkpoint.
    """
    import torch

    path, metadata_path = Path(folder) / "common.pt", Path(folder) / "metadata.json"
    if not metadata_path.is_file():
        raise CheckpointError(f"{folder} contains no distributed checkpoint: {metadata_path.name} is missing")
    if path.exists():
        return False
    serialization = importlib.import_module("megatron.core.dist_checkpointing.serialization")
    state = serialization.load_common_state_dict(str(folder))
    torch.save(state, path)
    # 0.16's CheckpointingConfig requires the strategy that wrote the file; 0.19 ignores unknown names.
    metadata = json.loads(metadata_path.read_text()) | {"common_backend": "torch", "common_backend_version": 1}
    metadata_path.write_text(json.dumps(metadata))
    return True


# --- optimizer -------------------------------------------------------------------------------------------------------


def largest_gradient_norm(config: Any) -> float:
    """The gradient norm above which gradients are not applied. 0.19: `grad_norm_skip_threshold` of an
    OptimizerConfig."""
    return float(getattr(config, "grad_norm_skip_threshold", math.inf))


def gradients_for_norm(optimizer: Any) -> list[Any]:
    """The gradients of an optimizer's parameters on this rank that count in the gradient norm, without copies of other
    ranks. 0.16: `get_main_grads_for_grad_norm`; 0.19: `get_grads_for_grad_norm`."""
    older: Any = getattr(optimizer, "get_main_grads_for_grad_norm", None)
    return list(getattr(optimizer, "get_grads_for_grad_norm", older)())

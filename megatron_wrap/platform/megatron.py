"""The only file that knows how Megatron-Core 0.16 and 0.19 differ; differences are found by attribute or signature."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.metadata
import inspect
import json
import logging
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.errors import CheckpointError, ConfigError, PlatformError

if TYPE_CHECKING:
    from megatron_wrap.platform.base import Replacements

SUPPORTED = (">=0.16.1,<0.17", ">=0.19,<0.20")

# 0.19 imports triton through this module alone without asking whether it is there; see `platform/cpu.py`.
TRITON_MODULES = ("megatron.core.transformer.moe.ops.paged_stash",)

# Lines of Megatron-Core's loggers that tell a user nothing to act on -> the logger that says them.
_NOISE = {
    "GPTModel IS DEPRECATED": "megatron.core.models.gpt.gpt_model",
    "full_param_layout not provided": "megatron.core.distributed.distributed_data_parallel",
    "MCore's async save is deprecated": "megatron.core.dist_checkpointing.strategies.torch",
    "load_common is deprecated": "megatron.core.dist_checkpointing.strategies.common",
    "RerunStateMachine": "megatron.core.rerun_state_machine",
    "Rerun State Machine": "megatron.core.rerun_state_machine",
    "CPU RNG state changed": "megatron.core.tensor_parallel.random",
}


def version() -> str:
    """The installed Megatron-Core's version as its package says, such as "0.16.1"; imports nothing of it.

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
    """The installed Megatron-Core's release, such as (0, 16, 1), if it is supported.

    Raises:
        PlatformError: not installed, or another version than `SUPPORTED`.
    """
    # 0.19 runs git at import to put a commit into its version string, also of a work tree that is not its own.
    os.environ.setdefault("NO_VCS_VERSION", "1")
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    found = version()
    if not any(SpecifierSet(range_).contains(found, prereleases=True) for range_ in SUPPORTED):
        raise PlatformError(
            f"megatron-core {found} is not supported; install one of {' or '.join(SUPPORTED)} "
            "(pip takes 0.16.1 below Python 3.12 and 0.19 from there)"
        )
    return Version(found).release


def unexpected(what: str) -> PlatformError:
    """The error for a part of Megatron-Core that does not look as this package expects."""
    return PlatformError(
        f"megatron-core {version()} is not supported: {what}; install one of {' or '.join(SUPPORTED)} in its "
        "released form"
    )


def accepts(cls: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as arguments of one of Megatron-Core's dataclasses.

    Raises:
        ConfigError: a name that this version's dataclass does not have.
    """
    known = [field.name for field in dataclasses.fields(cls) if field.init]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"{name}: megatron-core {version()} has no such field in {cls.__name__}{hint}")
    return dict(settings)


# --- layer specs -----------------------------------------------------------------------------------------------------


_NORMS_OF_ATTENTION: dict[bool, dict[str, str]] = {
    False: {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"},
    True: {
        "self_attention.q_layernorm.": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm.": "self_attention.linear_kv_up_proj.layer_norm_",
    },
}
"""Whether attention is multi-latent -> prefixes of parameters in local layers and in Transformer Engine's."""


def local_layer_spec(*, norm: type | None = None, core_attention: type | None = None, **arguments: Any) -> Any:
    """A decoder layer of Megatron-Core's own modules.

    Args:
        norm: takes the place of every norm of the layer, query and key norms too (an L2 norm stays).
        core_attention: takes the place of DotProductAttention.
        arguments: of `get_gpt_layer_local_spec`: num_experts, moe_grouped_gemm, qk_layernorm, normalization,
            qk_l2_norm (0.19: the config's `qk_l2_norm` must agree), multi_latent_attention, ...

    Returns:
        A ModuleSpec.

    Raises:
        ConfigError: an argument that this version's function does not take.
    """
    spec = _layer_spec("get_gpt_layer_local_spec", "get_gpt_layer_local_submodules", arguments)
    layer, attention = spec.submodules, spec.submodules.self_attention.submodules
    if core_attention is not None:
        attention.core_attention = core_attention
    if norm is not None:
        places = [(layer, "input_layernorm"), (layer, "pre_mlp_layernorm")]
        places += [(attention, name) for name in ("q_layernorm", "k_layernorm", "kv_layernorm")]
        for owner, name in places:
            if getattr(getattr(owner, name, None), "__name__", "") in ("WrappedTorchNorm", "FusedLayerNorm"):
                setattr(owner, name, norm)
    # parameters are saved under the names that they have in Transformer Engine's layers, which keep a norm inside the
    # product after it, but not before experts and not at the input of multi-latent attention
    layer.sharded_state_dict_keys_map = {
        **_NORMS_OF_ATTENTION[bool(arguments.get("multi_latent_attention"))],
        **({} if arguments.get("num_experts") is not None else {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}),
    }
    return spec


def expert_submodules(layer: Any) -> Any:
    """The `MoESubmodules` (router, experts, shared_experts) of a layer spec with experts: 0.16 keeps them in a
    ModuleSpec, 0.19 in a partial."""
    mlp = layer.submodules.mlp
    return mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules


def te_layer_spec(**arguments: Any) -> Any:
    """A decoder layer of Transformer Engine's modules: `get_gpt_layer_with_transformer_engine_spec`.

    Raises:
        ConfigError: an argument that this version's function does not take.
    """
    name = "get_gpt_layer_with_transformer_engine"
    return _layer_spec(f"{name}_spec", f"{name}_submodules", arguments)


def _layer_spec(name: str, submodules_name: str, arguments: dict[str, Any]) -> Any:
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    # In 0.19 the function takes **kwargs for a second one, which carries the names.
    known = inspect.signature(getattr(specs, submodules_name, None) or getattr(specs, name)).parameters
    for argument in arguments:
        if argument not in known:
            raise ConfigError(f"{argument}: megatron-core {version()} has no such argument of {name}")
    return getattr(specs, name)(**arguments)


# --- experts ---------------------------------------------------------------------------------------------------------


def take_router_losses() -> dict[str, Any]:
    """Name -> this process's shares of the routers' losses without their coefficients, [layers], added up since the
    last call; they are zeroed. 0.16 keeps them in a dictionary, 0.19 in an object."""
    try:
        tracker = importlib.import_module("megatron.core.transformer.moe.moe_logging").get_moe_metrics_tracker()
        kept = {name: entry.values for name, entry in tracker.metrics.items()}
    except ModuleNotFoundError:
        moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        kept = {name: entry["values"] for name, entry in moe_utils.get_moe_layer_wise_logging_tracker().items()}
    taken = {name: values.clone() for name, values in kept.items()}
    for values in kept.values():
        values.zero_()
    return taken


# --- checkpoints -----------------------------------------------------------------------------------------------------


def save_strategy() -> Any:
    """The strategy that writes torch's distributed format: 0.16 takes (backend, version), 0.19 the backend alone."""
    serialization = importlib.import_module("megatron.core.dist_checkpointing.serialization")
    factory = serialization.get_default_save_sharded_strategy
    return factory("torch_dist", 1) if len(inspect.signature(factory).parameters) > 1 else factory("torch_dist")


def save_arguments(async_save: bool) -> dict[str, Any]:
    """Arguments of `dist_checkpointing.save` beside the state, the folder and the strategy.

    0.19 saves asynchronously with the package nvidia-resiliency-ext unless told otherwise.
    """
    arguments: dict[str, Any] = {"async_sharded_save": async_save}
    saving = importlib.import_module("megatron.core.dist_checkpointing").save
    if async_save and "async_strategy" in inspect.signature(saving).parameters:
        arguments["async_strategy"] = "mcore"
    return arguments


def common_state_file(folder: str | Path) -> bool:
    """Write `common.pt` into a finished checkpoint that has none, so that 0.16 can read what 0.19 saved.

    0.19 keeps the state that is not sharded inside the distributed format, 0.16 in this file. Call it on one process,
    after the save. Returns whether a file was written.

    Raises:
        CheckpointError: `folder` holds no distributed checkpoint.
    """
    import torch

    path, metadata_path = Path(folder) / "common.pt", Path(folder) / "metadata.json"
    if not metadata_path.is_file():
        raise CheckpointError(f"{folder} holds no distributed checkpoint: {metadata_path.name} is missing")
    if path.exists():
        return False
    serialization = importlib.import_module("megatron.core.dist_checkpointing.serialization")
    state = serialization.load_common_state_dict(str(folder))
    _write_aside(path, lambda part: torch.save(state, part))
    # 0.16's CheckpointingConfig names the strategy that wrote the file; 0.19 drops the names that it does not know.
    metadata = json.loads(metadata_path.read_text()) | {"common_backend": "torch", "common_backend_version": 1}
    _write_aside(metadata_path, lambda part: part.write_text(json.dumps(metadata)))
    return True


def _write_aside(path: Path, write: Callable[[Path], object]) -> None:
    part = path.with_name(path.name + ".part")
    write(part)
    part.replace(path)


# --- repairs that both platforms need --------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Megatron-Core warns at import that Transformer Engine and Apex are missing, which the platform knows, and of
    names in its own modules that it will rename."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*(Transformer Engine and Apex|Apex) (are|is) not installed")
        yield


def repair(replacements: Replacements) -> None:
    """What a released Megatron-Core gets wrong on every platform, and the log lines that help nobody."""
    with quiet_import():
        moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")  # the warnings are this import's
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16 binds the name only if Transformer Engine imports, and reads it always (`moe_utils.py`, router GEMM).
        replacements.set(moe_utils, "te_general_gemm", None)
    latent_attention = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    if latent_attention.HAVE_TE and not isinstance(latent_attention.TELinear, type):
        # 0.16 imports stand-ins of Transformer Engine's classes without it, and asks isinstance of them
        replacements.set(latent_attention, "HAVE_TE", False)
    checkpointing = importlib.import_module("megatron.core.tensor_parallel.random")
    constructor = checkpointing.CheckpointWithoutOutput.__init__
    if not checkpointing.HAVE_TE and constructor.__defaults__ == (False,):
        # its default False counts as fp8 (`self.fp8 = fp8 is not None`), which calls Transformer Engine
        replacements.set(constructor, "__defaults__", (None,))
    _replace_results_queue(replacements)
    _replace_gradient_norm(replacements)
    for text, logger in _NOISE.items():
        log_filter = functools.partial(_says_other_than, text)
        logging.getLogger(logger).addFilter(log_filter)
        replacements.on_undo(functools.partial(logging.getLogger(logger).removeFilter, log_filter))
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        # a model leaves its attention_backend there, and the next one refuses another (language_module.py)
        replacements.keep_variable(name)


def _replace_gradient_norm(replacements: Replacements) -> None:
    """Without Transformer Engine and Apex the norm of the gradient is `local_multi_tensor_l2_norm` (utils.py). On the
    CPU its fp32 sums lose 1e-5 on a million elements (torch 2.13), so it depends on how a layout cuts them; on a GPU it
    waits for the device at each tensor."""
    module = importlib.import_module("megatron.core.optimizer.clip_grads")
    if getattr(module.l2_norm_impl, "__name__", "") == "local_multi_tensor_l2_norm":
        replacements.set(module, "l2_norm_impl", l2_norm)


def l2_norm(chunk_size: int, noop_flag: Any, tensor_lists: list[list[Any]], *per_tensor: Any) -> tuple[Any, None]:
    """Norm of all tensors of the first list together, summed in fp64; [1], fp32, on their device. The other arguments
    are those of amp_C's multi_tensor_l2norm, whose place it takes."""
    import torch

    norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in tensor_lists[0]]
    return torch.stack(norms).square().sum().sqrt().float().reshape(1), None


def _says_other_than(text: str, record: logging.LogRecord) -> bool:
    return text not in record.getMessage()


def _replace_results_queue(replacements: Replacements) -> None:
    """The writers of a checkpoint report over a manager process that is spawned, so it runs the user's script again,
    from the top where it has no main guard. A forked one does not."""
    module = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    names = [name for name in ("get_write_results_queue", "_get_write_results_queue") if hasattr(module, name)]
    if not names:
        raise unexpected(f"{module.__name__} has no get_write_results_queue")

    @functools.lru_cache(maxsize=1)
    def queue_of(process_id: int) -> Any:
        manager = SyncManager(ctx=multiprocessing.get_context("fork"))
        manager.start(initializer=_end_with_parent, initargs=(process_id,))
        return manager.Queue()

    replacements.set(module, names[0], lambda *mode, **named_mode: queue_of(os.getpid()))


def _end_with_parent(parent: int) -> None:
    """Runs in the manager process. A killed parent cannot end it, and it holds the parent's ports open."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

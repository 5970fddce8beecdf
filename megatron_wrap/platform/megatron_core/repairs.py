"""Workarounds for bugs in released Megatron-Core versions on every platform, applied through `Replacements`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import multiprocessing
import os
import threading
import time
import warnings
from collections.abc import Iterator
from multiprocessing.managers import SyncManager
from types import ModuleType
from typing import Any

from megatron_wrap.platform.megatron_core.undoable_changes import Replacements
from megatron_wrap.platform.megatron_core.versions import unexpected

# Text of log messages that users cannot act on -> the Megatron-Core logger that writes them.
_NOISE = {
    "GPTModel IS DEPRECATED": "megatron.core.models.gpt.gpt_model",
    "full_param_layout not provided": "megatron.core.distributed.distributed_data_parallel",
    "MCore's async save is deprecated": "megatron.core.dist_checkpointing.strategies.torch",
    "load_common is deprecated": "megatron.core.dist_checkpointing.strategies.common",
    "RerunStateMachine": "megatron.core.rerun_state_machine",
    "Rerun State Machine": "megatron.core.rerun_state_machine",
    "CPU RNG state changed": "megatron.core.tensor_parallel.random",
}


@contextlib.contextmanager
def quiet_import() -> Iterator[None]:
    """Hide Megatron-Core's import warnings about missing Transformer Engine and Apex, which the platform handles, and
    about deprecated names in its own modules."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*(Transformer Engine and Apex|Apex) (are|is) not installed")
        yield


def repair(replacements: Replacements) -> None:
    """Apply all workarounds, and hide log messages that users cannot act on."""
    with quiet_import():
        moe_utils = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")  # hides the warnings of this import
    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16 defines the name only with Transformer Engine but always reads it (`moe_utils.py`, router GEMM)
        replacements.set(moe_utils, "te_general_gemm", None)
    latent_attention = importlib.import_module("megatron.core.transformer.multi_latent_attention")
    if latent_attention.HAVE_TE and not isinstance(latent_attention.TELinear, type):
        # without Transformer Engine, 0.16 has placeholders for its classes and passes them to isinstance
        replacements.set(latent_attention, "HAVE_TE", False)
    checkpointing = importlib.import_module("megatron.core.tensor_parallel.random")
    constructor = checkpointing.CheckpointWithoutOutput.__init__
    if not checkpointing.HAVE_TE and constructor.__defaults__ == (False,):
        # `self.fp8 = fp8 is not None` treats the default False as fp8, which calls Transformer Engine
        replacements.set(constructor, "__defaults__", (None,))
    _replace_results_queue(replacements)
    _replace_clipping(replacements)
    _restore_padding_of_buckets(replacements)
    reader = importlib.import_module("megatron_wrap.platform.megatron_core.checkpoint_reader")  # it imports torch
    reader.use_in_megatron(replacements)
    importlib.import_module("megatron_wrap.platform.megatron_core.first_gradients").use_in_megatron(replacements)
    for text, logger in _NOISE.items():
        hide_log_messages(logger, text, replacements)
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        # a model sets them to its attention_backend; a later model with a different one fails (language_module.py)
        replacements.keep_item(os.environ, name)


def _replace_clipping(replacements: Replacements) -> None:
    """Replace the gradient norm and the scaling of gradients without Transformer Engine and Apex (utils.py).

    On the CPU the fp32 sums of `local_multi_tensor_l2_norm` have a relative error of 1e-5 for a million elements (torch
    2.13), so the norm depends on the parallel layout. On a GPU it synchronizes at each tensor.
    `local_multi_tensor_scale` multiplies into a new tensor and copies it, which takes twice the time and the memory of
    the largest gradient.
    """
    module = importlib.import_module("megatron.core.optimizer.clip_grads")
    for name, ours in (("l2_norm_impl", l2_norm), ("multi_tensor_scale_impl", scale)):
        if getattr(getattr(module, name), "__name__", "").startswith("local_multi_tensor_"):
            replacements.set(module, name, ours)


def l2_norm(chunk_size: int, noop_flag: Any, tensor_lists: list[list[Any]], *per_tensor: Any) -> tuple[Any, None]:
    """Norm over all tensors of the first list, summed in fp64; returns fp32 [1] on their device, and None. Has the
    signature of amp_C's multi_tensor_l2norm; the other arguments are ignored."""
    import torch

    # on a GPU, vector_norm would first copy each tensor in fp64
    norms = torch._foreach_norm(tensor_lists[0], 2, dtype=torch.float64)
    return torch.stack(list(norms)).square().sum().sqrt().float().reshape(1), None


def scale(chunk_size: int, noop_flag: Any, tensor_lists: list[list[Any]], factor: float) -> None:
    """Write the tensors of the first list times `factor` into those of the second, which may be the same. Has the
    signature of amp_C's multi_tensor_scale; the other arguments are ignored."""
    import torch

    for source, target in zip(*tensor_lists, strict=True):
        torch.mul(source, factor, out=target)


def _restore_padding_of_buckets(replacements: Replacements) -> None:
    """Return optimizer states with the padding between buckets (distrib_optimizer.py, get_parameter_state_dp_zero).
    Megatron-Core removes it and then reads parameters at offsets that include it (in
    sharded_param_state_fully_reshardable), so a checkpoint has wrong values after a padded bucket, such as before an
    embedding that the first and the last pipeline stage share."""
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    without_padding = optimizer.get_parameter_state_dp_zero

    @functools.wraps(without_padding)
    def with_padding(self: Any, *arguments: Any, **named: Any) -> Any:
        state = without_padding(self, *arguments, **named)
        for number, buffer in enumerate(self.buffers if state is not None else ()):
            for tensors in state[number].values():
                for name in tensors.keys() - {"numel_unpadded"}:
                    tensors[name] = _with_padding(tensors[name], buffer.buckets)
        return state

    replacements.set(optimizer, "get_parameter_state_dp_zero", with_padding)


def _with_padding(values: Any, buckets: list[Any]) -> Any:
    import torch

    parts = values.split([bucket.numel_unpadded for bucket in buckets])
    missing = [bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buckets]
    return torch.cat([torch.nn.functional.pad(part, (0, size)) for part, size in zip(parts, missing, strict=True)])


def hide_log_messages(logger: str, text: str, replacements: Replacements) -> None:
    """Hide a logger's messages that contain a text until the replacements are undone."""

    def does_not_contain_it(record: logging.LogRecord) -> bool:
        return text not in record.getMessage()

    logging.getLogger(logger).addFilter(does_not_contain_it)
    replacements.callback(lambda: logging.getLogger(logger).removeFilter(does_not_contain_it))


def _replace_results_queue(replacements: Replacements) -> None:
    """Fork the manager process through which checkpoint writers report, instead of spawning it. A spawned process
    imports the user's script, and runs all of it if it has no `if __name__ == "__main__"`."""
    module, name = _results_queue()

    @functools.lru_cache(maxsize=1)
    def queue_of(process_id: int) -> Any:
        manager = SyncManager(ctx=multiprocessing.get_context("fork"))
        manager.start(initializer=_exit_with_parent, initargs=(process_id,))
        return manager.Queue()

    replacements.set(module, name, lambda *mode, **named_mode: queue_of(os.getpid()))


@contextlib.contextmanager
def without_writers() -> Iterator[None]:
    """Only plan saves in the block: Megatron-Core starts no manager process for its writers' reports."""
    with Replacements() as replacements:
        replacements.set(*_results_queue(), lambda *mode, **named_mode: None)
        yield


def _results_queue() -> tuple[ModuleType, str]:
    """(module, name) of the function that returns the queue of the checkpoint writers' reports."""
    module = importlib.import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    names = [name for name in ("get_write_results_queue", "_get_write_results_queue") if hasattr(module, name)]
    if not names:
        raise unexpected(f"{module.__name__} has no get_write_results_queue")
    return module, names[0]


def _exit_with_parent(parent: int) -> None:
    """Exit the manager process when its parent is gone: a killed parent cannot stop it, and it keeps the parent's ports
    open."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()

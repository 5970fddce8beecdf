"""What a released Megatron-Core gets wrong on every platform, corrected through `Replacements`."""

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
from typing import Any

from megatron_wrap.platform.replacements import Replacements
from megatron_wrap.platform.versions import unexpected

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

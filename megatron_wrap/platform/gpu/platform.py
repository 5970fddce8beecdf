"""GPUs over NCCL. Megatron-Core needs little change here: replacements for missing Transformer Engine parts."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from packaging.version import Version

from megatron_wrap.errors import PlatformError
from megatron_wrap.platform.base.platform import GIB, WITHOUT_FUSED_KERNELS, Platform
from megatron_wrap.platform.gpu.fp8_scales import forget_scales
from megatron_wrap.platform.megatron_core import adam, graphs, repairs
from megatron_wrap.platform.megatron_core.undoable_changes import Replacements

_TF32 = "NVIDIA_TF32_OVERRIDE"
"""Variable that cuBLAS reads at its first use; 0 disables TF32, so fp32 is true fp32. torch disables TF32 by default,
but Transformer Engine enables it, and Megatron-Core's MoE routers use Transformer Engine whenever it is installed
(moe_utils.py)."""

_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_REGISTER = "NCCL_GRAPH_REGISTER"
"""Variable with which NCCL registers the memory of CUDA graphs, which it must not do with expandable segments. Newer
releases of Megatron-Core no longer check this (transformer/cuda_graphs.py)."""


class CudaPlatform(Platform):
    """One GPU per process, the one with index LOCAL_RANK."""

    name = "cuda"
    backend = "nccl"

    @functools.cached_property
    def device(self) -> torch.device:  # type: ignore[override]
        """The GPU with index LOCAL_RANK (0 if unset).

        Raises:
            PlatformError: this node has fewer GPUs than processes.
        """
        local_rank, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
        if local_rank >= count:
            raise PlatformError(
                f"local rank {local_rank} has no GPU: torch finds {count} on this node; "
                f"start at most {count} processes on it or choose platform cpu"
            )
        return torch.device("cuda", local_rank)

    @functools.cached_property
    def has_transformer_engine(self) -> bool:  # type: ignore[override]
        """Whether Transformer Engine can be imported and Megatron-Core uses it."""
        try:
            importlib.import_module("transformer_engine.pytorch")
        except (ImportError, OSError, RuntimeError):  # a build for another torch or CUDA fails in many ways
            return False
        return bool(importlib.import_module("megatron.core.extensions.transformer_engine").HAVE_TE)

    def _install(self, replacements: Replacements, environment: Mapping[str, str]) -> None:
        # if CUDA is in use, it has read the other variables
        for name, value in {_TF32: "0", **({} if torch.cuda.is_initialized() else environment)}.items():
            replacements.keep_item(os.environ, name)
            os.environ.setdefault(name, value)
        if any("expandable_segments:True" in os.environ.get(name, "") for name in _ALLOCATOR):
            replacements.keep_item(os.environ, _REGISTER)
            os.environ.setdefault(_REGISTER, "0")
        torch.cuda.set_device(self.device)
        replacements.callback(forget_scales)
        replacements.callback(_free_buffers)
        with repairs.quiet_import():
            adam.use_in_megatron(replacements)
            graphs.repair(replacements)
        repairs.repair(replacements)

    def synchronize(self) -> None:
        """Wait for this process's GPU."""
        torch.cuda.synchronize(self.device)

    @property
    def device_name(self) -> str:
        """See `Platform.device_name`."""
        return torch.cuda.get_device_name(self.device)

    def empty_cache(self) -> None:
        """Release torch's unused cached blocks to the GPU."""
        torch.cuda.empty_cache()

    def memory_gib(self) -> dict[str, float]:
        """Memory of torch's allocator on this process's GPU, in GiB; memory_max is the peak allocated since the
        start."""
        return {
            "memory_allocated": torch.cuda.memory_allocated(self.device) / GIB,
            "memory_reserved": torch.cuda.memory_reserved(self.device) / GIB,
            "memory_max": torch.cuda.max_memory_allocated(self.device) / GIB,
        }

    def total_memory_bytes(self) -> int:
        """Memory of this process's GPU in bytes."""
        return torch.cuda.get_device_properties(self.device).total_memory

    def missing_for_fp8(self, recipe: str) -> str | None:
        """See `Platform.missing_for_fp8`."""
        if not self.has_transformer_engine:
            return "it needs Transformer Engine, which is not installed"
        return missing_for(
            recipe,
            torch.cuda.get_device_capability(self.device),
            self.machine.transformer_engine or (),
            Version(torch.version.cuda or "0").release,
        )

    def transformer_config_settings(
        self, pipeline_size: int, virtual_size: int | None, transformer_engine: bool
    ) -> dict[str, Any]:
        """See `Platform.transformer_config_settings`."""
        settings: dict[str, Any] = {} if transformer_engine else dict(WITHOUT_FUSED_KERNELS)
        if pipeline_size > 1:
            # Megatron-LM's default: free the data of an output that was sent, keep its autograd graph.
            settings["deallocate_pipeline_outputs"] = True
            if virtual_size is not None and virtual_size > 1:
                # Megatron-LM's default. With PP=2 a batch would hold two messages between the same two ranks, which
                # Megatron-LM forbids.
                settings.update(overlap_p2p_comm=True, batch_p2p_comm=False)
        return settings


def _free_buffers() -> None:
    """Free memory that Transformer Engine keeps for the rest of the process: user buffers, and one unused gradient for
    each weight shape."""
    modules = sys.modules.get("transformer_engine.pytorch.module.base")
    if getattr(modules, "_ub_communicators", None) is not None:
        modules.destroy_ub()  # type: ignore[union-attr]
    getattr(modules, "_dummy_wgrads", {}).clear()


ADA, HOPPER = (8, 9), (9, 0)

_NEEDS: dict[str, tuple[tuple[int, int], tuple[int, ...], tuple[int, int]]] = {
    "delayed": (ADA, (2, 0), (12, 1)),
    "tensorwise": (ADA, (2, 2), (12, 1)),
    "blockwise": (HOPPER, (2, 3), (12, 9)),
}
"""Recipe -> minimum compute capability (Transformer Engine, pytorch/quantization.py), Transformer Engine
(megatron/core/fp8_utils.py, get_fp8_recipe) and CUDA (quantization.py)."""


def missing_for(
    recipe: str, capability: tuple[int, int], transformer_engine: tuple[int, ...], cuda: tuple[int, ...]
) -> str | None:
    """Description of what this machine lacks for a recipe; None: nothing.

    Args:
        recipe: delayed, tensorwise or blockwise; the needs of others are unknown.
        capability: compute capability of the GPU.
        transformer_engine: version of Transformer Engine.
        cuda: version of CUDA that torch is built for.
    """
    if recipe not in _NEEDS:
        return None
    names = ("a GPU of compute capability", "Transformer Engine", "CUDA")
    for name, needed, here in zip(names, _NEEDS[recipe], (capability, transformer_engine, cuda), strict=True):
        if here < needed:
            return f"it needs {name} {_text(needed)} or later, this is {_text(here)}"
    return None


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

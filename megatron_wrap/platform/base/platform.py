"""The platform interface: device, collectives, memory, and the settings that are safe on it."""

from __future__ import annotations

import dataclasses
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_wrap.errors import PlatformError
from megatron_wrap.platform.base.machine import Machine, this_machine, transformer_engine_version
from megatron_wrap.platform.megatron_core import kernels as layer_kernels
from megatron_wrap.platform.megatron_core import versions
from megatron_wrap.platform.megatron_core.kernels import LayerKernels
from megatron_wrap.platform.megatron_core.undoable_changes import Replacements

if TYPE_CHECKING:
    import torch

GIB = 2**30

# TransformerConfig fields that select kernels of Transformer Engine or Apex which have no other implementation;
# `config.defaults.kernel_choices` has the others.
WITHOUT_FUSED_KERNELS = {"masked_softmax_fusion": False, "persist_layer_norm": False}

# Settings that need Transformer Engine or Apex -> the values that work without them.
_NEEDS_TRANSFORMER_ENGINE: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("fp8", "fp4"), (None, False)),
    **dict.fromkeys(
        (
            *WITHOUT_FUSED_KERNELS,
            *("fp8_param", "fp8_param_gather", "tp_comm_overlap", "cpu_offloading", "delay_wgrad_compute"),
            *("fused_single_qkv_rope", "apply_rope_fusion", "gradient_accumulation_fusion"),
            *("memory_efficient_layer_norm", "moe_grouped_gemm", "moe_permute_fusion", "moe_router_fusion"),
            *("use_te_activation_func", "use_te_rng_tracker", "use_kitchen", "use_precision_aware_optimizer"),
        ),
        (False,),
    ),
    "cross_entropy_fusion_impl": ("native",),
}

# Settings that need CUDA -> the values that work without it.
NEEDS_CUDA: dict[str, tuple[Any, ...]] = {
    # gloo may still be sending the storage that the schedule frees: gave wrong losses with 0.16.
    "deallocate_pipeline_outputs": (False,),
    "cuda_graph_impl": ("none",),
    "moe_token_dispatcher_type": ("alltoall", "allgather"),
    "symmetric_ar_type": (None,),
    **dict.fromkeys(
        (
            *("enable_cuda_graph", "external_cuda_graph", "optimizer_cuda_graph", "optimizer_cpu_offload"),
            *("fine_grained_activation_offloading", "moe_paged_stash", "moe_enable_deepep", "batch_invariant_mode"),
            *("flash_decode", "use_megatron_fsdp", "use_ring_exchange_p2p", "nccl_ub"),
        ),
        (False,),
    ),
}


_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "^NVLS"}
"""Variables of cuBLAS (required by torch.use_deterministic_algorithms), Transformer Engine's attention, and NCCL, as
Megatron-LM's --deterministic-mode requires them (megatron/training/arguments.py)."""


class Platform(ABC):
    """The hardware of a run. Call `install` before the first use of Megatron-Core."""

    name: str
    """Name of the platform in `megatron_wrap.init.platform`: "cpu" or "cuda"."""
    backend: str
    """The backend of torch.distributed: "gloo" or "nccl"."""

    def __init__(self) -> None:
        self._replacements = Replacements()
        self._kept: Replacements | None = None
        self._installed = False
        self._kernels = LayerKernels()

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """This process's device."""

    @property
    @abstractmethod
    def has_transformer_engine(self) -> bool:
        """Whether Megatron-Core can use Transformer Engine here; imports both."""

    @property
    def device_name(self) -> str:
        """Name of this process's GPU; empty on platforms without one."""
        return ""

    @property
    def machine(self) -> Machine:
        """Properties of this machine; imports Transformer Engine."""
        version = transformer_engine_version() if self.has_transformer_engine else None
        here = this_machine(self.name)
        return dataclasses.replace(here, transformer_engine=version, weight_gradients=None, device=self.device_name)

    def install(self, environment: Mapping[str, str] | None = None, deterministic: bool = False) -> None:
        """Prepare Megatron-Core for this platform; a second call adds `deterministic` at most.

        Args:
            environment: variables that CUDA reads at its first use; set until `uninstall`, unless they are set already
                or CUDA is in use. Ignored on platforms without CUDA.
            deterministic: until `uninstall`, torch uses deterministic kernels, and raises an error that names an
                operation without one.

        Raises:
            PlatformError: unsupported or unexpected Megatron-Core, or no such device.
        """
        if self._installed:
            if deterministic:
                self._use_deterministic_kernels(self._replacements)
            return
        versions.check_version()
        try:
            if deterministic:
                self._use_deterministic_kernels(self._replacements)
            self._install(self._replacements, environment or {})
        except BaseException:
            self._replacements.close()
            raise
        self._installed = True

    def keep_installed(self) -> None:
        """Make `install` last until the process ends, for a process with many runs: `uninstall` then restores only
        later changes."""
        self.install()
        if self._kept is None:
            self._kept, self._replacements = self._replacements, Replacements()

    def uninstall(self) -> None:
        """Restore everything that `install` replaced; a second call does nothing."""
        self._replacements.close()
        self._installed, self._kernels = self._kept is not None, LayerKernels()

    def use_kernels(self, kernels: LayerKernels) -> None:
        """Make Megatron-Core's layers call these kernels until `uninstall`. A later call adds those that were None."""
        names = [field.name for field in dataclasses.fields(kernels) if getattr(self._kernels, field.name) is None]
        new = {name: getattr(kernels, name) for name in names}
        layer_kernels.use(LayerKernels(**new), self._replacements)
        self._kernels = dataclasses.replace(self._kernels, **new)

    def _use_deterministic_kernels(self, replacements: Replacements) -> None:
        import torch

        for name, value in _DETERMINISTIC.items():
            replacements.keep_item(os.environ, name)
            os.environ.setdefault(name, value)
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        replacements.callback(
            torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warns
        )
        torch.use_deterministic_algorithms(True)

    @abstractmethod
    def _install(self, replacements: Replacements, environment: Mapping[str, str]) -> None:
        """Implements `install`; records every change in `replacements`."""

    def seed(self, seed: int) -> None:
        """Seed torch's generators of this platform's devices."""
        import torch

        torch.manual_seed(seed)

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work that this process queued on the device."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Release unused cached memory to the device."""

    @abstractmethod
    def memory_gib(self) -> dict[str, float]:
        """This process's memory in GiB (2**30 bytes): memory_allocated, memory_reserved, memory_max (peak)."""

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """Memory of this process's device in bytes."""

    @abstractmethod
    def transformer_config_settings(
        self, pipeline_size: int, virtual_size: int | None, transformer_engine: bool
    ) -> dict[str, Any]:
        """TransformerConfig fields that this platform requires.

        Args:
            pipeline_size: number of pipeline stages.
            virtual_size: model chunks per stage; None or 1: not interleaved.
            transformer_engine: whether the layers use Transformer Engine.
        """

    @abstractmethod
    def missing_for_fp8(self, recipe: str) -> str | None:
        """Description of what this machine lacks for Transformer Engine layers in FP8 with `fp8_recipe`; None:
        nothing."""

    def refuse_unsafe(self, settings: Mapping[str, Any], transformer_engine: bool = False) -> None:
        """Validate the user's settings against the platform.

        Args:
            settings: the user's values for fields of Megatron-Core's TransformerConfig, OptimizerConfig or
                DistributedDataParallelConfig; fields without a platform restriction are ignored.
            transformer_engine: whether the layers use Transformer Engine.

        Raises:
            PlatformError: the first setting that fails or gives wrong results on this platform.
        """
        for name, safe in self._safe_values(transformer_engine).items():
            if name in settings and settings[name] not in safe:
                raise PlatformError(
                    f"{name}={settings[name]!r} does not work on platform {self.name}"
                    f"{'' if transformer_engine else ' without Transformer Engine'}; "
                    f"omit it or set {' or '.join(repr(value) for value in safe)}"
                )

    def _safe_values(self, transformer_engine: bool) -> dict[str, tuple[Any, ...]]:
        return {} if transformer_engine else _NEEDS_TRANSFORMER_ENGINE

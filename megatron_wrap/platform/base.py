"""What a platform is: the device of this process, its collectives, its memory, and which settings are safe on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megatron_wrap.errors import PlatformError
from megatron_wrap.platform import versions
from megatron_wrap.platform.replacements import Replacements

if TYPE_CHECKING:
    import torch

GIB = 2**30

# Settings that need Transformer Engine (or Apex) -> the values that do not.
NEEDS_TRANSFORMER_ENGINE: dict[str, tuple[Any, ...]] = {
    "fp8": (None, False),
    "fp4": (None, False),
    "fp8_param": (False,),
    "fp8_param_gather": (False,),
    "tp_comm_overlap": (False,),
    "cpu_offloading": (False,),
    "delay_wgrad_compute": (False,),
    "fused_single_qkv_rope": (False,),
    "apply_rope_fusion": (False,),
    "gradient_accumulation_fusion": (False,),
    "masked_softmax_fusion": (False,),
    "persist_layer_norm": (False,),
    "memory_efficient_layer_norm": (False,),
    "moe_grouped_gemm": (False,),
    "moe_permute_fusion": (False,),
    "moe_router_fusion": (False,),
    "use_te_activation_func": (False,),
    "use_te_rng_tracker": (False,),
    "use_kitchen": (False,),
    "use_precision_aware_optimizer": (False,),
    "cross_entropy_fusion_impl": ("native",),
    "softmax_type": ("vanilla",),
}


class Platform(ABC):
    """Where the processes of a run compute. `install` comes before the first use of Megatron-Core."""

    name: str
    """"cpu" or "cuda", as in `megatron_wrap.init.platform`."""
    backend: str
    """The backend of torch.distributed: "gloo" or "nccl"."""

    def __init__(self) -> None:
        self._replacements = Replacements()
        self._installed = False

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that this process computes on."""

    @property
    @abstractmethod
    def has_transformer_engine(self) -> bool:
        """Whether Megatron-Core can use Transformer Engine here; imports both."""

    def install(self) -> None:
        """Make Megatron-Core ready for this platform; a second call does nothing.

        Raises:
            PlatformError: a Megatron-Core that is not supported or does not look as expected, or no such device.
        """
        if self._installed:
            return
        versions.check_version()
        try:
            self._install(self._replacements)
        except BaseException:
            self._replacements.undo()
            raise
        self._installed = True

    def uninstall(self) -> None:
        """Put back what `install` replaced; a second call does nothing."""
        self._replacements.undo()
        self._installed = False

    @abstractmethod
    def _install(self, replacements: Replacements) -> None:
        """What `install` does on this platform, every change recorded in `replacements`."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has finished what this process asked of it."""

    @abstractmethod
    def empty_cache(self) -> None:
        """Give unused cached memory back to the device."""

    @abstractmethod
    def memory_gib(self) -> dict[str, float]:
        """This process's memory in GiB (2**30 bytes): memory_allocated, memory_reserved, memory_max (peak)."""

    @abstractmethod
    def transformer_config_settings(
        self, pipeline_size: int, virtual_size: int | None, transformer_engine: bool
    ) -> dict[str, Any]:
        """Fields of TransformerConfig that this platform needs.

        Args:
            pipeline_size: pipeline stages.
            virtual_size: model chunks on each stage; None or 1: not interleaved.
            transformer_engine: the layers are Transformer Engine's.
        """

    def refuse_unsafe(self, settings: Mapping[str, Any], transformer_engine: bool = False) -> None:
        """Check what the user set against what runs here.

        Args:
            settings: names of Megatron-Core's TransformerConfig, OptimizerConfig or DistributedDataParallelConfig and
                the values that the user gave them; names that do not matter here are passed over.
            transformer_engine: the layers are Transformer Engine's.

        Raises:
            PlatformError: the first setting that raises or gives wrong numbers here.
        """
        for name, safe in self._safe_values(transformer_engine).items():
            if name in settings and settings[name] not in safe:
                raise PlatformError(
                    f"{name}={settings[name]!r} does not work on platform {self.name}"
                    f"{'' if transformer_engine else ' without Transformer Engine'}; "
                    f"leave it out or set {' or '.join(repr(value) for value in safe)}"
                )

    def _safe_values(self, transformer_engine: bool) -> dict[str, tuple[Any, ...]]:
        return {} if transformer_engine else NEEDS_TRANSFORMER_ENGINE


def kernels_off() -> dict[str, bool]:
    """The fused kernels of Transformer Engine and Apex that TransformerConfig must not ask for without them."""
    return {
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
    }

"""Platforms: CPU processes over gloo, GPUs over NCCL. Importing it loads neither torch nor Megatron-Core."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from megatron_wrap.errors import PlatformError

if TYPE_CHECKING:
    from megatron_wrap.platform.base.platform import Platform

__all__ = ["choose_platform"]


def choose_platform(name: str) -> Platform:
    """The platform named by `megatron_wrap.init.platform`; one object per name and process.

    Args:
        name: "auto" (cuda if torch finds a GPU, else cpu), "cpu" or "cuda".

    Raises:
        PlatformError: unknown name, or "cuda" without a GPU.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise PlatformError(f"unknown platform {name!r}; choose auto, cpu or cuda")
    if name == "cpu":
        return _platform("cpu")
    import torch

    if torch.cuda.is_available():
        return _platform("cuda")
    if name == "auto":
        return _platform("cpu")
    built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is built without CUDA"
    raise PlatformError(
        f"platform cuda was selected, but torch {torch.__version__} finds no GPU (it {built}); choose platform cpu or "
        "auto, or install a CUDA build of torch on a machine with an NVIDIA driver"
    )


@functools.cache
def _platform(name: str) -> Platform:
    if name == "cpu":
        from megatron_wrap.platform.cpu.platform import CpuPlatform

        return CpuPlatform()
    from megatron_wrap.platform.gpu.platform import CudaPlatform

    return CudaPlatform()

"""Requirements of the FP8 recipes on the GPU, on Transformer Engine and on CUDA."""

from __future__ import annotations

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

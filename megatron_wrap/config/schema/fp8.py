"""The FP8 settings of a run, which follow from its configuration alone."""

from dataclasses import dataclass

from megatron_wrap.config.schema.run import RunConfig

MULTIPLE = 16
"""Divisor of the dimensions of matrices in FP8 matmuls (Transformer Engine, assert_dim_for_fp8_exec; the gradient of a
weight needs 16)."""
BLOCK = 128
"""Divisor of the dimensions of a weight that is stored in FP8 blocks (Float8BlockQuantizer)."""


@dataclass(frozen=True)
class Fp8Settings:
    """FP8 settings of a run: values of `megatron_lm.train.dtype`."""

    format: str
    """FP8 format, "hybrid" or "e4m3"."""
    recipe: str
    param_gather: bool
    """Whether weights are stored in FP8."""
    first_last_layers_bf16: bool
    layers_at_start_in_bf16: int
    layers_at_end_in_bf16: int


def fp8_settings(config: RunConfig) -> Fp8Settings | None:
    """The run's FP8 settings; None: no FP8."""
    dtype = config.dtype
    if not dtype.fp8:
        return None
    in_bf16 = dtype.first_last_layers_bf16
    return Fp8Settings(
        format=dtype.fp8,
        recipe=dtype.fp8_recipe,
        param_gather=dtype.fp8_param_gather,
        first_last_layers_bf16=in_bf16,
        layers_at_start_in_bf16=dtype.num_layers_at_start_in_bf16 if in_bf16 else 0,
        layers_at_end_in_bf16=dtype.num_layers_at_end_in_bf16 if in_bf16 else 0,
    )


def token_multiple(config: RunConfig) -> int:
    """Divisor of the tokens of a micro-batch on each context-parallel rank."""
    return 1 if fp8_settings(config) is None else MULTIPLE

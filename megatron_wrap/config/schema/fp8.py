"""The FP8 settings of a run, which follow from its configuration alone."""

from dataclasses import dataclass

from megatron_wrap.config.schema.run import RunConfig

MULTIPLE = 16
"""FP8 products need matrices whose dimensions are multiples of it (Transformer Engine, assert_dim_for_fp8_exec; 16 is
needed for the gradient of a weight)."""
BLOCK = 128
"""A weight that is stored in FP8 blocks needs dimensions that are multiples of it (Float8BlockQuantizer)."""


@dataclass(frozen=True)
class Fp8Settings:
    """FP8 of a run: values of `megatron_lm.train.dtype`."""

    format: str
    """hybrid or e4m3."""
    recipe: str
    param_gather: bool
    """Weights are stored in FP8."""
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

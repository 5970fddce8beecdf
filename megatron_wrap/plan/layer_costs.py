"""Time of a model's parts in a training step: FLOPs over measured speeds of the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.derived import fp8_settings
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.plan.model_parts import (
    OUTPUT,
    ModelShape,
    Part,
    TrainedParts,
    attention_width,
    layer_parts,
    output_weights,
)


@dataclass(frozen=True)
class DeviceSpeed:
    """Speeds of a device within a bf16 training step."""

    products: float
    """FLOP/s of matmuls."""
    attention: float
    """FLOP/s of causal attention, without the FLOPs of masked scores."""
    elementwise: float
    """Seconds of a layer's norms, rotary embedding, activation and additions, for each token and hidden unit."""
    loss: float
    """Seconds of the loss, for each token and entry of the vocabulary."""


_HOPPER_BANDWIDTHS = {"H200": 4.8, "H100": 3.35, "H800": 3.35}
"""Memory bandwidth in TB/s, from the data sheets."""
_H200 = DeviceSpeed(products=721e12, attention=290e12, elementwise=3.74e-11, loss=1.67e-12)
"""From `megatron-wrap profile` of the 1.5B Llama at 4,096 tokens, forward and backward (docs/profiling.md)."""
SPEEDS = {
    name: DeviceSpeed(
        products=_H200.products,
        attention=_H200.attention,
        elementwise=_H200.elementwise * _HOPPER_BANDWIDTHS["H200"] / bandwidth,
        loss=_H200.loss * _HOPPER_BANDWIDTHS["H200"] / bandwidth,
    )
    for name, bandwidth in _HOPPER_BANDWIDTHS.items()
}
"""Part of a GPU's name -> its speeds. The Hopper chips differ in the bandwidth of their memory."""
ANY_DEVICE = DeviceSpeed(products=1.0, attention=0.5, elementwise=0.0, loss=0.0)
"""Other devices, in FLOPs: attention at half of the matmuls' speed, a rounded ratio of the H200's."""
_FP8_PRODUCTS = 1.62
"""Speed of a layer's matmuls in FP8, relative to bf16 (docs/performance.md)."""


@dataclass(frozen=True)
class ModelCosts:
    """Seconds of forward and backward pass for each token, of the whole model on one device, or in units of FLOPs on a
    device without measured speeds. Tensor and context parallelism divide all of them alike."""

    layers: tuple[float, ...]
    """Cost of each transformer layer."""
    embedding: float
    output: float
    """Cost of output layer and loss, and of the layers for multi-token prediction, which are on the same stage."""


def device_speed(device: str) -> DeviceSpeed:
    """The speeds of a GPU by its name; those of `ANY_DEVICE` if it was not measured."""
    return next((speed for name, speed in SPEEDS.items() if name in device), ANY_DEVICE)


def model_costs(config: RunConfig, shape: ModelShape, device: str) -> ModelCosts:
    """The costs of a run's model for sequences of `seq_length` tokens. A frozen weight has no gradient; all inputs
    have, as those of a pipeline stage do in Megatron-Core (pipeline_parallel/p2p_communication.py).

    Args:
        device: name of the GPU; "" on CPUs.
    """
    arch, speed, seq_length = shape.arch, device_speed(device), config.train.seq_length
    # forward and backward pass are three forward passes if all is trained; recomputation adds a part of one
    granularity = config.recompute.recompute_granularity
    passes = 4.0 if granularity == "full" else 3.0
    attention_passes = 4.0 if granularity is not None else 3.0
    faster = 1.0 if fp8_settings(config) is None else _FP8_PRODUCTS
    elementwise = speed.elementwise * arch.hidden_size
    attention = attention_passes * attention_width(arch) * seq_length / speed.attention
    trained = TrainedParts(shape)

    def matmuls(prefix: str, parts: Iterable[Part], passes: float) -> float:
        return (
            sum(2 * part.weights * (passes - 1 + trained.share(prefix + part.name)) for part in parts) / speed.products
        )

    def layer(prefix: str, has_experts: int, is_linear: int) -> float:
        parts = itertools.chain(*layer_parts(arch, bool(has_experts), bool(is_linear)))
        return matmuls(prefix, parts, passes) / faster + (0.0 if is_linear else attention) + elementwise * passes / 3

    output = matmuls("", [Part(OUTPUT, weights=output_weights(shape))], 3.0)
    output += speed.loss * (shape.output_size or shape.vocab_size)
    experts, ahead = derived.moe_layer_pattern(arch), 0.0
    for number in range(derived.trained_prediction_layers(arch)):
        prefix = f"mtp_block.layers.{number}."
        ahead += matmuls(prefix, [Part("eh_proj", weights=2 * arch.hidden_size**2)], passes)
        ahead += layer(f"{prefix}transformer_layer.", experts[-1], 0) + output
    kinds = zip(experts, derived.linear_layer_pattern(arch), strict=True)
    return ModelCosts(
        layers=tuple(layer(f"decoder.layers.{number}.", *kind) for number, kind in enumerate(kinds)),
        embedding=elementwise / 3,
        output=output + ahead,
    )

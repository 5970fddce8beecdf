"""The factors of experts in peft's files: the product of each expert's factors is that of peft."""

from __future__ import annotations

import numpy
import pytest

from megatron_wrap.bridge.adapters.factors import expert_factors
from megatron_wrap.bridge.mapping import tensors as weights

RANK, EXPERTS, HIDDEN, WIDTH = 3, 4, 5, 6
EQUATION = "ore,eri->eoi"
"""tuners/lora/layer.py, ParamWrapper.get_delta_weight."""


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("gated", [True, False])
def test_the_products_are_peft_s(size, gated):
    weight = (
        weights.gated("gate", "up", WIDTH, HIDDEN) if gated else weights.row("down", HIDDEN, WIDTH)
    )  # each expert's own
    outputs, inputs = (2 * WIDTH, HIDDEN) if gated else (HIDDEN, WIDTH)
    ranks = range(size)
    mappings = [expert_factors(weight, "x", RANK, expert, EXPERTS) for expert in range(EXPERTS)]
    shapes = {name: shape for pair in mappings for mapping in pair for name, shape in mapping.shapes().items()}
    assert shapes == {"x.lora_A.weight": (EXPERTS * RANK, inputs), "x.lora_B.weight": (outputs, RANK * EXPERTS)}

    generator = numpy.random.default_rng(1)
    files = {name: generator.normal(size=shape) for name, shape in shapes.items()}
    read = {name: numpy.zeros(shape, int) for name, shape in shapes.items()}
    a = files["x.lora_A.weight"].reshape(EXPERTS, RANK, inputs)
    b = files["x.lora_B.weight"].reshape(outputs, RANK, EXPERTS)
    expected = numpy.einsum(EQUATION, b, a)
    for expert, pair in enumerate(mappings):
        local = [[_local(mapping, files, read, rank, size) for rank in ranks] for mapping in pair]
        if gated:
            product = _gathered([local[1][rank] @ local[0][rank] for rank in ranks])
        else:
            product = numpy.concatenate([local[1][rank] @ local[0][rank] for rank in ranks], axis=1)
        numpy.testing.assert_allclose(product, expected[expert], rtol=1e-12)
    assert all((count >= 1).all() for count in read.values())


def _local(mapping, files, read, rank, size):
    """One rank's shard of a factor."""
    values = numpy.full(mapping.local_shape(size), numpy.nan)
    for piece in mapping.pieces(values.shape, rank, size):
        region = tuple(slice(*bounds) for bounds in piece.region)
        read[piece.name][region] += 1
        values[tuple(slice(*bounds) for bounds in piece.local)] = files[piece.name][region]
    return values


def _gathered(shards):
    """Whole rows from shards of gate and up."""
    gates, ups = zip(*(numpy.split(shard, 2) for shard in shards), strict=True)
    return numpy.concatenate([*gates, *ups])

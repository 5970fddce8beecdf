"""Initial weights are normal, depend only on seed and global name, and are equal for every tensor-parallel size."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron_wrap.config import load_run_config
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.model.initial_weights import fill_initial_weights
from megatron_wrap.parallel.state import Axis
from megatron_wrap.testing.gradients import join_slices

STD = 0.02
ROWS, COLUMNS = 384, 1024
NO_GROUP: Any = None


@pytest.fixture(scope="module")
def arch() -> ArchConfig:
    return load_run_config(Path(__file__).parent / "model.yaml").arch


class Layer(nn.Module):
    """A layer with given parameters and the attributes of Megatron-Core's decoder layers."""

    def __init__(self, layer_number: int, parameters: dict[str, nn.Parameter]) -> None:
        super().__init__()
        self.layer_number = layer_number
        _register(self, parameters)


class Chunk(nn.Module):
    """A model chunk with the attributes that `fill_initial_weights` reads."""

    def __init__(self, outside: dict[str, nn.Parameter], layers: dict[int, dict[str, nn.Parameter]]) -> None:
        super().__init__()
        self.decoder = nn.Module()
        _register(self, outside)
        self.decoder.layers = nn.ModuleList(Layer(number, parameters) for number, parameters in layers.items())


def _register(module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
    for path, parameter in parameters.items():
        *folders, name = path.split(".")
        owner = module
        for folder in folders:
            if not hasattr(owner, folder):
                owner.add_module(folder, nn.Module())
            owner = getattr(owner, folder)
        owner.register_parameter(name, parameter)


def matrix(rows: int = ROWS, columns: int = COLUMNS, dim: int | None = None) -> nn.Parameter:
    """A matrix of NaNs; with `dim`, marked as a tensor-parallel shard as in Megatron-Core."""
    parameter = nn.Parameter(torch.full((rows, columns), torch.nan))
    if dim is not None:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        parameter.partition_dim = dim  # type: ignore[attr-defined]
    return parameter


def filled(
    arch: ArchConfig,
    outside: dict[str, nn.Parameter] | None = None,
    layers: dict[int, dict[str, nn.Parameter]] | None = None,
    seed: int = 1234,
    tp: tuple[int, int] = (1, 0),
    vocab_size: int = 301,
) -> dict[str, Tensor]:
    """The parameters of a chunk after `fill_initial_weights`, by their local names."""
    chunk = Chunk(outside or {}, layers or {})
    fill_initial_weights(chunk, arch, vocab_size, seed, Axis(*tp, group=NO_GROUP))
    return {name: parameter.detach() for name, parameter in chunk.named_parameters()}


def one_matrix(arch: ArchConfig, seed: int = 1234, name: str = "self_attention.linear_qkv.weight") -> Tensor:
    return filled(arch, layers={1: {name: matrix()}}, seed=seed)[f"decoder.layers.0.{name}"]


def test_weights_are_normally_distributed(arch):
    values = (one_matrix(arch).double() / STD).flatten()
    count = values.numel()
    assert abs(values.mean()) < 4 / math.sqrt(count)
    assert abs(values.std() - 1) < 4 / math.sqrt(2 * count)
    assert abs((values**3).mean()) < 4 * math.sqrt(15 / count)
    assert abs((values**4).mean() - 3) < 4 * math.sqrt(96 / count)
    # Kolmogorov-Smirnov statistic against the normal distribution; 1.63 / sqrt(n) is its 1% critical value
    ordered = values.sort().values
    expected = torch.tensor([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in ordered.tolist()])
    ranks = torch.arange(count + 1, dtype=torch.double) / count
    distance = torch.maximum((ranks[1:] - expected).max(), (expected - ranks[:-1]).max())
    assert distance < 1.63 / math.sqrt(count)
    assert ordered.unique().numel() > 0.98 * count  # the rest are equal in fp32
    assert 4 < ordered[-1] < 7
    assert -7 < ordered[0] < -4


def test_neighboring_elements_and_parameters_are_uncorrelated(arch):
    """Pairs that a counter-based generator could correlate; the tolerance is four standard errors."""
    first = one_matrix(arch).double() / STD
    count = first.numel()
    others = {
        "next layer": filled(arch, layers={2: {"self_attention.linear_qkv.weight": matrix()}}),
        "other parameter": filled(arch, layers={1: {"mlp.linear_fc1.weight": matrix()}}),
        "next seed": filled(arch, layers={1: {"self_attention.linear_qkv.weight": matrix()}}, seed=1235),
    }
    for name, parameters in others.items():
        (other,) = parameters.values()
        for power in (1, 2):
            left, right = first**power, (other.double() / STD) ** power
            assert abs(torch.corrcoef(torch.stack((left.flatten(), right.flatten())))[0, 1]) < 4 / math.sqrt(count), (
                name
            )
    for lag in (1, 2, 3, 64, COLUMNS, 8 * COLUMNS):
        for power in (1, 2):
            values = first.flatten() ** power
            pair = torch.stack((values[lag:], values[:-lag]))
            assert abs(torch.corrcoef(pair)[0, 1]) < 4 / math.sqrt(count - lag), lag
    # singular values of a random matrix with independent rows: Marchenko-Pastur bounds
    singular = torch.linalg.svdvals(first)
    assert singular[0] < 1.03 * (math.sqrt(COLUMNS) + math.sqrt(ROWS))
    assert singular[-1] > 0.97 * (math.sqrt(COLUMNS) - math.sqrt(ROWS))


def test_decays_of_linear_attention_are_uniform_and_split_by_heads(arch):
    def decays(heads: int, tp: tuple[int, int] = (1, 0)) -> Tensor:
        parameter = nn.Parameter(torch.full((heads,), torch.nan))
        parameter.tensor_model_parallel, parameter.partition_dim = True, 0  # type: ignore[attr-defined]
        (values,) = filled(arch, layers={1: {"self_attention.A_log": parameter}}, tp=tp).values()
        return values.exp()

    whole = decays(2048)
    assert (whole.min() >= 0.0099, whole.max() <= 16.001) == (True, True)
    assert abs(whole.mean() - 8) < 4 * 16 / math.sqrt(12 * 2048)
    assert torch.equal(whole, torch.cat([decays(1024, (2, rank)) for rank in range(2)]))
    ones = {"self_attention.dt_bias": nn.Parameter(torch.empty(4)), "self_attention.norm_weight": matrix(1, 4)}
    assert all((values == 1).all() for values in filled(arch, layers={1: ones}).values())


def test_weights_depend_only_on_seed_and_global_name(arch):
    again = one_matrix(arch)
    assert torch.equal(one_matrix(arch), again)
    assert not torch.equal(one_matrix(arch, seed=1235), again)
    # the third layer of the model, alone on a pipeline stage or after others
    name = "self_attention.linear_qkv.weight"
    alone = filled(arch, layers={3: {name: matrix()}})["decoder.layers.0." + name]
    third = filled(arch, layers={1: {name: matrix()}, 2: {name: matrix()}, 3: {name: matrix()}})
    assert torch.equal(third["decoder.layers.2." + name], alone)
    assert not torch.equal(third["decoder.layers.1." + name], alone)
    # torch's generator is not used
    state = torch.get_rng_state()
    one_matrix(arch)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("name", "dim", "swiglu"),
    [
        ("self_attention.linear_qkv.weight", 0, True),
        ("self_attention.linear_proj.weight", 1, True),
        ("mlp.linear_fc1.weight", 0, True),
        ("mlp.linear_fc1.weight", 0, False),
        ("mlp.linear_fc2.weight", 1, True),
    ],
)
def test_shards_are_parts_of_the_whole_matrix(arch, name: str, dim: int, swiglu: bool, size: int):
    arch = replace(arch, swiglu=swiglu)
    whole = filled(arch, layers={1: {name: matrix()}})[f"decoder.layers.0.{name}"]
    rows, columns = (ROWS // size, COLUMNS) if dim == 0 else (ROWS, COLUMNS // size)
    parts = [
        filled(arch, layers={1: {name: matrix(rows, columns, dim)}}, tp=(size, rank))[f"decoder.layers.0.{name}"]
        for rank in range(size)
    ]
    assert torch.equal(join_slices(parts, dim, gated=swiglu and "fc1" in name), whole)


@pytest.mark.parametrize("name", ["embedding.word_embeddings.weight", "output_layer.weight"])
def test_vocabulary_padding_is_zero(arch, name: str):
    whole = filled(arch, {name: matrix(384, 64)})[name]
    assert whole[301:].eq(0).all()
    assert abs(whole[:301].std() / STD - 1) < 0.05
    # with tensor parallelism the padding grows; the other rows are unchanged
    parts = [filled(arch, {name: matrix(128, 64, dim=0)}, tp=(4, rank))[name] for rank in range(4)]
    assert torch.equal(torch.cat(parts)[:384], whole)
    assert torch.cat(parts)[301:].eq(0).all()


def test_tied_output_layer_has_the_weights_of_the_embedding(arch):
    tied = replace(arch, untie_embeddings_and_output_weights=False)
    name = "embedding.word_embeddings.weight"
    embedding = filled(tied, {name: matrix(384, 64)})[name]
    assert torch.equal(filled(tied, {"output_layer.weight": matrix(384, 64)})["output_layer.weight"], embedding)
    untied = filled(arch, {"output_layer.weight": matrix(384, 64)})["output_layer.weight"]
    assert not torch.equal(untied, embedding)


def test_projections_into_the_residual_stream_are_scaled_down(arch):
    for name in ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"):
        assert abs(one_matrix(arch, name=name).std() / (STD / math.sqrt(2 * arch.num_layers)) - 1) < 0.01
    for name in ("self_attention.linear_qkv.weight", "mlp.linear_fc1.weight"):
        assert abs(one_matrix(arch, name=name).std() / STD - 1) < 0.01


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms_and_biases_with_names_of_both_implementations(arch, zero_centered: bool):
    """Transformer Engine fuses a norm into the linear layer that follows it."""
    arch = replace(arch, apply_layernorm_1p=zero_centered)
    norms = [
        "input_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.linear_qkv.layer_norm_weight",
        "mlp.linear_fc1.layer_norm_weight",
    ]
    biases = [
        "input_layernorm.bias",
        "self_attention.linear_qkv.bias",
        "self_attention.linear_qkv.layer_norm_bias",
        "mlp.linear_fc1.bias",
    ]
    unset = {name: nn.Parameter(torch.full((8,), torch.nan)) for name in norms + biases}
    parameters = filled(arch, {"decoder.final_layernorm.weight": nn.Parameter(torch.full((8,), torch.nan))}, {1: unset})
    for name in norms:
        assert parameters["decoder.layers.0." + name].eq(0.0 if zero_centered else 1.0).all(), name
    assert parameters["decoder.final_layernorm.weight"].eq(0.0 if zero_centered else 1.0).all()
    for name in biases:
        assert parameters["decoder.layers.0." + name].eq(0.0).all(), name


def test_half_precision_weights_are_rounded_from_fp32(arch):
    name = "mlp.linear_fc1.weight"
    full = filled(arch, layers={1: {name: matrix()}})["decoder.layers.0." + name]
    half = nn.Parameter(torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16))
    rounded = filled(arch, layers={1: {name: half}})["decoder.layers.0." + name]
    assert torch.equal(rounded, full.bfloat16())


def test_weights_do_not_depend_on_the_chunk_size(arch, monkeypatch):
    from megatron_wrap.model import initial_weights

    name = "mlp.linear_fc1.weight"
    usual = filled(arch, layers={1: {name: matrix()}})["decoder.layers.0." + name]
    monkeypatch.setitem(initial_weights.CHUNK_ELEMENTS, "cpu", 3 * COLUMNS + 1)
    assert torch.equal(filled(arch, layers={1: {name: matrix()}})["decoder.layers.0." + name], usual)

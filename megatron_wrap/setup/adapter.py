"""Adds the adapters of `megatron_wrap.adapter` to a model chunk, and freezes its other weights."""

from __future__ import annotations

import math
from collections import abc
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_wrap.bridge.adapters.factors import AdaptedLayer, TargetModule
from megatron_wrap.bridge.adapters.peft_folder import adapter_folder, with_other_adapter
from megatron_wrap.bridge.adapters.run_adapter import RunAdapter, run_adapter
from megatron_wrap.bridge.adapters.target_modules import is_linear, refuse_unknown_tokens
from megatron_wrap.bridge.loading.load_weights import load_weights
from megatron_wrap.bridge.mapping.family import ADAPTER, EMBEDDING, HEAD
from megatron_wrap.bridge.mapping.model_parameters import local_pieces, view_of
from megatron_wrap.bridge.mapping.tensors import Mapping
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import AdapterConfig
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.errors import ConfigError
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.model.initial_weights import GlobalParameter, global_names
from megatron_wrap.model.random_numbers import key_of, normal, uniform
from megatron_wrap.nn.adapters.trained_copies import CHILD, TrainedCopies
from megatron_wrap.parallel.collectives import broadcast_on, reduce_in_place
from megatron_wrap.parallel.state import ParallelState
from megatron_wrap.setup.freeze import keep_graph

if TYPE_CHECKING:
    from megatron_wrap.nn.adapters.lora import LinearAdapter


def adapt_chunks(
    adapter: RunAdapter,
    config: RunConfig,
    parallel: ParallelState,
    chunks: list[torch.nn.Module],
    vocab_size: int,
    from_path: bool,
) -> None:
    """Freeze the weights of a process's chunks and add adapters, with the factors of `adapter.path` or else initial
    ones.

    Args:
        from_path: False: ignore `adapter.path`, for a caller that loads a checkpoint.

    Raises:
        CheckpointError: `adapter.path` cannot be loaded, or is of other modules or ranks.
    """
    folder = adapter_folder(config, adapter) if from_path else None
    for name in config.adapter.others or {}:
        _add_other(name, config, parallel, chunks, vocab_size)
    for chunk in map(bare_model, chunks):
        add_adapters(chunk, adapter.layers, config, parallel, decompose=from_path)
        train_whole(chunk, adapter.saved, config)
        if adapter.rows:
            add_token_rows(chunk, adapter.rows, config, parallel, vocab_size)
        if folder is not None:
            load_weights(chunk, config.arch, folder, parallel)


def _add_other(
    name: str, config: RunConfig, parallel: ParallelState, chunks: list[torch.nn.Module], vocab_size: int
) -> None:
    """Add an adapter of `adapter.others`, frozen and switched off; it is a sibling `linear_qkv_adapter_NAME`."""
    from megatron_wrap.nn.adapters.lora import TRAINED, LinearAdapter

    other = with_other_adapter(config, name)
    adapter = run_adapter(other, vocab_size)
    assert adapter is not None
    if any(layer.experts for layer in adapter.layers):
        key = f"megatron_wrap.adapter.others.{name}"
        raise ConfigError(f"{key}: only the trained adapter can have target_parameters; remove it from others")
    folder = adapter_folder(other, adapter)
    assert folder is not None
    for chunk in map(bare_model, chunks):
        add_adapters(chunk, adapter.layers, other, parallel)
        load_weights(chunk, config.arch, folder, parallel)
        for owner in list(chunk.modules()):
            for child_name, child in list(owner.named_children()):
                if isinstance(child, LinearAdapter) and child.adapter_name == TRAINED:
                    owner.add_module(child_name, None)
                    child.keep_as(name)
                    owner.add_module(f"{child_name}_{name}", child)


def train_whole(chunk: torch.nn.Module, names: Container[str], config: RunConfig) -> None:
    """Train the parameters of a bare model chunk with these global names, and keep their originals."""
    local = {id(parameter): name for name, parameter in chunk.named_parameters()}
    chosen = {local[id(tensor)]: tensor for name, tensor, _ in _global_names(chunk, config) if name in names}
    if chosen:
        chunk.add_module(CHILD, TrainedCopies(chosen))
    for parameter in chosen.values():
        parameter.requires_grad_(True)
    if config.adapter.bias != "none":
        from megatron_wrap.nn.adapters.lora import compute_bias_gradients

        compute_bias_gradients(chunk)


def add_adapters(
    chunk: torch.nn.Module,
    layers: list[AdaptedLayer],
    config: RunConfig,
    parallel: ParallelState,
    decompose: bool = True,
) -> None:
    """Freeze the parameters of a bare model chunk and add adapters with initial factors beside its linear layers. An
    adapter of `linear_qkv` is its sibling `linear_qkv_adapter`.

    The factors depend only on the seed and their names, or on the whole weights, so all parallel layouts start equal.

    Args:
        decompose: False: leave the factors of `init_lora_weights: pissa` to a caller that loads a checkpoint.
    """
    chunk.requires_grad_(False)
    named, added = {layer.name: layer for layer in layers}, []
    for owner, child_name, child, name in list(_linear_layers(chunk, config)):
        if name in named:
            added.append(_adapter(child, named[name], config, parallel))
            owner.add_module(f"{child_name}{ADAPTER}", added[-1])
    for owner, child_name, child, name in list(_stacks_of_experts(chunk)):
        if name in named:
            owner.add_module(f"{child_name}{ADAPTER}", _expert_adapter(child, named[name], parallel))
    if config.adapter.decomposes_base and decompose:
        _decompose(chunk, layers, config, parallel)
    for name, factor, mapping in adapter_parameters(chunk, layers, config):
        if ".lora_magnitude_" not in name and not config.adapter.decomposes_base:
            _fill(name, factor, mapping, config.adapter, config.train.seed, parallel)
    for adapter in added if config.adapter.use_dora else ():
        adapter.initialize_magnitudes()
    if config.recompute.recompute_granularity is not None:
        keep_graph(chunk)


def adapter_parameters(
    chunk: torch.nn.Module, layers: list[AdaptedLayer], config: RunConfig
) -> Iterator[tuple[str, Tensor, Mapping]]:
    """Global name, tensor and mapping to peft's tensors of each factor of a bare model chunk, experts' factors
    included."""
    table = {name: mapping for layer in layers for name, mapping in layer.all_factors().items()}
    for parameter in _global_names(chunk, config):
        if parameter.name in table:
            yield parameter.name, parameter.of(parameter.tensor.detach()), table[parameter.name]


def _global_names(chunk: torch.nn.Module, config: RunConfig) -> Iterator[GlobalParameter]:
    return global_names(chunk, tied=not config.arch.untie_embeddings_and_output_weights)


def quantize_base(chunk: torch.nn.Module, config: RunConfig) -> None:
    """Keep the weights of the decoder's linear layers quantized (`adapter.base_weights`), in a bare model chunk that
    was built within `weights_without_memory`; their values must be written afterwards. Experts with grouped matmuls,
    embeddings and the output layer are unchanged."""
    from megatron_wrap.nn.layers.quantized_weights import allocate, keep_quantized

    kind = config.adapter.base_weights
    assert kind != "bf16"
    for _, _, layer, name in list(_linear_layers(chunk, config)):
        if is_linear(name) and layer.weight.dim() == 2:  # type: ignore[operator, union-attr]
            keep_quantized(layer, kind)
        else:
            allocate(layer)


def _linear_layers(
    chunk: torch.nn.Module, config: RunConfig
) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module, str]]:
    """(owner, name in the owner, layer, global name) of each module with a weight."""
    names = {id(tensor): name for name, tensor, index in _global_names(chunk, config) if index is None}
    for owner in chunk.modules():
        for child_name, child in owner.named_children():
            name = names.get(id(getattr(child, "weight", None)), "")
            if name.endswith(".weight"):
                yield owner, child_name, child, name.removesuffix(".weight")


def _stacks_of_experts(chunk: Any) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module, str]]:
    """(owner, name in the owner, layer, global name) of the linear layers of all experts of each transformer layer."""
    from megatron_wrap.nn.experts.grouped import GroupedExperts

    for layer in chunk.decoder.layers:
        experts: Any = getattr(layer.mlp, "experts", None)
        for child_name in ("linear_fc1", "linear_fc2") if experts is not None else ():
            name = f"decoder.layers.{layer.layer_number - 1}.mlp.experts.{child_name}"
            linear = getattr(experts, child_name) if isinstance(experts, GroupedExperts) else experts
            yield experts, child_name, linear, name


def _expert_adapter(base: Any, layer: AdaptedLayer, parallel: ParallelState) -> torch.nn.Module:
    from megatron_wrap.nn.experts.grouped import ExpertAdapter, GroupedLinear

    if not isinstance(base, GroupedLinear):
        raise ConfigError(
            "megatron_wrap.adapter.target_parameters: adapters of experts are computed in grouped products; set "
            "megatron_lm.model.arch.experts_impl to grouped_mm"
        )
    (module,) = layer.modules
    number = int(layer.name.split(".")[2])
    return ExpertAdapter(base, module.key, module.rank, module.scale, number, parallel.expert_tp.group)


def _adapter(base: Any, layer: AdaptedLayer, config: RunConfig, parallel: ParallelState) -> LinearAdapter:
    from megatron_wrap.nn.adapters.lora import AdaptedModule, LinearAdapter

    local_shape = tuple(base.weight.shape)
    pieces = layer.weight.pieces(local_shape, parallel.tp.rank, parallel.tp.size)
    whole = not layer.weight.split or local_shape == layer.weight.local_shape(1)
    modules = []
    share = local_shape[0] // len(layer.weight.parts)
    for module in layer.modules:
        if layer.weight.along == 1:
            parts: tuple[Tensor, ...] = (torch.arange(local_shape[0]),)
        else:
            rows = torch.cat(
                [torch.arange(*piece.local[0]) for piece in pieces if piece.name == f"{module.name}.weight"]
            )
            part = rows // share
            parts = tuple(rows[part == index] for index, _ in layer.runs_of(module))
        modules.append(AdaptedModule(module.key, module.rank, module.scale, parts))
    kind = "row" if layer.is_row_parallel else "column"
    if whole and parallel.tp.size > 1:
        kind = "replicated"
    return LinearAdapter(
        base,
        kind,  # type: ignore[arg-type]
        modules,
        dropout=config.adapter.lora_dropout,
        layer=int(layer.name.split(".")[2]),
        sequence_parallel=derived.sequence_parallel(config.parallel) and parallel.tp.size > 1,
        dora=config.adapter.use_dora,
        decomposed=layer.decomposed,
    )


@torch.no_grad()
def _decompose(chunk: torch.nn.Module, layers: list[AdaptedLayer], config: RunConfig, parallel: ParallelState) -> None:
    """Set the factors from the decomposition of each Hugging Face module's whole weight, which is gathered over the
    tensor-parallel ranks; one is in memory at a time. Collective over tensor- and data-parallel ranks."""
    weights: dict[str, Any] = {name: layer.weight for _, _, layer, name in _linear_layers(chunk, config)}
    factors = {name: factor for name, factor, _ in adapter_parameters(chunk, layers, config)}
    for layer in layers:
        if layer.name not in weights:
            continue
        for module in layer.modules:
            whole = _whole_weight(f"{module.name}.weight", weights[layer.name], layer, parallel)
            a, b = initial_factors(whole, module)
            for values in (a, b):  # of one rank: decompositions may differ between processors
                broadcast_on(values, 0, parallel.tp.group)
                broadcast_on(values, 0, parallel.dp_cp.group)
            stem = layer.file_stem(module)
            wholes = {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
            for name, mapping in layer.factors().items():
                if wholes.keys() & mapping.shapes().keys():
                    initial = factors[name.replace(".lora_", ".initial_")]
                    for piece in local_pieces(name, factors[name], mapping, parallel):
                        values = wholes[piece.name][tuple(slice(*bounds) for bounds in piece.region)]
                        view_of(factors[name], piece, piece.region).copy_(values)
                        view_of(initial, piece, piece.region).copy_(-values if ".lora_B_" in name else values)


def _whole_weight(name: str, weight: Tensor, layer: AdaptedLayer, parallel: ParallelState) -> Tensor:
    """A Hugging Face module's weight [outputs, inputs] in fp32, on every tensor-parallel rank."""
    shape = layer.weight.shapes()[name]
    whole = torch.zeros(shape, dtype=torch.float32, device=weight.device)
    for piece in local_pieces(layer.name, weight, layer.weight, parallel):
        if piece.name == name:
            whole[tuple(slice(*bounds) for bounds in piece.region)] = view_of(weight, piece, piece.region).float()
    if layer.weight.split and tuple(weight.shape) != layer.weight.local_shape(1):
        reduce_in_place(whole, "sum", parallel.tp.group)
    return whole.t() if layer.weight.transposed else whole


def initial_factors(weight: Tensor, module: TargetModule) -> tuple[Tensor, Tensor]:
    """peft's A [rank, inputs] and B [outputs, rank] of an fp32 weight [outputs, inputs] (LoraLayer.pissa_init): the
    largest singular vectors times the roots of the singular values.
    """
    left, values, right = torch.linalg.svd(weight, full_matrices=False)
    roots = (values[: module.rank] / module.scale).sqrt()
    return (roots[:, None] * right[: module.rank]).contiguous(), (left[:, : module.rank] * roots).contiguous()


@torch.no_grad()
def _fill(
    name: str, factor: Tensor, mapping: Mapping, adapter: AdapterConfig, seed: int, parallel: ParallelState
) -> None:
    """Set the initial values of a factor, as peft's LoraLayer.reset_lora_parameters. A is uniform within 1 / sqrt(its
    columns), which is kaiming_uniform_ with a = sqrt(5), or normal; B is zero."""
    is_b = ".lora_B_" in name
    if is_b and adapter.init_lora_weights is not False:
        factor.zero_()
        return
    key = key_of(seed, next(iter(mapping.shapes())))
    ((_, columns),) = set(mapping.shapes().values())
    for piece in local_pieces(name, factor, mapping, parallel):
        (first_row, last_row), (first, last) = piece.region
        rows = torch.arange(first_row, last_row, device=factor.device)
        index = rows[:, None] * columns + torch.arange(first, last, device=factor.device)[None, :]
        if adapter.init_lora_weights == "gaussian":
            rank = factor.shape[0]
            values = normal(index + key) / rank
        else:
            values = uniform(index + key) / math.sqrt(columns)
        view_of(factor, piece, piece.region).copy_(values)


def add_token_rows(
    chunk: Any, indices: abc.Mapping[str, tuple[int, ...]], config: RunConfig, parallel: ParallelState, vocab_size: int
) -> None:
    """Add the rows to a bare model chunk whose weights are set. The rows of an embedding are in its sibling
    `word_embeddings_adapter`, with tied weights also the rows of an output layer in the same chunk. Collective over
    tensor-parallel ranks.

    Args:
        indices: global name of a weight -> its rows, from `trained_rows`.

    Raises:
        ConfigError: an index is not in the vocabulary.
    """
    from megatron_wrap.nn.adapters.embedding_rows import EmbeddingRows
    from megatron_wrap.nn.adapters.lora import TRAINED

    refuse_unknown_tokens(indices, vocab_size)
    tied = not config.arch.untie_embeddings_and_output_weights and not derived.has_value_head(config)
    over_stages = tied and parallel.pp.size > 1
    sequence_parallel = derived.sequence_parallel(config.parallel) and parallel.tp.size > 1

    def rows(weight: torch.Tensor, name: str, is_copy: bool = False) -> EmbeddingRows:
        return EmbeddingRows(
            weight,
            indices[name],
            parallel.tp.rank,
            sequence_parallel,
            TRAINED,
            tied_over_stages=over_stages,
            is_copy=is_copy,
        )

    if chunk.pre_process and EMBEDDING in indices:
        embedding = chunk.embedding.word_embeddings
        of_embedding = rows(embedding.weight, EMBEDDING)
        of_embedding.beside_embedding(embedding)
        chunk.embedding.add_module(f"word_embeddings{ADAPTER}", of_embedding)
        if tied and chunk.post_process:
            of_embedding.beside_output_layer(chunk.output_layer)
    name = EMBEDDING if tied else HEAD
    if chunk.post_process and name in indices and not (tied and chunk.pre_process):
        of_output = rows(chunk.output_layer.weight, name, is_copy=tied)
        of_output.beside_output_layer(chunk.output_layer)
        chunk.add_module(f"output_layer{ADAPTER}", of_output)

"""Initial weights that depend only on the seed and the parameter's global name, so all parallel layouts start equal.

Element i of a parameter is a normal random number from a hash of (seed, name, i) (`random_numbers.py`). A process
generates only its own elements, on its own device, for any sharding.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.model.fp8_parameters import writable
from megatron_wrap.model.random_numbers import key_of, normal
from megatron_wrap.parallel.state import Axis

CHUNK_ELEMENTS = {"cpu": 2**16, "cuda": 2**24}
"""Elements generated at once: fits a CPU's cache (12 ns per element, 150 ns with 2^24), and saturates a GPU with half a
GiB of temporary memory."""

OUTPUT_PROJECTIONS = ("self_attention.linear_proj.weight", "self_attention.out_proj.weight", ".linear_fc2.weight")
"""Projections into the residual stream: their standard deviation is divided by sqrt(2 * num_layers), as in
Megatron-Core's scaled_init_method_normal (megatron/core/utils.py)."""


_MIN_DECAY, _MAX_DECAY = 0.01, 16.0
"""Range of exp(A_log), as in transformers (models/qwen3_next/modeling_qwen3_next.py)."""


@torch.no_grad()
def fill_initial_weights(
    chunk: torch.nn.Module, arch: ArchConfig, vocab_size: int, seed: int, tp: Axis, expert_tp: Axis | None = None
) -> None:
    """Initialize all parameters of one model chunk in place.

    Args:
        tp: the axis over which matrices are sharded.
        expert_tp: the axis over which matrices of experts are sharded; default: `tp`.

    Matrices and sinks are normal with standard deviation `init_method_std`, biases are 0, norm weights 1 (0 if stored
    zero-centered), and the padding rows of embedding and output layer (past `vocab_size`) 0. In linear attention,
    `dt_bias` and the norm are 1, and exp(A_log) is uniform between 0 and 16, as in transformers.
    """
    for named in global_names(chunk, tied=not arch.untie_embeddings_and_output_weights):
        name, parameter = named.name, named.of(named.tensor)
        if name.endswith((".dt_bias", ".norm_weight")):
            parameter.fill_(1.0)
        elif name.endswith(".A_log"):
            _fill_normal(parameter[:, None], 1.0, key_of(seed, name), tp, 0, False, None)
            parameter.copy_((_MAX_DECAY * torch.special.ndtr(parameter.float())).clamp(min=_MIN_DECAY).log())
        elif name.endswith("bias"):
            parameter.zero_()
        elif name.endswith(".softmax_offset"):  # sinks of attention
            _fill_normal(parameter[:, None], arch.init_method_std, key_of(seed, name), tp, 0, False, None)
        elif parameter.dim() == 1:  # norms
            parameter.fill_(0.0 if arch.apply_layernorm_1p else 1.0)
        else:
            std = arch.init_method_std
            if name.endswith(OUTPUT_PROJECTIONS):
                std /= math.sqrt(2.0 * arch.num_layers)
            gated = derived.is_gated(arch) and name.endswith("linear_fc1.weight")
            rows = vocab_size if name.startswith(("embedding.word_embeddings", "output_layer")) else None
            axis = expert_tp if is_expert(name) and expert_tp is not None else tp
            with writable(parameter) as values:
                _fill_normal(values, std, key_of(seed, name), axis, split_dim(name, parameter), gated, rows)


class GlobalParameter(NamedTuple):
    """One parameter of the whole model."""

    name: str
    """Name in the whole model."""
    tensor: torch.nn.Parameter
    """Local tensor that contains the parameter."""
    position: int | None
    """Index of the parameter in a stack of experts' parameters; None: `tensor` is the parameter."""

    def of(self, values: Tensor) -> Tensor:
        """This parameter's part of values in the shape of `tensor`, such as its gradient: a view."""
        return values if self.position is None else values[self.position]


LAYER = re.compile(r"(decoder\.layers\.\d+|mtp_block\.layers\.\d+\.transformer_layer)\.(.*)")
"""Pattern of local names in a transformer layer; its groups are the layer's name and the rest."""


def named_layers(chunk: torch.nn.Module) -> dict[str, tuple[str, Any]]:
    """Local name of each transformer layer of a bare chunk -> its global name, and the layer: those of the decoder,
    then those for multi-token prediction."""
    named = {
        f"decoder.layers.{index}": (f"decoder.layers.{layer.layer_number - 1}", layer)
        for index, layer in enumerate(getattr(chunk.decoder, "layers", ()))
    }
    for index, layer in enumerate(getattr(getattr(chunk, "mtp_block", None), "layers", ())):
        name = f"mtp_block.layers.{index}.transformer_layer"
        named[name] = name, layer.transformer_layer
    return named


def global_names(chunk: torch.nn.Module, tied: bool) -> Iterator[GlobalParameter]:
    """The parameters of a chunk with their global names: global layer numbers, global expert numbers however experts
    are stored (`mlp.experts.5.linear_fc1.weight`), and the embedding's name for a tied output layer. The head of a
    value model is never tied."""
    layers = named_layers(chunk)
    for name, parameter in chunk.named_parameters():
        match = LAYER.match(name)
        if match:
            prefix, layer = layers[match[1]]
            for local_name, index in _with_global_experts(match[2], layer):
                yield GlobalParameter(f"{prefix}.{local_name}", parameter, index)
            continue
        if tied and name == "output_layer.weight" and getattr(chunk, "share_embeddings_and_output_weights", True):
            name = "embedding.word_embeddings.weight"
        if tied and name == "output_layer_adapter.token_rows":
            name = "embedding.word_embeddings_adapter.token_rows"
        yield GlobalParameter(name, parameter, None)


_LOCAL_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<index>\d+)\.(?P<name>.*)|(?P<grouped_name>.*\.(?:weight|bias))(?P<grouped_index>\d+))"
)
_STACKED_EXPERTS = re.compile(r"mlp\.experts\.(linear_fc[12](?:\.weight|\.bias|_adapter\.lora_[AB]_\w+))")


def _with_global_experts(name: str, layer: torch.nn.Module) -> Iterator[tuple[str, int | None]]:
    """Names in the layer, with global expert numbers, of the parameters that a local parameter contains, and their
    indices in it."""
    numbers: list[int] = getattr(getattr(layer, "mlp", None), "local_expert_indices", [])
    if match := _STACKED_EXPERTS.fullmatch(name):
        for index, number in enumerate(numbers):
            yield f"mlp.experts.{number}.{match[1]}", index
    elif match := _LOCAL_EXPERT.fullmatch(name):
        number = numbers[int(match["index"] or match["grouped_index"])]
        yield f"mlp.experts.{number}.{match['name'] or match['grouped_name']}", None
    else:
        yield name, None


_MODULE_OF_LAYER = re.compile(r"(decoder\.layers\.\d+|mtp_block\.layers\.\d+\.transformer_layer)(\..*)?")
_MODULE_OF_EXPERT = re.compile(r"\.mlp\.experts\.local_experts\.(\d+)(.*)")


def global_module_names(chunk: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Module -> name in the whole model, for the chunk and all modules in it: global numbers of layers and of experts
    (`decoder.layers.7.mlp.experts.5.linear_fc1`), as in `global_names`. The chunk itself is `the model`."""
    layers = named_layers(chunk) if hasattr(chunk, "decoder") else {}
    names: dict[torch.nn.Module, str] = {}
    for name, module in chunk.named_modules():
        match = _MODULE_OF_LAYER.fullmatch(name)
        if match:
            prefix, layer = layers[match[1]]
            name = prefix + _of_global_expert(match[2] or "", layer)
        names[module] = name or "the model"
    return names


def _of_global_expert(name: str, layer: torch.nn.Module) -> str:
    match = _MODULE_OF_EXPERT.fullmatch(name)
    if match is None:
        return name
    numbers: list[int] = getattr(layer.mlp, "local_expert_indices", [])
    return f".mlp.experts.{numbers[int(match[1])]}{match[2]}"


def is_expert(name: str) -> bool:
    """Whether a parameter belongs to a routed expert, which expert parallelism distributes."""
    return ".mlp.experts." in name


def split_dim(name: str, parameter: Tensor) -> int | None:
    """Dimension along which a parameter is sharded over its tensor-parallel axis; None: replicated."""
    if is_expert(name):
        if "_adapter.lora_" in name:
            fc1 = ".linear_fc1_adapter." in name
            return None if fc1 == (".lora_A_" in name) else 0 if fc1 else 1
        # Transformer Engine does not mark these as sharded (extensions/transformer_engine.py, explicit_expert_comm)
        return 0 if ".linear_fc1." in name else 1 if name.endswith("weight") else None
    return getattr(parameter, "partition_dim", None) if getattr(parameter, "tensor_model_parallel", False) else None


def _fill_normal(
    parameter: Tensor, std: float, key: int, tp: Axis, dim: int | None, gated: bool, valid_rows: int | None
) -> None:
    """Initialize a matrix [rows, columns], which may be a shard along `dim` of a larger matrix."""
    rows, columns = parameter.shape
    full_columns = columns * tp.size if dim == 1 else columns
    row_index = torch.arange(rows, device=parameter.device)
    column_offset = tp.rank * columns if dim == 1 else 0
    if dim == 0:
        if gated:  # each shard contains its part of the gate projection, then its part of the up projection
            half = rows // 2
            row_index = row_index % half + (row_index // half) * half * tp.size + tp.rank * half
        else:
            row_index = row_index + tp.rank * rows
    column_index = torch.arange(columns, device=parameter.device) + column_offset
    step = max(1, CHUNK_ELEMENTS[parameter.device.type] // columns)
    for start in range(0, rows, step):
        part = row_index[start : start + step]
        values = normal(part[:, None] * full_columns + column_index[None, :] + key).mul_(std)
        if valid_rows is not None:
            values[part >= valid_rows] = 0.0
        parameter[start : start + step].copy_(values)

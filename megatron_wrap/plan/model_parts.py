"""The matmuls of a GPT's forward pass in their order, with the names of the parameters that take part."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.config.schema.run import RunConfig

EMBEDDING, OUTPUT = "embedding.word_embeddings", "output_layer"
_POSITIONS, _FINAL_NORM = "embedding.position_embeddings", "decoder.final_layernorm"
_WEIGHTS = ("weight", "conv_weight", "gate_weight")
"""Last part of the name of a parameter that multiplies tokens."""
_EXPERT = re.compile(r"(?<=\.mlp\.experts\.)\d+\.")


@dataclass(frozen=True)
class ModelShape:
    """Sizes and trained parameters that determine the FLOPs of a GPT. Names of parameters are global, as in
    `model/initial_weights.py`."""

    arch: ArchConfig
    vocab_size: int
    """Output size of the output layer, which may be tied to the embedding."""
    output_size: int | None = None
    """Output size of a layer that replaces the output layer, such as a scalar head; None: `vocab_size`."""
    trained: frozenset[str] | None = None
    """Names of the parameters that have gradients; None: all."""
    factors: Mapping[str, int] = field(default_factory=dict)
    """Name of each factor of adapters, and of trained rows of tokens, whether it is trained or not -> its elements."""

    @property
    def is_tied(self) -> bool:
        """Whether the output layer has the embedding's weights."""
        return self.output_size is None and not self.arch.untie_embeddings_and_output_weights


def model_shape(config: RunConfig, vocab_size: int) -> ModelShape:
    """The shape of the model of `config` with a vocabulary of `vocab_size` entries, of which all is trained."""
    return ModelShape(config.arch, vocab_size, 1 if derived.has_value_head(config) else None)


@dataclass(frozen=True)
class Part:
    """A matmul of each token with weights, or of queries with keys and values; or a part without a matmul that may be
    trained, such as a norm."""

    name: str
    """Global name without its prefix and without the number of an expert."""
    after: tuple[str, ...] = ()
    """Names of the parts whose outputs it takes; (): it takes the hidden states."""
    weights: int = 0
    """Multiply-adds for each token."""
    scores: int = 0
    """Multiply-adds for each query and key."""


@dataclass(frozen=True)
class Block:
    """Parts between two hidden states."""

    prefix: str
    """Prefix of the names of its parts."""
    parts: tuple[Part, ...]
    takes_embedding: bool = False
    """Whether it takes embedded tokens in addition to hidden states."""
    returns_logits: bool = False
    """Whether its outputs are logits instead of hidden states."""


def model_blocks(shape: ModelShape) -> Iterator[Block]:
    """The blocks of a model in the order of the forward pass: attention and MLP of each layer, the output layer, and
    those of the trained layers for multi-token prediction, which are like the decoder's last layer."""
    arch = shape.arch
    output = Block("", (Part(OUTPUT, weights=output_weights(shape)),), returns_logits=True)
    kinds = zip(derived.moe_layer_pattern(arch), derived.linear_layer_pattern(arch), strict=True)
    for number, (has_experts, is_linear) in enumerate(kinds):
        for parts in layer_parts(arch, bool(has_experts), bool(is_linear)):
            yield Block(f"decoder.layers.{number}.", parts)
    yield Block("", (Part(_FINAL_NORM),))
    yield output
    for number in range(derived.trained_prediction_layers(arch)):
        prefix, projection = f"mtp_block.layers.{number}.", Part("eh_proj", ("enorm", "hnorm"), 2 * arch.hidden_size**2)
        yield Block(prefix, (Part("enorm"), Part("hnorm"), projection), takes_embedding=True)
        for parts in layer_parts(arch, bool(derived.moe_layer_pattern(arch)[-1])):
            yield Block(f"{prefix}transformer_layer.", parts)
        yield Block(prefix, (Part("final_layernorm"),))
        yield output


def layer_parts(arch: ArchConfig, has_experts: bool, is_linear: bool = False) -> tuple[tuple[Part, ...], ...]:
    """The parts of a layer's attention and of its MLP."""
    attention = _linear_attention(arch) if is_linear else _attention(arch)
    mlp = _experts(arch) if has_experts else _mlp(arch, "mlp.", derived.ffn_hidden_size(arch))
    before, between = Part("input_layernorm"), Part("pre_mlp_layernorm")
    return (before, *attention, Part("self_attn_bda.norm")), (between, *mlp, Part("mlp_bda.norm"))


def output_weights(shape: ModelShape) -> int:
    """Number of weights of the output layer, or of the layer that replaces it."""
    return shape.arch.hidden_size * (shape.vocab_size if shape.output_size is None else shape.output_size)


def attention_width(arch: ArchConfig) -> int:
    """Multiply-adds of a layer's attention for each query and key: the score, and its product with the value."""
    if not arch.multi_latent_attention:
        return 2 * arch.num_attention_heads * derived.kv_channels(arch)
    return arch.num_attention_heads * (arch.qk_head_dim + arch.qk_pos_emb_head_dim + arch.v_head_dim)


def _attention(arch: ArchConfig) -> tuple[Part, ...]:
    if arch.multi_latent_attention:
        return _latent_attention(arch)
    heads, groups, width = arch.num_attention_heads, derived.num_query_groups(arch), derived.kv_channels(arch)
    qkv, norms = "self_attention.linear_qkv", ("self_attention.q_layernorm", "self_attention.k_layernorm")
    columns = ((1 + arch.attention_output_gate) * heads + 2 * groups) * width
    return (
        Part(qkv, ("input_layernorm",), arch.hidden_size * columns),
        *(Part(norm, (qkv,)) for norm in norms),
        Part("self_attention.core_attention", norms, scores=attention_width(arch)),
        Part("self_attention.linear_proj", ("self_attention.core_attention",), arch.hidden_size * heads * width),
    )


def _latent_attention(arch: ArchConfig) -> tuple[Part, ...]:
    hidden, heads, rank = arch.hidden_size, arch.num_attention_heads, arch.q_lora_rank
    query_width = heads * (arch.qk_head_dim + arch.qk_pos_emb_head_dim)
    of, norm = "self_attention.", ("input_layernorm",)
    q, kv_down, kv_up = f"{of}linear_q_up_proj", f"{of}linear_kv_down_proj", f"{of}linear_kv_up_proj"
    if rank is None:
        q = f"{of}linear_q_proj"
        queries: tuple[Part, ...] = (Part(q, norm, hidden * query_width),)
    else:
        queries = (
            Part(f"{of}linear_q_down_proj", norm, hidden * rank),
            Part(f"{of}q_layernorm", (f"{of}linear_q_down_proj",)),
            Part(q, (f"{of}q_layernorm",), rank * query_width),
        )
    return (
        *queries,
        Part(kv_down, norm, hidden * (arch.kv_lora_rank + arch.qk_pos_emb_head_dim)),
        Part(f"{of}kv_layernorm", (kv_down,)),
        Part(kv_up, (f"{of}kv_layernorm",), arch.kv_lora_rank * heads * (arch.qk_head_dim + arch.v_head_dim)),
        Part(f"{of}core_attention", (q, kv_down, kv_up), scores=attention_width(arch)),
        Part(f"{of}linear_proj", (f"{of}core_attention",), heads * arch.v_head_dim * hidden),
    )


def _linear_attention(arch: ArchConfig) -> tuple[Part, ...]:
    """Parts of linear attention. The matmuls of the rule with its state count as well: key with state, key with value,
    query with state, and the decay, 4 heads * d_k * d_v as in Megatron-LM's formula."""
    keys = arch.linear_num_key_heads * arch.linear_key_head_dim
    values = arch.linear_num_value_heads * arch.linear_value_head_dim
    columns = 2 * keys + 2 * values + 2 * arch.linear_num_value_heads
    return (
        Part("self_attention.in_proj", ("input_layernorm",), arch.hidden_size * columns),
        Part("self_attention", ("self_attention.in_proj",), arch.linear_conv_kernel_dim * (2 * keys + values)),
        Part("self_attention.rule", ("self_attention",), 4 * values * arch.linear_key_head_dim),
        Part("self_attention.out_proj", ("self_attention.rule",), values * arch.hidden_size),
    )


def _mlp(arch: ArchConfig, prefix: str, width: int, of_router: tuple[str, ...] = ()) -> tuple[Part, ...]:
    """Two layers of inner size `width`; `of_router`: names of the parts that scale the inner activations."""
    fc1, columns = f"{prefix}linear_fc1", 2 if derived.is_gated(arch) else 1
    return (
        Part(fc1, ("pre_mlp_layernorm",), arch.hidden_size * width * columns),
        Part(f"{prefix}linear_fc2", (fc1, *of_router), arch.hidden_size * width),
    )


def _experts(arch: ArchConfig) -> tuple[Part, ...]:
    """Parts of a layer with experts; the experts that a token chooses count as one MLP."""
    norm, shared = ("pre_mlp_layernorm",), arch.moe_shared_expert_intermediate_size
    parts = (
        Part("mlp.router", norm, arch.hidden_size * (arch.num_experts or 0)),
        *_mlp(arch, "mlp.experts.", arch.moe_router_topk * derived.moe_ffn_hidden_size(arch), ("mlp.router",)),
    )
    if shared is not None:
        parts += _mlp(arch, "mlp.shared_experts.", shared)
    if arch.moe_shared_expert_gate:
        parts += (Part("mlp.shared_experts", norm, arch.hidden_size),)
    return parts


def part_of(parameter: str) -> tuple[str, str]:
    """The part that a parameter belongs to, with its prefix, and the last component of the parameter's name. Factors of
    an adapter belong to the part whose output they add to."""
    module, _, name = parameter.rpartition(".")
    return _EXPERT.sub("", module).removesuffix("_adapter"), name


def parameter_names(shape: ModelShape) -> set[str]:
    """Names that the weights and biases of a model's parts can have."""
    of_blocks = {block.prefix + part.name for block in model_blocks(shape) for part in block.parts}
    stacks = {part for part in of_blocks if ".mlp.experts." in part}
    parts = {EMBEDDING, _POSITIONS, *(of_blocks - stacks)}
    for index in range(shape.arch.num_experts or 0):
        parts |= {part.replace(".experts.", f".experts.{index}.") for part in stacks}
    return {f"{part}.{kind}" for part in parts for kind in ("weight", "bias")}


class TrainedParts:
    """The trained parts of a model, by their global names."""

    def __init__(self, shape: ModelShape) -> None:
        self._all, self._num_experts = shape.trained is None, shape.arch.num_experts or 1
        self._weights: Counter[str] = Counter()
        for parameter in shape.trained or ():
            part, name = part_of(parameter)
            self._weights[part] += name in _WEIGHTS
        if shape.is_tied and EMBEDDING in self._weights:
            self._weights[OUTPUT] = self._weights[EMBEDDING]

    def __contains__(self, part: str) -> bool:
        """Whether a parameter of the part is trained, or a factor of its adapters."""
        return self._all or part in self._weights

    @property
    def embedding(self) -> bool:
        """Whether embedded tokens have a gradient."""
        return EMBEDDING in self or _POSITIONS in self

    def share(self, part: str) -> float:
        """Share of a part's weights that are trained; for experts, the share of the weights of all experts."""
        if self._all:
            return 1.0
        return self._weights[part] / (self._num_experts if ".mlp.experts." in part else 1)

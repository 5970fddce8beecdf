"""Model FLOPs of a training step of a GPT, for TFLOP/s and model FLOPs utilization.

Counts only matrix products (2 FLOPs per multiply-add), as in Narayanan et al. 2021, "Efficient Large-Scale Language
Model Training on GPU Clusters", appendix, and in Megatron-LM's `num_floating_point_operations`
(megatron/training/training.py). Recomputation is not counted. All sizes are global, not per rank.
"""

from dataclasses import dataclass

from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.config.schema.run import RunConfig


@dataclass(frozen=True)
class ModelShape:
    """What determines the FLOPs of a GPT."""

    arch: ArchConfig
    vocab_size: int
    """Output size of the output layer, which may be tied to the embedding."""
    output_size: int | None = None
    """Output size of a layer that replaces the output layer, such as a scalar head; None: `vocab_size`."""


def model_shape(config: RunConfig, vocab_size: int) -> ModelShape:
    """The shape of the model of `config` with a vocabulary of `vocab_size` entries."""
    return ModelShape(config.arch, vocab_size, 1 if derived.has_value_head(config) else None)


def forward_flops(shape: ModelShape, num_tokens: float, sum_of_squared_lengths: float, causal: bool = True) -> float:
    """FLOPs of one forward pass over a global batch.

    Args:
        shape: global sizes of the model.
        num_tokens: tokens in the batch, the sum of all sequence lengths.
        sum_of_squared_lengths: sum of squared sequence lengths; for packed sequences, of squared document lengths.
        causal: count S^2 / 2 attention scores per sequence, like Megatron-LM (the exact number is S * (S + 1) / 2).

    Returns:
        2 T h (2 d_q + 2 d_kv) + 4 d_q sum(S^2) [/ 2 when causal] + 2 T h f (2, or 3 when gated) for each layer, plus
        2 T h V, with d_q = heads * channels and d_kv = groups * channels. In a MoE layer, f is topk * expert size plus
        the size of the shared experts, and the router adds 2 T h E (which Megatron-LM omits). With multi-latent
        attention, the projections are its down- and up-projections, and 4 d_q is 2 (d_q + heads * value head size).
        A sliding window is ignored: attention counts as full. A layer with linear attention has no scores; see
        `layer_weights`. A trained layer for multi-token prediction adds a layer, 2 T h 2 h and 2 T h V.
    """
    arch = shape.arch
    prediction_layers = derived.trained_prediction_layers(arch)
    linear = derived.linear_layer_pattern(arch)
    kinds = zip(derived.moe_layer_pattern(arch), linear, strict=True)
    weights = sum(layer_weights(arch, bool(has_experts), bool(is_linear)) for has_experts, is_linear in kinds)
    weights += output_weights(shape) + prediction_layers * prediction_weights(shape)
    scores = 2 * attention_width(arch) * sum_of_squared_lengths * (0.5 if causal else 1.0)
    return 2 * num_tokens * weights + (arch.num_layers - sum(linear) + prediction_layers) * scores


def layer_weights(arch: ArchConfig, has_experts: bool, is_linear: bool = False) -> int:
    """Number of weights of a layer that multiply each token: of the chosen experts in a layer with experts.

    Linear attention counts the products of the rule with its state as well: of the key with the state, of key and
    value, of the query with the state, and the decay, 4 heads * d_k * d_v as in Megatron-LM's formula.
    """
    num_matrices = 3 if derived.is_gated(arch) else 2
    columns = derived.ffn_hidden_size(arch) * num_matrices
    if has_experts:
        shared = arch.moe_shared_expert_intermediate_size or 0
        width = arch.moe_router_topk * derived.moe_ffn_hidden_size(arch) + shared
        columns = width * num_matrices + (arch.num_experts or 0) + arch.moe_shared_expert_gate
    attention = _linear_attention_weights(arch) if is_linear else _attention_weights(arch)
    return attention + arch.hidden_size * columns


def output_weights(shape: ModelShape) -> int:
    """Number of weights of the output layer, or of what replaces it."""
    return shape.arch.hidden_size * (shape.vocab_size if shape.output_size is None else shape.output_size)


def prediction_weights(shape: ModelShape) -> int:
    """Number of weights that a layer for multi-token prediction multiplies with each token: its projection, its
    transformer layer, which is like the model's last one, and the output layer, which is the model's."""
    projection, has_experts = 2 * shape.arch.hidden_size**2, bool(derived.moe_layer_pattern(shape.arch)[-1])
    return projection + layer_weights(shape.arch, has_experts) + output_weights(shape)


def attention_width(arch: ArchConfig) -> int:
    """Multiply-adds of a layer's attention for each query and key: the score, and its product with the value."""
    if not arch.multi_latent_attention:
        return 2 * arch.num_attention_heads * derived.kv_channels(arch)
    return arch.num_attention_heads * (arch.qk_head_dim + arch.qk_pos_emb_head_dim + arch.v_head_dim)


def _linear_attention_weights(arch: ArchConfig) -> int:
    keys = arch.linear_num_key_heads * arch.linear_key_head_dim
    values = arch.linear_num_value_heads * arch.linear_value_head_dim
    projections = arch.hidden_size * (2 * keys + 3 * values + 2 * arch.linear_num_value_heads)
    return projections + arch.linear_conv_kernel_dim * (2 * keys + values) + 4 * values * arch.linear_key_head_dim


def _attention_weights(arch: ArchConfig) -> int:
    """Number of weights in one layer's attention projections."""
    heads, hidden = arch.num_attention_heads, arch.hidden_size
    if not arch.multi_latent_attention:
        columns = (2 + arch.attention_output_gate) * heads + 2 * derived.num_query_groups(arch)
        return hidden * columns * derived.kv_channels(arch)
    query_width, rank = heads * (arch.qk_head_dim + arch.qk_pos_emb_head_dim), arch.q_lora_rank
    queries = hidden * query_width if rank is None else rank * (hidden + query_width)
    down = hidden * (arch.kv_lora_rank + arch.qk_pos_emb_head_dim)
    up = arch.kv_lora_rank * heads * (arch.qk_head_dim + arch.v_head_dim)
    return queries + down + up + heads * arch.v_head_dim * hidden


def training_flops(shape: ModelShape, num_tokens: float, sum_of_squared_lengths: float, causal: bool = True) -> float:
    """FLOPs of one training step over a global batch, 3 * `forward_flops`, with the same arguments.

    The backward pass costs twice the forward pass: each matrix product needs one product per factor for its gradient.
    """
    return 3 * forward_flops(shape, num_tokens, sum_of_squared_lengths, causal)


def tflops_per_device(flops: float, elapsed_seconds: float, num_devices: int) -> float:
    """Model TFLOP/s (1e12 FLOPs per second) per device, from a step's `training_flops` and wall time.

    Returns 0 for an elapsed time of 0 (the clock's resolution is too coarse for the step).
    """
    return flops / elapsed_seconds / num_devices / 1e12 if elapsed_seconds > 0 else 0.0

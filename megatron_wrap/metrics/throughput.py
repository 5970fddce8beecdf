"""Floating-point operations that a training step of a GPT must do, for TFLOP/s and model utilisation.

Only matrix products count (2 per multiply-add), as in Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters", appendix, and in Megatron-LM's `num_floating_point_operations`
(megatron/training/training.py); recomputation is no model work and is left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertShape:
    """The layers with experts in place of the MLP. Sizes are the whole model's, not a rank's part."""

    num_layers: int
    """Layers with experts."""
    num_experts: int
    """Routed experts of a layer: columns of its router."""
    topk: int
    """Experts that a token goes through."""
    ffn_hidden_size: int
    """Width inside one expert; of one of the two halves when gated."""
    shared_ffn_hidden_size: int
    """The same of all shared experts together, which every token goes through; 0: none."""
    shared_gate: bool
    """Whether a product with one column weighs the shared experts' output."""


@dataclass(frozen=True)
class LatentAttentionShape:
    """Multi-latent attention in place of plain projections. Sizes are the whole model's, not a rank's part."""

    q_lora_rank: int | None
    """Width of the queries' latent vector; None: none."""
    kv_lora_rank: int
    """Width of the keys' and values'."""
    qk_head_dim: int
    """Width of a query's and key's head, the rotated part included."""
    qk_pos_emb_head_dim: int
    """Width of the rotated part, which all heads share in the key."""
    v_head_dim: int
    """Width of a value's head."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a GPT that decide its work. Sizes are the whole model's, not a rank's part."""

    num_layers: int
    """Transformer layers."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int
    """Width inside the MLP; of one of the two halves when gated."""
    num_attention_heads: int
    """Query heads."""
    num_query_groups: int
    """Key and value heads; equal to `num_attention_heads` without GQA."""
    kv_channels: int
    """Width of one head."""
    vocab_size: int
    """Columns of the output layer. Tied to the embedding or not is the same work."""
    gated_linear_unit: bool
    """True for SwiGLU and its kin: three matrices in the MLP in place of two."""
    experts: ExpertShape | None = None
    """None: every layer is dense."""
    latent_attention: LatentAttentionShape | None = None
    """None: queries, keys and values of `kv_channels` columns each."""


def forward_flops(shape: ModelShape, num_tokens: float, sum_of_squared_lengths: float, causal: bool = True) -> float:
    """Operations of one forward pass over a (global) batch.

    Args:
        shape: sizes of the whole model.
        num_tokens: tokens of the batch, the sum of the sequences' lengths.
        sum_of_squared_lengths: sum over sequences of length squared; a packed sequence counts by its documents.
        causal: attention over half the square, S^2 / 2 as Megatron-LM counts it (exactly it is S * (S + 1) / 2).

    Returns:
        2 T h (2 d_q + 2 d_kv) + 4 d_q sum(S^2) [/ 2 when causal] + 2 T h f (2, or 3 when gated) for each layer, plus
        2 T h V, with d_q = heads * channels and d_kv = groups * channels. In a layer with experts f is topk of their
        widths and the shared ones', and the router adds 2 T h E (which Megatron-LM leaves out). With multi-latent
        attention the projections are its down- and up-projections, and 4 d_q becomes 2 (d_q + heads * width of values).
        A sliding window is counted as if it were none.
    """
    projections = 2 * num_tokens * _attention_weights(shape)
    core_width = 2 * shape.num_attention_heads * shape.kv_channels
    if shape.latent_attention is not None:
        latent = shape.latent_attention
        core_width = shape.num_attention_heads * (latent.qk_head_dim + latent.v_head_dim)
    core_attention = 2 * core_width * sum_of_squared_lengths * (0.5 if causal else 1.0)
    num_matrices = 3 if shape.gated_linear_unit else 2
    columns = shape.num_layers * shape.ffn_hidden_size * num_matrices
    if shape.experts is not None:
        experts = shape.experts
        width = experts.topk * experts.ffn_hidden_size + experts.shared_ffn_hidden_size
        of_a_layer = width * num_matrices + experts.num_experts + experts.shared_gate
        columns += experts.num_layers * (of_a_layer - shape.ffn_hidden_size * num_matrices)
    columns += shape.vocab_size
    return shape.num_layers * (projections + core_attention) + 2 * num_tokens * shape.hidden_size * columns


def _attention_weights(shape: ModelShape) -> int:
    """Elements of one layer's projections."""
    heads, hidden = shape.num_attention_heads, shape.hidden_size
    if shape.latent_attention is None:
        return hidden * 2 * (heads + shape.num_query_groups) * shape.kv_channels
    latent = shape.latent_attention
    query_width = heads * latent.qk_head_dim
    rank = latent.q_lora_rank
    queries = hidden * query_width if rank is None else rank * (hidden + query_width)
    down = hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    up = latent.kv_lora_rank * heads * (latent.qk_head_dim - latent.qk_pos_emb_head_dim + latent.v_head_dim)
    return queries + down + up + heads * latent.v_head_dim * hidden


def training_flops(shape: ModelShape, num_tokens: float, sum_of_squared_lengths: float, causal: bool = True) -> float:
    """Operations of one step over a (global) batch: 3 * `forward_flops`, whose arguments it takes.

    The backward pass is twice the forward: each product has one for either factor's gradient.
    """
    return 3 * forward_flops(shape, num_tokens, sum_of_squared_lengths, causal)


def sum_of_squares(lengths: Iterable[int]) -> int:
    """Sum over sequences of length squared, for `training_flops`."""
    return sum(length * length for length in lengths)


def tflops_per_device(flops: float, elapsed_seconds: float, num_devices: int) -> float:
    """Model TFLOP/s (1e12 operations a second) of each device, for a step's `training_flops` and wall time.

    A time of 0 gives 0: a clock too coarse to see the step says nothing about its rate.
    """
    return flops / elapsed_seconds / num_devices / 1e12 if elapsed_seconds > 0 else 0.0

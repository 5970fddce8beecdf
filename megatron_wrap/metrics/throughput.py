"""Model FLOPs of a training step of a GPT, for TFLOP/s and model FLOPs utilization.

Counts only matrix products (2 FLOPs per multiply-add), as in Narayanan et al. 2021, "Efficient Large-Scale Language
Model Training on GPU Clusters", appendix, and in Megatron-LM's `num_floating_point_operations`
(megatron/training/training.py). Recomputation is not counted.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ExpertShape:
    """MoE layers. All sizes are global, not per rank."""

    num_layers: int
    """Number of MoE layers."""
    num_experts: int
    """Routed experts per layer."""
    topk: int
    """Routed experts per token."""
    ffn_hidden_size: int
    """Intermediate size of one expert; of one of the two halves if gated."""
    shared_ffn_hidden_size: int
    """Total intermediate size of the shared experts, which process every token; 0: none."""
    shared_gate: bool
    """Whether a linear layer with one output scales the shared experts' output."""


@dataclass(frozen=True)
class LatentAttentionShape:
    """Multi-latent attention. All sizes are global, not per rank."""

    q_lora_rank: int | None
    """Size of the queries' latent vector; None: queries have none."""
    kv_lora_rank: int
    """Size of the latent vector of keys and values."""
    qk_head_dim: int
    """Query and key head size, including the rotary part."""
    qk_pos_emb_head_dim: int
    """Size of the rotary part, which all heads of a key share."""
    v_head_dim: int
    """Value head size."""


@dataclass(frozen=True)
class LinearAttentionShape:
    """Layers with gated delta networks. All sizes are global, not per rank."""

    num_layers: int
    """Number of such layers."""
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int
    """Tokens that the convolution spans."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a GPT that determine its FLOPs. All sizes are global, not per rank."""

    num_layers: int
    """Number of transformer layers."""
    hidden_size: int
    """Size of the residual stream."""
    ffn_hidden_size: int
    """Intermediate size of the MLP; of one of the two halves if gated."""
    num_attention_heads: int
    """Query heads."""
    num_query_groups: int
    """Key and value heads; equal to `num_attention_heads` without GQA."""
    kv_channels: int
    """Size of one head."""
    vocab_size: int
    """Output size of the output layer, which may be tied to the embedding."""
    gated_linear_unit: bool
    """True for SwiGLU and similar: three matrices in the MLP instead of two."""
    output_size: int | None = None
    """Output size of a layer that replaces the output layer, such as a scalar head; None: `vocab_size`."""
    experts: ExpertShape | None = None
    """None: every layer is dense."""
    latent_attention: LatentAttentionShape | None = None
    """None: standard attention with heads of size `kv_channels`."""
    prediction_layers: int = 0
    """Trained layers for multi-token prediction."""
    prediction_experts: bool = False
    """These layers have experts."""
    output_gate: bool = False
    """Whether the output of attention has a gate as wide as the queries."""
    linear_attention: LinearAttentionShape | None = None
    """None: every layer has attention."""


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
    expert_layers = 0 if shape.experts is None else shape.experts.num_layers
    linear_layers = 0 if shape.linear_attention is None else shape.linear_attention.num_layers
    weights = (shape.num_layers - expert_layers) * layer_weights(shape, has_experts=False) + output_weights(shape)
    if expert_layers:
        weights += expert_layers * layer_weights(shape, has_experts=True)
    if linear_layers:
        linear = layer_weights(shape, has_experts=False, is_linear=True)
        weights += linear_layers * (linear - layer_weights(shape, has_experts=False))
    weights += shape.prediction_layers * prediction_weights(shape)
    scores = 2 * attention_width(shape) * sum_of_squared_lengths * (0.5 if causal else 1.0)
    return 2 * num_tokens * weights + (shape.num_layers - linear_layers + shape.prediction_layers) * scores


def layer_weights(shape: ModelShape, has_experts: bool, is_linear: bool = False) -> int:
    """Number of weights of a layer that multiply each token: of the chosen experts in a layer with experts.

    Linear attention counts the products of the rule with its state as well: of the key with the state, of key and
    value, of the query with the state, and the decay, 4 heads * d_k * d_v as in Megatron-LM's formula.
    """
    num_matrices = 3 if shape.gated_linear_unit else 2
    columns = shape.ffn_hidden_size * num_matrices
    if has_experts:
        assert shape.experts is not None, "the model has no experts"
        width = shape.experts.topk * shape.experts.ffn_hidden_size + shape.experts.shared_ffn_hidden_size
        columns = width * num_matrices + shape.experts.num_experts + shape.experts.shared_gate
    attention = _linear_attention_weights(shape) if is_linear else _attention_weights(shape)
    return attention + shape.hidden_size * columns


def output_weights(shape: ModelShape) -> int:
    """Number of weights of the output layer, or of what replaces it."""
    return shape.hidden_size * (shape.vocab_size if shape.output_size is None else shape.output_size)


def prediction_weights(shape: ModelShape) -> int:
    """Number of weights that a layer for multi-token prediction multiplies with each token: its projection, its
    transformer layer and the output layer, which is the model's."""
    projection = 2 * shape.hidden_size**2
    return projection + layer_weights(shape, shape.prediction_experts) + output_weights(shape)


def attention_width(shape: ModelShape) -> int:
    """Multiply-adds of a layer's attention for each query and key: the score, and its product with the value."""
    if shape.latent_attention is None:
        return 2 * shape.num_attention_heads * shape.kv_channels
    return shape.num_attention_heads * (shape.latent_attention.qk_head_dim + shape.latent_attention.v_head_dim)


def _linear_attention_weights(shape: ModelShape) -> int:
    linear = shape.linear_attention
    assert linear is not None, "the model has no linear attention"
    keys = linear.num_key_heads * linear.key_head_dim
    values = linear.num_value_heads * linear.value_head_dim
    projections = shape.hidden_size * (2 * keys + 3 * values + 2 * linear.num_value_heads)
    return projections + linear.conv_kernel_dim * (2 * keys + values) + 4 * values * linear.key_head_dim


def _attention_weights(shape: ModelShape) -> int:
    """Number of weights in one layer's attention projections."""
    heads, hidden = shape.num_attention_heads, shape.hidden_size
    if shape.latent_attention is None:
        return hidden * ((2 + shape.output_gate) * heads + 2 * shape.num_query_groups) * shape.kv_channels
    latent = shape.latent_attention
    query_width = heads * latent.qk_head_dim
    rank = latent.q_lora_rank
    queries = hidden * query_width if rank is None else rank * (hidden + query_width)
    down = hidden * (latent.kv_lora_rank + latent.qk_pos_emb_head_dim)
    up = latent.kv_lora_rank * heads * (latent.qk_head_dim - latent.qk_pos_emb_head_dim + latent.v_head_dim)
    return queries + down + up + heads * latent.v_head_dim * hidden


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

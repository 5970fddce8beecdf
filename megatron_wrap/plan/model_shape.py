"""The sizes of a run's model, from which its FLOPs are computed."""

from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import RunConfig
from megatron_wrap.metrics.throughput import ExpertShape, LatentAttentionShape, LinearAttentionShape, ModelShape


def model_shape(config: RunConfig, vocab_size: int) -> ModelShape:
    """The sizes from which the model's FLOPs are computed."""
    arch = config.arch
    experts = None
    if arch.num_experts is not None:
        experts = ExpertShape(
            num_layers=sum(derived.moe_layer_pattern(arch)),
            num_experts=arch.num_experts,
            topk=arch.moe_router_topk,
            ffn_hidden_size=derived.moe_ffn_hidden_size(arch),
            shared_ffn_hidden_size=arch.moe_shared_expert_intermediate_size or 0,
            shared_gate=arch.moe_shared_expert_gate,
        )
    latent = None
    if arch.multi_latent_attention:
        latent = LatentAttentionShape(
            q_lora_rank=arch.q_lora_rank,
            kv_lora_rank=arch.kv_lora_rank,
            qk_head_dim=arch.qk_head_dim + arch.qk_pos_emb_head_dim,
            qk_pos_emb_head_dim=arch.qk_pos_emb_head_dim,
            v_head_dim=arch.v_head_dim,
        )
    linear, linear_layers = None, sum(derived.linear_layer_pattern(arch))
    if linear_layers:
        linear = LinearAttentionShape(
            num_layers=linear_layers,
            num_key_heads=arch.linear_num_key_heads,
            num_value_heads=arch.linear_num_value_heads,
            key_head_dim=arch.linear_key_head_dim,
            value_head_dim=arch.linear_value_head_dim,
            conv_kernel_dim=arch.linear_conv_kernel_dim,
        )
    return ModelShape(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=derived.ffn_hidden_size(arch),
        num_attention_heads=arch.num_attention_heads,
        num_query_groups=derived.num_query_groups(arch),
        kv_channels=derived.kv_channels(arch),
        vocab_size=vocab_size,
        output_size=1 if derived.has_value_head(config) else None,
        gated_linear_unit=derived.is_gated(arch),
        experts=experts,
        latent_attention=latent,
        output_gate=arch.attention_output_gate,
        linear_attention=linear,
        prediction_layers=derived.trained_prediction_layers(arch),
        prediction_experts=bool(derived.moe_layer_pattern(arch)[-1]),
    )

"""The range of each single number of a configuration."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limit:
    """`name` is section.key; the value lies between `low` and `high`, bounds included unless `above` or `below`."""

    name: str
    low: float
    high: float | None = None
    above: bool = False
    below: bool = False
    null_means_off: bool = False

    def holds(self, value: float) -> bool:
        """Whether the value is in range."""
        low = value > self.low if self.above else value >= self.low
        high = self.high is None or (value < self.high if self.below else value <= self.high)
        return low and high

    def __str__(self) -> str:
        low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
        if self.high is None:
            return low
        return f"{low} and {'below' if self.below else 'at most'} {self.high:g}"


def _at_least(low: float, *names: str, null_means_off: bool = False) -> list[Limit]:
    return [Limit(name, low, null_means_off=null_means_off) for name in names]


def _above_zero(*names: str) -> list[Limit]:
    return [Limit(name, 0, above=True) for name in names]


LIMITS: tuple[Limit, ...] = (
    *_at_least(1, "arch.num_layers", "arch.hidden_size", "arch.ffn_hidden_size", "arch.num_attention_heads"),
    *_at_least(1, "arch.num_query_groups", "arch.kv_channels", "arch.vocab_size", "arch.make_vocab_size_divisible_by"),
    *_at_least(1, "arch.max_position_embeddings", "arch.rope_scaling_factor"),
    *_above_zero("arch.rotary_base", "arch.rotary_seq_len_interpolation_factor", "arch.norm_epsilon"),
    *_above_zero("arch.init_method_std"),
    *_at_least(1, "arch.q_lora_rank", "arch.kv_lora_rank", "arch.qk_head_dim", "arch.qk_pos_emb_head_dim"),
    *_at_least(1, "arch.v_head_dim", "arch.rotary_scaling_factor", "arch.original_max_position_embeddings"),
    *_above_zero("arch.beta_fast", "arch.beta_slow"),
    *_at_least(0, "arch.mscale", "arch.mscale_all_dim"),
    *_at_least(1, "arch.num_experts", "arch.moe_ffn_hidden_size", "arch.moe_shared_expert_intermediate_size"),
    *_at_least(1, "arch.moe_router_topk", "arch.moe_router_num_groups", "arch.moe_router_group_topk"),
    *_at_least(1, "arch.moe_router_group_score_experts"),
    *_above_zero("arch.moe_router_topk_scaling_factor"),
    *_at_least(0, "arch.moe_router_bias_update_rate", "arch.moe_z_loss_coeff"),
    Limit("arch.rotary_percent", 0, 1, above=True),
    Limit("arch.hidden_dropout", 0, 1, below=True),
    Limit("arch.attention_dropout", 0, 1, below=True),
    *_at_least(1, "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"),
    *_at_least(1, "parallel.context_parallel_size", "parallel.expert_model_parallel_size"),
    *_at_least(1, "parallel.expert_tensor_parallel_size", "parallel.num_layers_per_virtual_pipeline_stage"),
    *_at_least(1, "parallel.virtual_pipeline_model_parallel_size", "parallel.decoder_first_pipeline_num_layers"),
    *_at_least(1, "parallel.decoder_last_pipeline_num_layers"),
    *_at_least(1, "train.micro_batch_size", "train.global_batch_size", "train.seq_length", "train.train_iters"),
    *_at_least(0, "train.seed"),
    *_at_least(1, "train.log_interval"),
    *_at_least(1, "train.eval_interval", "train.eval_iters", "train.save_interval", null_means_off=True),
    *_at_least(0, "learning_rate.lr", "learning_rate.min_lr", "learning_rate.lr_warmup_init"),
    *_at_least(0, "learning_rate.lr_warmup_iters"),
    Limit("learning_rate.lr_warmup_fraction", 0, 1, below=True),
    *_at_least(1, "learning_rate.lr_decay_iters", "learning_rate.lr_wsd_decay_iters"),
    *_at_least(0, "optimizer.weight_decay", "optimizer.start_weight_decay", "optimizer.end_weight_decay"),
    *_at_least(0, "optimizer.clip_grad"),
    Limit("optimizer.adam_beta1", 0, 1, below=True),
    Limit("optimizer.adam_beta2", 0, 1, below=True),
    *_above_zero("optimizer.adam_eps"),
    Limit("optimizer.sgd_momentum", 0, 1, below=True),
    *_above_zero("dtype.loss_scale", "dtype.initial_loss_scale", "dtype.min_loss_scale"),
    *_at_least(1, "dtype.loss_scale_window", "dtype.hysteresis"),
    *_at_least(1, "recompute.recompute_num_layers", "ddp.ddp_bucket_size", null_means_off=True),
    *_above_zero("init.distributed_timeout_minutes"),
    *_at_least(1, "data.num_samples"),
    *_at_least(1, "checkpoint.keep", null_means_off=True),
)
"""Every range; a null value is out of it only where the schema refuses null."""

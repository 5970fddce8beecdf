"""What a decoded configuration is: one frozen dataclass for each file or folder of the tree `configs/nest`.

Keys of `megatron_lm` carry Megatron-LM's argument names. The text under a field is what `megatron-wrap explain` prints.
Defaults live in the YAML tree alone. `upstream` holds further fields of Megatron-Core's own dataclass named beside it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class ArchConfig:
    """`megatron_lm.model.arch`: the shape of the model. Beside these keys any field of Megatron-Core's
    `TransformerConfig` may stand."""

    num_layers: int
    """Transformer layers of the whole model."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int | None
    """Inner width of the MLP (of one half of it with swiglu); null: 4 * hidden_size, with swiglu 8/3 of it, down to a
    multiple of 64 (Megatron-LM's rule)."""
    num_attention_heads: int
    """Query heads."""
    num_query_groups: int | None
    """Key and value heads (grouped-query attention); null: as many as query heads."""
    group_query_attention: bool | None
    """Megatron-LM's switch for num_query_groups; null: on where num_query_groups is given."""
    kv_channels: int | None
    """Width of one head; null: hidden_size / num_attention_heads."""
    vocab_size: int | None
    """Entries of the vocabulary before padding; null: the size of the tokenizer of megatron_wrap.data.tokenizer."""
    make_vocab_size_divisible_by: int
    """The embedding is padded to a multiple of this times the tensor-parallel size; padded entries get no
    probability."""
    max_position_embeddings: int | None
    """Longest sequence, in tokens; the number of rows of learned positions; null: train.common.seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"]
    """Learned position table, rotary embedding, or none."""
    rotary_base: float
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float
    """Share of a head's width that is rotated, 0 to 1."""
    rotary_interleaved: bool
    """Rotate neighbouring pairs (GPT-J) instead of halves (Llama)."""
    rotary_seq_len_interpolation_factor: float | None
    """Positions are divided by this (linear scaling); null: 1."""
    use_rope_scaling: bool
    """Llama-3.1 scaling of the low rotary frequencies."""
    rope_scaling_factor: float
    """Factor of Llama-3.1 scaling."""
    untie_embeddings_and_output_weights: bool
    """Separate input embedding and output layer."""
    normalization: Literal["RMSNorm", "LayerNorm"]
    """Kind of normalisation."""
    norm_epsilon: float
    """Added to the variance inside a norm."""
    apply_layernorm_1p: bool
    """Norm weights are stored as weight - 1 (zero-centred)."""
    qk_layernorm: bool
    """Normalise queries and keys per head."""
    swiglu: bool
    """Gated SiLU MLP (Llama); false: GELU (GPT-2) unless squared_relu."""
    squared_relu: bool
    """Squared ReLU in place of GELU."""
    openai_gelu: bool
    """The tanh form of GELU, as GPT-2's published weights use it; false: the exact form."""
    add_bias_linear: bool
    """Biases in all linear layers."""
    add_qkv_bias: bool
    """Biases in the query, key and value projections (Qwen2)."""
    hidden_dropout: float
    """Dropout after attention, MLP and embedding, 0 to 1."""
    attention_dropout: float
    """Dropout on attention probabilities, 0 to 1."""
    init_method_std: float
    """Standard deviation of initial weights; output projections get it divided by sqrt(2 * num_layers)."""
    attention_softmax_in_fp32: bool
    """Softmax of attention in fp32."""
    fp32_residual_connection: bool
    """Residual stream in fp32."""
    window_size: tuple[int, int] | None
    """Sliding window of attention, [before, after] a token's own position, -1: no bound; null: none. transformers'
    sliding_window W (Mistral) is [W - 1, 0]."""
    window_attn_skip_freq: int | tuple[int, ...] | None
    """With window_size, layers without it: each N-th, or a list of 1 (window) and 0 for each layer; null: none."""
    multi_latent_attention: bool
    """Keys and values from a latent vector of width kv_lora_rank (DeepSeek's MLA); the keys below it, to
    mscale_all_dim, mean nothing without it. qk_layernorm then normalises the latents."""
    q_lora_rank: int | None
    """Width of the queries' latent vector; null: queries straight from the residual stream."""
    kv_lora_rank: int
    """Width of the latent vector of keys and values."""
    qk_head_dim: int
    """Width of the part of a query's and key's head without positions."""
    qk_pos_emb_head_dim: int
    """Width of the rotated part of a head."""
    v_head_dim: int
    """Width of a value's head."""
    rope_type: Literal["rope", "yarn"]
    """Rotary frequencies as they are, or scaled by YaRN (arXiv:2309.00071) with the keys below."""
    rotary_scaling_factor: float
    """YaRN: by how much the context grew."""
    original_max_position_embeddings: int
    """YaRN: the context before, tokens."""
    beta_fast: float
    """YaRN: rotations within the original context from which on a frequency is left alone."""
    beta_slow: float
    """YaRN: rotations below which a frequency is divided by the whole factor."""
    mscale: float
    """YaRN: strength of the scaling of the rotated parts with the context's growth."""
    mscale_all_dim: float
    """YaRN: strength of the scaling of all attention scores; 0: none."""
    num_experts: int | None
    """Experts of each mixture-of-experts layer; null: a dense model, for which the moe_ keys mean nothing."""
    moe_layer_freq: int | tuple[int, ...] | str
    """Which layers have experts: each N-th from the first on; or a list of 0 (dense) and 1 for each layer, also written
    as Megatron-LM does: ([0]*3+[1]*58)."""
    moe_ffn_hidden_size: int | None
    """Inner width of one expert (of one half of it with swiglu); null: ffn_hidden_size."""
    moe_shared_expert_intermediate_size: int | None
    """Inner width of all shared experts together, which take every token; null: none."""
    moe_shared_expert_gate: bool
    """Weigh the shared experts' output with a sigmoid gate (Qwen2-MoE)."""
    moe_router_topk: int
    """Experts that a token is sent to."""
    moe_router_score_function: Literal["softmax", "sigmoid"]
    """From the router's logits to scores."""
    moe_router_pre_softmax: bool
    """Softmax over all experts before the choice; the weights of the chosen then sum to less than 1. false: softmax
    over the chosen."""
    moe_router_topk_scaling_factor: float | None
    """The weights of the chosen experts are multiplied by this; null: 1."""
    moe_router_num_groups: int | None
    """Groups of experts for group-limited routing (DeepSeek); null: none."""
    moe_router_group_topk: int | None
    """Groups among which a token's experts are chosen."""
    moe_router_group_score_experts: int | None
    """Groups are ranked by the sum of their this many best scores: 1 in DeepSeek V2, 2 in V3; null: Megatron-Core's
    rule, moe_router_topk / moe_router_group_topk."""
    moe_router_enable_expert_bias: bool
    """A bias per expert, for the choice alone, that moves toward balance after each step (DeepSeek V3); needs sigmoid
    scores."""
    moe_router_bias_update_rate: float
    """Step of that bias."""
    moe_router_dtype: Literal["fp32", "fp64"] | None
    """Precision of the router; null: that of the activations."""
    moe_router_load_balancing_type: (
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
        | tuple[Literal["aux_loss", "seq_aux_loss", "global_aux_loss"], ...]
    )
    """Auxiliary loss over a micro-batch, over each sequence or over the batch so far; a list takes a list of
    coefficients; sinkhorn balances without a loss."""
    moe_aux_loss_coeff: float | tuple[float, ...]
    """Coefficient of the auxiliary loss; 0: none. The metric load_balancing_loss is without it."""
    moe_z_loss_coeff: float | None
    """Coefficient of the router's z-loss; null: none. The metric z_loss is without it."""
    moe_grouped_gemm: bool | None
    """All experts of a process in one grouped product (Transformer Engine); null: where that is used."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"]
    """How tokens reach their experts over the expert-parallel processes."""
    transformer_impl: Literal["auto", "transformer_engine", "torch"]
    """Layers from Transformer Engine, or Megatron-Core's own with torch's scaled_dot_product_attention; auto:
    Transformer Engine on a GPU where it imports, else torch."""
    upstream: Mapping[str, Any]
    """Further fields of `TransformerConfig`, given by name in the YAML."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """`megatron_lm.model.parallel`: how the model is spread over processes; data parallelism takes what is left."""

    tensor_model_parallel_size: int
    """Processes that share each layer's matrices (TP)."""
    pipeline_model_parallel_size: int
    """Pipeline stages (PP)."""
    context_parallel_size: int
    """Processes that share each sequence (CP)."""
    expert_model_parallel_size: int
    """Processes that share the experts of a mixture-of-experts layer (EP)."""
    expert_tensor_parallel_size: int | None
    """Tensor-parallel size inside experts; null: tensor_model_parallel_size."""
    sequence_parallel: bool | None
    """Split norms and dropouts over the sequence among the tensor-parallel processes; null: on where TP > 1."""
    num_layers_per_virtual_pipeline_stage: int | None
    """Layers in each model chunk of an interleaved pipeline (VPP); null: one chunk a stage."""
    virtual_pipeline_model_parallel_size: int | None
    """The same said as chunks per stage; give one of the two."""
    decoder_first_pipeline_num_layers: int | None
    """Layers on the first stage of an uneven split; null: even."""
    decoder_last_pipeline_num_layers: int | None
    """Layers on the last stage of an uneven split; null: even."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """`megatron_lm.train.common`: batches, length of the run, intervals and checkpoints."""

    micro_batch_size: int
    """Samples in one forward pass of one data-parallel replica."""
    global_batch_size: int
    """Samples in one optimizer step over all replicas."""
    rampup_batch_size: tuple[int, int, int] | None
    """[start, increment, samples]: grow the global batch from start by increment over that many samples."""
    seq_length: int
    """Longest sequence a flow may collate, in tokens."""
    train_iters: int
    """Optimizer steps of the whole run, resumed parts included."""
    seed: int
    """Seed of initial weights, data order and dropout."""
    log_interval: int
    """Write a step's line on the console each this many iterations; metric loggers get every step."""
    eval_interval: int | None
    """`wrap.evaluation_due` is true each this many iterations, and before the first; null: never."""
    eval_iters: int | None
    """Global batches taken from each evaluation set; null: the whole set."""
    sample_prompts: list[str] | None
    """Texts that `wrap.evaluate` completes greedily, up to 64 tokens each, and logs; null: none."""
    save: str | None
    """Folder of this run's checkpoints; a run resumes from it when it holds one. null: nothing is saved."""
    save_interval: int | None
    """Save each this many iterations; null: only when wrap.save() is called."""
    load: str | None
    """Folder of a checkpoint to start from; null: initial weights from the seed."""
    finetune: bool
    """Take only the weights of `load`; iteration, optimizer, scheduler and RNG start new."""
    no_load_optim: bool
    """Do not load the optimizer and scheduler."""
    no_load_rng: bool
    """Do not load the states of the random generators."""
    no_save_optim: bool
    """Do not save the optimizer and scheduler (the run cannot resume exactly)."""
    no_save_rng: bool
    """Do not save the states of the random generators."""
    check_for_nan_in_loss_and_grad: bool
    """Stop with an error when the loss or a gradient is not finite, before the weights change."""


@dataclass(frozen=True, kw_only=True)
class LearningRateConfig:
    """`megatron_lm.train.learning-rate`: the schedule, Megatron-Core's `OptimizerParamScheduler`."""

    lr: float
    """Peak learning rate."""
    min_lr: float
    """Floor of the decay."""
    lr_warmup_init: float
    """Learning rate at the first warm-up step."""
    lr_warmup_iters: int
    """Iterations of linear warm-up; give this or lr_warmup_fraction."""
    lr_warmup_fraction: float | None
    """Warm-up as a share of lr_decay_iters, 0 to 1."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"]
    """Shape of the decay."""
    lr_decay_iters: int | None
    """Iterations until min_lr is reached; null: train_iters."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"]
    """Shape of the last phase of WSD."""
    lr_wsd_decay_iters: int | None
    """Length of the last phase of WSD, iterations; needed for WSD."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """`megatron_lm.train.optimizer`. Beside these keys any field of Megatron-Core's `OptimizerConfig` may stand."""

    optimizer: Literal["adam", "sgd"]
    """adam is AdamW (decoupled weight decay), as in Megatron-Core."""
    weight_decay: float
    """Decay of matrices; biases and norm weights have none."""
    start_weight_decay: float | None
    """First value of a weight-decay schedule; null: weight_decay."""
    end_weight_decay: float | None
    """Last value of a weight-decay schedule; null: weight_decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"]
    """Shape of the weight-decay schedule over the run."""
    clip_grad: float
    """Largest global norm of the gradient; 0: no clipping."""
    adam_beta1: float
    """Decay of Adam's first moment."""
    adam_beta2: float
    """Decay of Adam's second moment."""
    adam_eps: float
    """Added to Adam's denominator."""
    sgd_momentum: float
    """Momentum of sgd."""
    use_distributed_optimizer: bool
    """Shard optimizer states over the data-parallel processes (ZeRO-1)."""
    override_opt_param_scheduler: bool
    """On resume take the schedule of the YAML."""
    use_checkpoint_opt_param_scheduler: bool
    """On resume take the schedule of the checkpoint."""
    upstream: Mapping[str, Any]
    """Further fields of `OptimizerConfig`, given by name in the YAML."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """`megatron_lm.train.dtype`: select bf16, fp16 or fp32."""

    bf16: bool
    """Weights and activations in bfloat16, fp32 master weights in the optimizer."""
    fp16: bool
    """Weights and activations in float16 with loss scaling."""
    loss_scale: float | None
    """Fixed loss scale of fp16; null: dynamic."""
    initial_loss_scale: float
    """First dynamic loss scale."""
    min_loss_scale: float
    """Smallest dynamic loss scale."""
    loss_scale_window: int
    """Steps without overflow before the scale grows."""
    hysteresis: int
    """Overflows before the scale shrinks."""


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """`megatron_lm.train.recompute`: activation recomputation; select none, selective or full."""

    recompute_granularity: Literal["selective", "full"] | None
    """selective: the attention core (or recompute_modules); full: whole layers; null: none."""
    recompute_method: Literal["uniform", "block"] | None
    """With full: evenly spaced checkpoints, or the first layers of each stage."""
    recompute_num_layers: int | None
    """With full: layers in a checkpointed unit (uniform) or layers recomputed (block)."""
    recompute_modules: tuple[str, ...] | None
    """With selective: the modules to recompute; null: Megatron-Core's default."""
    distribute_saved_activations: bool
    """With full: split saved activations over the tensor-parallel processes."""


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """`megatron_lm.misc.ddp`: gradient reduction. Beside these keys any field of Megatron-Core's
    `DistributedDataParallelConfig` may stand."""

    accumulate_allreduce_grads_in_fp32: bool
    """Accumulate and reduce gradients in fp32."""
    overlap_grad_reduce: bool
    """Reduce gradients while the backward pass runs."""
    overlap_param_gather: bool
    """Gather updated parameters while the next forward pass runs (distributed optimizer)."""
    ddp_bucket_size: int | None
    """Parameters in one reduction bucket; null: Megatron-Core's default."""
    upstream: Mapping[str, Any]
    """Further fields of `DistributedDataParallelConfig`, given by name in the YAML."""


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """`megatron_wrap.init`: the platform."""

    platform: Literal["auto", "cpu", "cuda"]
    """cuda: GPUs over NCCL; cpu: processes over gloo; auto: cuda where a GPU is present."""
    distributed_timeout_minutes: float
    """A collective that takes longer ends the run, minutes."""


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """`megatron_wrap.logger`: what the program says and where it writes it."""

    output_dir: str | None
    """Folder of metrics.jsonl, TensorBoard and offline wandb files; null: outputs/NAME-OF-THE-YAML."""
    patch_print: bool
    """Builtin print goes to logger.debug_all_ranks until close()."""
    remove_logging: bool
    """Remove the root handlers of Python's logging until close()."""
    ignore_warning: bool
    """Hide FutureWarning and UserWarning until close()."""
    progress_bar: bool
    """A bar with the time left on the terminal of rank 0; never in a pipe."""
    enable_tensorboard: bool
    """Write TensorBoard events."""
    enable_wandb: bool
    """Log to Weights & Biases, online with a key, else offline."""
    wandb_project: str | None
    """Project name; null: megatron-wrap."""
    wandb_name: str | None
    """Name of the run; null: the YAML's name."""
    metric_loggers: tuple[str, ...]
    """Further metric loggers: registered keys or my_package.my_module:MyLogger."""
    add_params_norm_to_metrics: bool
    """Report the norm of all parameters (one more pass over them)."""
    add_num_zeros_in_grad_to_metrics: bool
    """Count zeros in the gradient (one more pass over it)."""
    add_throughput_to_metrics: bool
    """Report tflops and throughput (model TFLOP/s per device)."""
    add_memory_to_metrics: bool
    """Report memory, GiB."""


@dataclass(frozen=True, kw_only=True)
class ProviderConfig:
    """`megatron_wrap.model_provider`: who builds the model."""

    provider_key: str
    """Registered provider, or my_package.my_module:my_provider."""
    show_weight_details: bool
    """Log every parameter with its local shape."""
    hf_path: str | None
    """Hugging Face folder or hub id: architecture from its config.json, first weights from its safetensors, and its
    tokenizer where megatron_wrap.data names none; null: model.arch, and weights from the seed."""
    hf_allow_pickle: bool
    """Read weights of hf_path from pytorch_model.bin where it has no safetensors (torch.load with weights_only)."""
    verify_hf: bool
    """Compare the loaded model with transformers before training, and refuse to train on a difference."""
    options: Mapping[str, Any]
    """The provider's own keys."""


@dataclass(frozen=True, kw_only=True)
class ModelsConfig:
    """`megatron_wrap.models`: models beside the one that is trained."""

    reference: Literal["copy"] | None
    """copy: a frozen copy of the starting policy; what the flow's calculate_outputs makes of it reaches its loss as
    reference_*. null: none."""


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """`megatron_wrap.flow`: the algorithm."""

    flow_key: str
    """Registered flow, or my_package.my_module:MyFlow."""
    options: Mapping[str, Any]
    """The flow's own keys; held against its dataclass `Config`, where it has one, when the flow is imported."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`megatron_wrap.data`: where `wrap.batches()` and `wrap.evaluate()` take samples from when given none."""

    data_key: Literal["none", "jsonl", "mock"]
    """none: the caller gives samples; jsonl: files; mock: numbered empty samples for a flow that makes its own."""
    train: str | None
    """JSON lines file with training samples."""
    validation: Mapping[str, str]
    """Name of an evaluation set -> JSON lines file; a single path is the set named validation."""
    num_samples: int
    """Samples of mock data."""
    shuffle: bool
    """A new order each epoch, a function of the seed; false: the file's order."""
    tokenizer: str | None
    """Hugging Face tokenizer folder."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """`megatron_wrap.checkpoint`: how checkpoints are kept."""

    resume: Literal["auto", "never"]
    """auto: go on from the newest checkpoint in train.common.save; never: refuse when there is one."""
    keep: int | None
    """Newest checkpoints to keep; null: all."""
    export_hf: bool
    """Write a Hugging Face folder `hf_ITERATION` beside the checkpoints at each save."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run, decoded. Field names and the path in the YAML are the same but for the roots."""

    name: str
    """The YAML's file name without its ending."""
    arch: ArchConfig
    parallel: ParallelConfig
    train: TrainConfig
    learning_rate: LearningRateConfig
    optimizer: OptimConfig
    dtype: PrecisionConfig
    recompute: RecomputeConfig
    ddp: DDPConfig
    init: InitConfig
    logger: LoggerConfig
    model_provider: ProviderConfig
    models: ModelsConfig
    flow: FlowConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    resolved: Mapping[str, Any] = field(repr=False)
    """The whole tree as nested plain dictionaries, as it is written beside checkpoints."""
    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Dotted path -> where its value was set, for messages: `configs/run.yaml:7 (override)`."""
    undeclared: frozenset[str] = field(default=frozenset(), repr=False, compare=False)
    """Dotted paths that the view alone sets and no file of the tree: Megatron-Core's fields, a flow's own keys."""


SECTION_PATHS: dict[str, str] = {
    "arch": "megatron_lm.model.arch",
    "parallel": "megatron_lm.model.parallel",
    "train": "megatron_lm.train.common",
    "learning_rate": "megatron_lm.train.learning-rate",
    "optimizer": "megatron_lm.train.optimizer",
    "dtype": "megatron_lm.train.dtype",
    "recompute": "megatron_lm.train.recompute",
    "ddp": "megatron_lm.misc.ddp",
    "init": "megatron_wrap.init",
    "logger": "megatron_wrap.logger",
    "model_provider": "megatron_wrap.model_provider",
    "models": "megatron_wrap.models",
    "flow": "megatron_wrap.flow",
    "data": "megatron_wrap.data",
    "checkpoint": "megatron_wrap.checkpoint",
}
"""Field of `RunConfig` -> dotted path in the tree."""

UPSTREAM: dict[str, str] = {
    "arch": "TransformerConfig",
    "optimizer": "OptimizerConfig",
    "ddp": "DistributedDataParallelConfig",
}
"""Sections that take further keys -> the Megatron-Core dataclass whose fields they are."""

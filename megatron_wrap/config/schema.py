"""What a decoded configuration is: one frozen dataclass for each file or folder of the tree `configs/nest`.

A field is the one place of a key's type, default, range (`key`) and documentation. `make config-docs` writes them into
the tree and into docs/config-reference.md, a test fails where these differ, and `megatron-wrap explain` prints them. A
run must give a key whose field has no default.

Keys of `megatron_lm` have Megatron-LM's argument names. `upstream` contains further fields of Megatron-Core's own
dataclass.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_wrap.config.keys import key
from megatron_wrap.config.second_models import SecondModelConfig
from megatron_wrap.config.sources import SourceConfig


@dataclass(frozen=True, kw_only=True)
class ArchConfig:
    """`megatron_lm.model.arch`: the architecture of the model; the named architectures inherit these keys."""

    num_layers: int = key(at_least=1)
    """Transformer layers of the whole model."""
    hidden_size: int = key(at_least=1)
    """Width of the residual stream."""
    ffn_hidden_size: int | None = key(None, at_least=1)
    """Inner width of the MLP (of one half of it with swiglu); null: 4 * hidden_size, with swiglu 8/3 of it, down to a
    multiple of 64 (Megatron-LM's rule)."""
    num_attention_heads: int = key(at_least=1)
    """Query heads."""
    num_query_groups: int | None = key(None, at_least=1)
    """Key and value heads (grouped-query attention); null: as many as query heads."""
    group_query_attention: bool | None = None
    """Megatron-LM's switch for num_query_groups; null: on where num_query_groups is given."""
    kv_channels: int | None = key(None, at_least=1)
    """Width of one head; null: hidden_size / num_attention_heads."""
    vocab_size: int | None = key(None, at_least=1)
    """Entries of the vocabulary before padding; null: the size of the tokenizer of megatron_wrap.data.tokenizer."""
    make_vocab_size_divisible_by: int = key(128, at_least=1)
    """The embedding is padded to a multiple of this times the tensor-parallel size; padded entries get no
    probability."""
    max_position_embeddings: int | None = key(None, at_least=1)
    """Longest sequence, in tokens; the number of rows of learned positions; null: train.common.seq_length."""
    position_embedding_type: Literal["learned_absolute", "rope", "none"] = "learned_absolute"
    """Learned position table, rotary embedding, or none."""
    rotary_base: float = key(10000.0, above=0)
    """Base of the rotary frequencies (theta)."""
    rotary_percent: float = key(1.0, above=0, at_most=1)
    """Share of a head's width that is rotated."""
    rotary_interleaved: bool = False
    """Rotate neighboring pairs (GPT-J) instead of halves (Llama)."""
    rotary_seq_len_interpolation_factor: float | None = key(None, above=0)
    """Positions are divided by this (linear scaling); null: 1."""
    use_rope_scaling: bool = False
    """Llama-3.1 scaling of the low rotary frequencies."""
    rope_scaling_factor: float = key(8.0, at_least=1)
    """Factor of Llama-3.1 scaling."""
    untie_embeddings_and_output_weights: bool = False
    """Separate input embedding and output layer."""
    normalization: Literal["RMSNorm", "LayerNorm"] = "LayerNorm"
    """Kind of norm."""
    norm_epsilon: float = key(1e-5, above=0)
    """Added to the variance inside a norm."""
    apply_layernorm_1p: bool = False
    """Norm weights are stored as weight - 1 (zero-centered)."""
    qk_layernorm: bool = False
    """Normalize queries and keys per head."""
    swiglu: bool = False
    """Gated SiLU MLP (Llama); false: GELU (GPT-2) unless squared_relu."""
    squared_relu: bool = False
    """Squared ReLU in place of GELU."""
    openai_gelu: bool = False
    """The tanh form of GELU, as GPT-2's published weights use it; false: the exact form."""
    add_bias_linear: bool = True
    """Biases in all linear layers."""
    add_qkv_bias: bool = False
    """Biases in the query, key and value projections (Qwen2)."""
    hidden_dropout: float = key(0.1, at_least=0, below=1)
    """Dropout after attention, MLP and embedding."""
    attention_dropout: float = key(0.1, at_least=0, below=1)
    """Dropout on attention probabilities."""
    init_method_std: float = key(0.02, above=0)
    """Standard deviation of initial weights; output projections get it divided by sqrt(2 * num_layers)."""
    attention_softmax_in_fp32: bool = True
    """Softmax of attention in fp32."""
    fp32_residual_connection: bool = False
    """Residual stream in fp32."""
    window_size: tuple[int, int] | None = None
    """Sliding window of attention, [before, after] a token's own position, -1: no bound; null: none. transformers'
    sliding_window W (Mistral) is [W - 1, 0]."""
    window_attn_skip_freq: int | tuple[int, ...] | None = None
    """With window_size, layers without it: each N-th, or a list of 1 (window) and 0 for each layer; null: none."""
    multi_latent_attention: bool = False
    """Keys and values from a latent vector of width kv_lora_rank (DeepSeek's MLA); without it the keys from q_lora_rank
    to mscale_all_dim have no effect. qk_layernorm then normalizes the latents."""
    q_lora_rank: int | None = key(None, at_least=1)
    """Width of the queries' latent vector; null: queries straight from the residual stream."""
    kv_lora_rank: int = key(512, at_least=1)
    """Width of the latent vector of keys and values."""
    qk_head_dim: int = key(128, at_least=1)
    """Width of the part of a query's and key's head without positions."""
    qk_pos_emb_head_dim: int = key(64, at_least=1)
    """Width of the rotated part of a head."""
    v_head_dim: int = key(128, at_least=1)
    """Width of a value's head."""
    rope_type: Literal["rope", "yarn"] = "rope"
    """Rotary frequencies as they are, or scaled by YaRN (arXiv:2309.00071) with the keys below."""
    rotary_scaling_factor: float = key(40.0, at_least=1)
    """YaRN: by how much the context grew."""
    original_max_position_embeddings: int = key(4096, at_least=1)
    """YaRN: the context before, tokens."""
    beta_fast: float = key(32.0, above=0)
    """YaRN: rotations within the original context from which on a frequency is left alone."""
    beta_slow: float = key(1.0, above=0)
    """YaRN: rotations below which a frequency is divided by the whole factor."""
    mscale: float = key(1.0, at_least=0)
    """YaRN: strength of the scaling of the rotated parts with the context's growth."""
    mscale_all_dim: float = key(0.0, at_least=0)
    """YaRN: strength of the scaling of all attention scores; 0: none."""
    num_experts: int | None = key(None, at_least=1)
    """Experts of each mixture-of-experts layer; null: a dense model, for which the moe_ keys have no effect."""
    moe_layer_freq: int | tuple[int, ...] | str = 1
    """Which layers have experts: each N-th from the first on; or a list of 0 (dense) and 1 for each layer, also written
    as Megatron-LM does: ([0]*3+[1]*58)."""
    moe_ffn_hidden_size: int | None = key(None, at_least=1)
    """Inner width of one expert (of one half of it with swiglu); null: ffn_hidden_size."""
    moe_shared_expert_intermediate_size: int | None = key(None, at_least=1)
    """Inner width of all shared experts together, which take every token; null: none."""
    moe_shared_expert_gate: bool = False
    """Weigh the shared experts' output with a sigmoid gate (Qwen2-MoE)."""
    moe_router_topk: int = key(2, at_least=1)
    """Experts that a token is sent to."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """From the router's logits to scores."""
    moe_router_pre_softmax: bool = False
    """Softmax over all experts before the choice; the weights of the chosen then sum to less than 1. false: softmax
    over the chosen."""
    moe_router_topk_scaling_factor: float | None = key(None, above=0)
    """The weights of the chosen experts are multiplied by this; null: 1."""
    moe_router_num_groups: int | None = key(None, at_least=1)
    """Groups of experts for group-limited routing (DeepSeek); null: none."""
    moe_router_group_topk: int | None = key(None, at_least=1)
    """Groups among which a token's experts are chosen."""
    moe_router_group_score_experts: int | None = key(None, at_least=1)
    """Groups are ranked by the sum of their this many best scores: 1 in DeepSeek V2, 2 in V3; null: Megatron-Core's
    rule, moe_router_topk / moe_router_group_topk."""
    moe_router_enable_expert_bias: bool = False
    """A bias per expert, for the choice alone, that moves toward balance after each step (DeepSeek V3); needs sigmoid
    scores."""
    moe_router_bias_update_rate: float = key(1e-3, at_least=0)
    """Step of that bias."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Precision of the router; null: that of the activations."""
    moe_router_load_balancing_type: (
        Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]
        | tuple[Literal["aux_loss", "seq_aux_loss", "global_aux_loss"], ...]
    ) = "aux_loss"
    """Auxiliary loss over a micro-batch, over each sequence or over the batch so far; a list takes a list of
    coefficients; sinkhorn balances without a loss."""
    moe_aux_loss_coeff: float | tuple[float, ...] = 0.0
    """Coefficient of the auxiliary loss; 0: none. The metric load_balancing_loss is without it."""
    moe_z_loss_coeff: float | None = key(None, at_least=0)
    """Coefficient of the router's z-loss; null: none. The metric z_loss is without it."""
    moe_grouped_gemm: bool | None = None
    """All experts of a process in one grouped product (Transformer Engine); null: where that is used."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens reach their experts over the expert-parallel processes."""
    transformer_impl: Literal["auto", "transformer_engine", "torch"] = "auto"
    """Layers from Transformer Engine, or Megatron-Core's own with torch's scaled_dot_product_attention; auto:
    Transformer Engine on a GPU where it imports, else torch."""
    upstream: Mapping[str, Any]
    """Further fields of `TransformerConfig`, given by name in the YAML."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """`megatron_lm.model.parallel`: how the model is spread over processes; data parallelism takes what is left."""

    tensor_model_parallel_size: int = key(1, at_least=1)
    """Processes that share each layer's matrices (TP)."""
    pipeline_model_parallel_size: int = key(1, at_least=1)
    """Pipeline stages (PP)."""
    context_parallel_size: int = key(1, at_least=1)
    """Processes that share each sequence (CP)."""
    expert_model_parallel_size: int = key(1, at_least=1)
    """Processes that share the experts of a mixture-of-experts layer (EP)."""
    expert_tensor_parallel_size: int | None = key(None, at_least=1)
    """Tensor-parallel size inside experts; null: tensor_model_parallel_size."""
    sequence_parallel: bool | None = None
    """Split norms and dropouts over the sequence among the tensor-parallel processes; null: on where TP > 1."""
    num_layers_per_virtual_pipeline_stage: int | None = key(None, at_least=1)
    """Layers in each model chunk of an interleaved pipeline (VPP); null: one chunk a stage."""
    virtual_pipeline_model_parallel_size: int | None = key(None, at_least=1)
    """The same as chunks per stage; give one of the two."""
    decoder_first_pipeline_num_layers: int | None = key(None, at_least=1)
    """Layers on the first stage of an uneven split; null: even."""
    decoder_last_pipeline_num_layers: int | None = key(None, at_least=1)
    """Layers on the last stage of an uneven split; null: even."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """`megatron_lm.train.common`: batches, length of the run, intervals and checkpoints. A relative path is relative to
    the working directory."""

    micro_batch_size: int = key(at_least=1)
    """Samples in one forward pass of one data-parallel replica."""
    global_batch_size: int = key(at_least=1)
    """Samples in one optimizer step over all replicas."""
    max_tokens_per_micro_batch: int | None = key(None, at_least=1)
    """Cut each batch into micro-batches of at most this many tokens, padding included, with equal work on all replicas,
    instead of micro_batch_size samples each; null: micro_batch_size, and with flow.packing micro_batch_size *
    seq_length tokens."""
    global_batch_tokens: int | None = key(None, at_least=1)
    """wrap.batches() yields batches of about this many tokens instead of global_batch_size samples; null: samples."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """[start, increment, samples]: grow the global batch from start by increment over that many samples; null: no
    ramp."""
    seq_length: int = key(at_least=1)
    """Longest sequence a flow may collate, in tokens."""
    train_iters: int | None = key(None, at_least=1)
    """Optimizer steps of the whole run, resumed parts included; give this, train_samples or train_epochs."""
    train_samples: int | None = key(None, at_least=1)
    """Samples of the whole run, instead of train_iters: the number of steps follows, with a batch size ramp-up as in
    Megatron-LM, and the learning rate takes the keys that end with _samples."""
    train_epochs: float | None = key(None, above=0)
    """Length of the run in epochs of the training data, instead of train_iters: steps, warm-up and decay follow from
    the number of samples, with global_batch_tokens from their lengths."""
    seed: int = key(1234, at_least=0)
    """Seed of initial weights, data order and dropout."""
    log_interval: int = key(1, at_least=1)
    """Write a step's line on the console each this many iterations; metric loggers get every step."""
    eval_interval: int | None = key(None, at_least=1, null_means_off=True)
    """`wrap.evaluation_due` is true each this many iterations, and before the first; null: never."""
    eval_iters: int | None = key(None, at_least=1, null_means_off=True)
    """Global batches taken from each evaluation set; null: the whole set."""
    sample_prompts: list[str] | None = None
    """Texts that `wrap.evaluate` completes greedily, up to 64 tokens each, and logs; null: none."""
    early_stop_patience: int | None = key(None, at_least=1, null_means_off=True)
    """`wrap.fit` ends the run after this many evaluations in a row without a better checkpoint.best_metric; null:
    never."""
    save: str | None = None
    """Folder of this run's checkpoints; a run resumes from it when it holds one. null: nothing is saved."""
    save_interval: int | None = key(None, at_least=1, null_means_off=True)
    """Save each this many iterations; null: only when wrap.save() is called."""
    load: str | None = None
    """Folder of a checkpoint to start from; null: initial weights from the seed."""
    finetune: bool = False
    """Take only the weights of `load`; iteration, optimizer, scheduler and RNG start new."""
    no_load_optim: bool = False
    """Do not load the optimizer and scheduler."""
    no_load_rng: bool = False
    """Do not load the states of the random generators."""
    no_save_optim: bool = False
    """Do not save the optimizer and scheduler (the run cannot resume exactly)."""
    no_save_rng: bool = False
    """Do not save the states of the random generators."""
    check_for_nan_in_loss_and_grad: bool = True
    """Stop with an error when the loss or a gradient is not finite, before the weights change."""


@dataclass(frozen=True, kw_only=True)
class LearningRateConfig:
    """`megatron_lm.train.learning-rate`: the learning-rate schedule (Megatron-Core's `OptimizerParamScheduler`)."""

    lr: float = key(at_least=0)
    """Peak learning rate."""
    min_lr: float = key(0.0, at_least=0)
    """Floor of the decay."""
    lr_warmup_init: float = key(0.0, at_least=0)
    """Learning rate at the first warm-up step."""
    lr_warmup_iters: int = key(0, at_least=0)
    """Iterations of linear warm-up; give this or lr_warmup_fraction."""
    lr_warmup_samples: int = key(0, at_least=0)
    """The same in samples, with train_samples."""
    lr_warmup_fraction: float | None = key(None, at_least=0, below=1)
    """Warm-up as a share of lr_decay_iters; null: lr_warmup_iters."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay."""
    lr_decay_iters: int | None = key(None, at_least=1)
    """Iterations until min_lr is reached; null: train_iters."""
    lr_decay_samples: int | None = key(None, at_least=1)
    """The same in samples, with train_samples; null: train_samples."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the last phase of WSD."""
    lr_wsd_decay_iters: int | None = key(None, at_least=1)
    """Length of the last phase of WSD, iterations; needed for WSD."""
    lr_wsd_decay_samples: int | None = key(None, at_least=1)
    """The same in samples, with train_samples."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """`megatron_lm.train.optimizer`: the optimizer and its schedule of weight decay."""

    optimizer: Literal["adam", "sgd"] = "adam"
    """adam: AdamW (decoupled weight decay); sgd: stochastic gradient descent with momentum."""
    weight_decay: float = key(0.01, at_least=0)
    """Decay of matrices; biases and norm weights have none."""
    start_weight_decay: float | None = key(None, at_least=0)
    """First value of a weight-decay schedule; null: weight_decay."""
    end_weight_decay: float | None = key(None, at_least=0)
    """Last value of a weight-decay schedule; null: weight_decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the weight-decay schedule over the run."""
    clip_grad: float = key(1.0, at_least=0)
    """Largest global norm of the gradient; 0: no clipping."""
    adam_beta1: float = key(0.9, at_least=0, below=1)
    """Decay of Adam's first moment."""
    adam_beta2: float = key(0.999, at_least=0, below=1)
    """Decay of Adam's second moment."""
    adam_eps: float = key(1e-8, above=0)
    """Added to Adam's denominator."""
    sgd_momentum: float = key(0.9, at_least=0, below=1)
    """Momentum of sgd."""
    use_distributed_optimizer: bool | None = None
    """Shard optimizer states over the data- and context-parallel processes (ZeRO-1); null: on GPUs with several of
    them."""
    override_opt_param_scheduler: bool = False
    """On resume take the schedule of the YAML."""
    use_checkpoint_opt_param_scheduler: bool = False
    """On resume take the schedule of the checkpoint."""
    upstream: Mapping[str, Any]
    """Further fields of `OptimizerConfig`, given by name in the YAML."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """`megatron_lm.train.dtype`: half precision and its loss scaling, and FP8; everything is in fp32 unless one of bf16
    and fp16 is true."""

    bf16: bool = False
    """Weights and activations in bfloat16, fp32 master weights in the optimizer."""
    fp16: bool = False
    """Weights and activations in float16 with loss scaling."""
    loss_scale: float | None = key(None, above=0)
    """Fixed loss scale of fp16; null: dynamic."""
    initial_loss_scale: float = key(4294967296.0, above=0)
    """First dynamic loss scale; the default is 2**32."""
    min_loss_scale: float = key(1.0, above=0)
    """Smallest dynamic loss scale."""
    loss_scale_window: int = key(1000, at_least=1)
    """Steps without overflow before the scale grows."""
    hysteresis: int = key(2, at_least=1)
    """Overflows before the scale shrinks."""
    fp8: Literal["hybrid", "e4m3"] | None = None
    """Matrix products of the layers in FP8 (Transformer Engine, with bf16): hybrid has e4m3 forward and e5m2 for
    gradients, e4m3 has it for both; null: none. Embedding, output layer, attention core and norms stay in bf16."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise"] = "delayed"
    """Scales of FP8 tensors: delayed: one for each tensor, from earlier steps; tensorwise: one, from the tensor itself
    (current scaling); blockwise: one for each block of 128 or 128 x 128 values."""
    fp8_param_gather: bool = False
    """Keep the weights of these matrices in FP8 and gather them in FP8; needs the distributed optimizer, which has
    them in fp32."""
    first_last_layers_bf16: bool = False
    """With fp8: the first and the last layers stay in bf16; not with fp8_recipe delayed."""
    num_layers_at_start_in_bf16: int = key(1, at_least=0)
    """With first_last_layers_bf16: the number of first layers."""
    num_layers_at_end_in_bf16: int = key(1, at_least=0)
    """With first_last_layers_bf16: the number of last layers."""


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """`megatron_lm.train.recompute`: activations that are computed again in the backward pass."""

    recompute_granularity: Literal["selective", "full"] | None = None
    """selective: the attention core (or recompute_modules); full: whole layers; null: none."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With full: evenly spaced checkpoints, or the first layers of each stage."""
    recompute_num_layers: int | None = key(None, at_least=1, null_means_off=True)
    """With full: layers in a checkpointed unit (uniform) or layers recomputed (block)."""
    recompute_modules: tuple[str, ...] | None = None
    """With selective: the modules to recompute; null: Megatron-Core's default, [core_attn]."""
    distribute_saved_activations: bool = False
    """With full: split saved activations over the tensor-parallel processes."""


@dataclass(frozen=True, kw_only=True)
class DDPConfig:
    """`megatron_lm.misc.ddp`: gradient reduction over the data-parallel processes."""

    accumulate_allreduce_grads_in_fp32: bool = True
    """Accumulate and reduce gradients in fp32."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients while the backward pass runs; null: on GPUs with data or context parallelism, for the shipped
    model providers."""
    overlap_param_gather: bool | None = None
    """Gather updated parameters while the next forward pass runs; null: with use_distributed_optimizer and
    overlap_grad_reduce."""
    ddp_bucket_size: int | None = key(None, at_least=1, null_means_off=True)
    """Parameters in one bucket of an overlapped reduction; null: 40 million, and at least a million for each data- and
    context-parallel process (Megatron-Core's rule)."""
    upstream: Mapping[str, Any]
    """Further fields of `DistributedDataParallelConfig`, given by name in the YAML."""


@dataclass(frozen=True, kw_only=True)
class InitConfig:
    """`megatron_wrap.init`: the platform."""

    platform: Literal["auto", "cpu", "cuda"] = "auto"
    """cuda: GPUs over NCCL; cpu: processes over gloo; auto: cuda where a GPU is present."""
    distributed_timeout_minutes: float = key(10.0, above=0)
    """A collective that takes longer ends the run, minutes."""


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """`megatron_wrap.logger`: what is reported, and where it is written."""

    output_dir: str | None = None
    """Folder of metrics.jsonl, TensorBoard and offline wandb files; null: outputs/NAME-OF-THE-YAML."""
    patch_print: bool = False
    """Builtin print goes to logger.debug_all_ranks until close()."""
    remove_logging: bool = False
    """Remove the root handlers of Python's logging until close()."""
    ignore_warning: bool = True
    """Hide FutureWarning and UserWarning until close()."""
    progress_bar: bool = True
    """A bar with the remaining time on the terminal of rank 0; never in a pipe."""
    enable_tensorboard: bool = False
    """Write TensorBoard events (docs/report.md)."""
    tensorboard_dir: str | None = None
    """Folder of TensorBoard events, which writes them, as in Megatron-LM; null: with enable_tensorboard, tensorboard in
    the run's output folder."""
    tensorboard_log_interval: int = key(1, at_least=1)
    """Write a step's metrics to TensorBoard each this many iterations; evaluations always."""
    tensorboard_queue_size: int = key(1000, at_least=1)
    """Points that TensorBoard holds back at most before it writes them; it writes at least each 30 seconds."""
    enable_wandb: bool = False
    """Log to Weights & Biases, online with a key, else offline."""
    wandb_project: str | None = None
    """Project of Weights & Biases; null: megatron-wrap."""
    wandb_name: str | None = None
    """Name of the run; null: the YAML's name."""
    metric_loggers: tuple[str, ...] = ()
    """Further metric loggers: registered keys or my_package.my_module:MyLogger."""
    add_params_norm_to_metrics: bool = False
    """Report the norm of all parameters (one more pass over them)."""
    add_num_zeros_in_grad_to_metrics: bool = False
    """Count zeros in the gradient (one more pass over it)."""
    add_throughput_to_metrics: bool = True
    """Report tflops and throughput (model TFLOP/s per device)."""
    add_memory_to_metrics: bool = True
    """Report memory, GiB."""


@dataclass(frozen=True, kw_only=True)
class ProviderConfig:
    """`megatron_wrap.model_provider`: the function that builds the model, and its first weights."""

    provider_key: str = "gpt_model"
    """Registered provider, or my_package.my_module:my_provider."""
    show_weight_details: bool = False
    """Log every parameter with its local shape."""
    hf_path: str | None = None
    """Hugging Face folder or hub id: architecture from its config.json, first weights from its safetensors, and its
    tokenizer where megatron_wrap.data names none; null: model.arch, and weights from the seed."""
    hf_allow_pickle: bool = False
    """Read weights of hf_path from pytorch_model.bin where it has no safetensors (torch.load with weights_only)."""
    verify_hf: bool = False
    """Compare the loaded model with transformers before training, and refuse to train on a difference."""
    options: Mapping[str, Any]
    """The provider's own keys."""


@dataclass(frozen=True, kw_only=True)
class ModelsConfig:
    """`megatron_wrap.models`: models beside the one that is trained."""

    reference: SecondModelConfig | None = key(None, kind="copy, a mapping, or null")  # noqa: RUF009
    """copy: a frozen copy of the starting policy, for flows such as gpt_dpo; its calculate_outputs reach the loss as
    reference_*. A mapping with the keys below: other weights, where they are kept, how they follow the policy, or
    outputs computed before. null: none."""
    teacher: SecondModelConfig | None = key(None, kind="copy, a mapping, or null")  # noqa: RUF009
    """The model that gpt_distill learns from, with the same keys; its outputs reach the loss as teacher_*. A run has a
    reference or a teacher. null: none."""

    @property
    def role(self) -> str:
        """The second model's key, reference or teacher, which is the prefix of its outputs."""
        return "reference" if self.teacher is None else "teacher"

    @property
    def second(self) -> SecondModelConfig | None:
        """The reference or the teacher."""
        return self.reference if self.teacher is None else self.teacher

    @property
    def path(self) -> str:
        """Dotted path of the second model's key in the YAML."""
        return f"{SECTION_PATHS['models']}.{self.role}"


@dataclass(frozen=True, kw_only=True)
class FlowConfig:
    """`megatron_wrap.flow`: the algorithm. Its further keys are the fields of the flow's dataclass `Config`; for a flow
    of your own select custom and write them beside flow_key, under __override__."""

    flow_key: str
    """Registered flow, or my_package.my_module:MyFlow."""
    packing: bool = False
    """Concatenate the sequences of a micro-batch to one row without padding; attention and positions stay within each
    sequence."""
    options: Mapping[str, Any]
    """The flow's own keys; validated against its dataclass `Config`, if it has one, when the flow is imported."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """`megatron_wrap.data`: the samples of `wrap.batches()` and `wrap.evaluate()`. A relative path is relative to the
    working directory."""

    data_key: Literal["none", "dataset", "jsonl", "indexed", "mock"] = "none"
    """none: the caller passes samples; dataset: files, folders or hub ids, for which jsonl is another name; indexed:
    windows of Megatron's .bin and .idx files, for gpt_pretrain; mock: numbered empty samples for a flow that generates
    its own."""
    train: tuple[SourceConfig, ...] = key((), kind="a path, a source's mapping, a list of these, or null")
    """Training samples: a file, folder or hub id, a source with the keys below, or a list of sources, the mixture of
    which is the training set; null: none."""
    validation: Mapping[str, tuple[SourceConfig, ...]] = key(
        {}, kind="a path, a mapping from names to paths or sources, or null"
    )
    """Path of the evaluation set `validation`, or name of each set -> its path, source or list of sources; null:
    none."""
    on_bad_sample: Literal["error", "skip"] = "error"
    """A row that cannot be read or encoded: stop and name file and row, or leave it out and count it."""
    num_workers: int = key(1, at_least=0)
    """Processes on each replica that read, tokenize and collate ahead of the training step; 0: in the step itself."""
    prefetch_batches: int = key(2, at_least=1)
    """Global batches that are prepared ahead."""
    shuffle_buffer: int = key(1000, at_least=1)
    """Samples of a streaming source that are shuffled together, block by block."""
    cache_dir: str | None = None
    """Folder of tokenized samples, kept by data, tokenizer and template; null: none are kept. With indexed the folder
    of its indices; null: `cache` beside the first prefix."""
    packing_window: int = key(1024, at_least=1)
    """Samples that are packed together where flow.packing is true; more fill the packs better and mix less."""
    num_samples: int = key(1024, at_least=1)
    """Samples of mock data."""
    shuffle: bool = True
    """A new order each epoch, a function of the seed; false: the file's order."""
    tokenizer: str | None = None
    """Hugging Face tokenizer folder; null: that of model_provider.hf_path, if any."""
    split: str | None = None
    """indexed: shares of the documents of each prefix for training, validation and test, such as 949,50,1; null: all
    documents of train are trained on, and validation has prefixes of its own."""
    mock_data: bool = False
    """indexed: Megatron-Core's generated documents instead of train."""
    eod_token: int | None = key(None, at_least=0)
    """indexed: id of the token that ends a document; null: the tokenizer's eos token."""
    eod_mask_loss: bool = False
    """indexed: no loss where the input is the end of a document."""
    reset_position_ids: bool = False
    """indexed: positions begin at 0 in each document."""
    reset_attention_mask: bool = False
    """indexed: tokens attend only to their own document; needs flow.packing."""
    index_samples: int | None = key(None, at_least=1)
    """indexed: windows that the training index is built for, on which their order depends; null: those of the run. A
    run that continues another one with another length needs the same number; behind it the windows come again."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """`megatron_wrap.checkpoint`: resuming, and what is kept."""

    resume: Literal["auto", "never"] = "auto"
    """auto: resume from the newest checkpoint in train.common.save; never: refuse to start where there is one."""
    keep: int | None = key(None, at_least=1, null_means_off=True)
    """Newest checkpoints to keep, besides the best one by best_metric; null: all."""
    best_metric: str | None = None
    """Metric of an evaluation set, SET/METRIC such as validation/loss, by which `wrap.fit` finds the best checkpoint,
    saves and keeps it; null: none."""
    best_metric_mode: Literal["min", "max"] = "min"
    """Whether the smallest or the largest value of best_metric is the best."""
    export_hf: bool = False
    """Write a Hugging Face folder `hf_ITERATION` beside the checkpoints at each save."""


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """`megatron_wrap.profile`: steps whose time is recorded and divided among kinds of work (docs/profiling.md)."""

    steps: tuple[int, ...] = ()
    """Iterations to profile, such as [10, 11, 12]; the first one of a run is 1."""
    output_dir: str | None = None
    """Folder of the traces and tables; null: `profile` in the run's output folder."""
    memory_snapshot: bool = True
    """Also record the allocations of the step before, on GPUs, for https://pytorch.org/memory_viz."""


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
    profile: ProfileConfig
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
    "profile": "megatron_wrap.profile",
}
"""Field of `RunConfig` -> dotted path in the tree."""

UPSTREAM: dict[str, str] = {
    "arch": "TransformerConfig",
    "optimizer": "OptimizerConfig",
    "ddp": "DistributedDataParallelConfig",
}
"""Sections that take further keys -> the Megatron-Core dataclass whose fields they are."""

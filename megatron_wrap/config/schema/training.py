"""The sections of training: batches and length, learning rate, optimizer, precision, recomputation, DDP."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megatron_wrap.config.schema.keys import key


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """`megatron_lm.train.common`: batches, length of the run, intervals and checkpoints. A relative path is relative to
    the working directory."""

    micro_batch_size: int = key(at_least=1)
    """Samples in one forward pass of one data-parallel replica."""
    global_batch_size: int = key(at_least=1)
    """Samples in one optimizer step over all replicas."""
    max_tokens_per_micro_batch: int | None = key(None, at_least=1)
    """Split each batch into micro-batches of at most N tokens, padding included, with equal work on all replicas,
    instead of micro_batch_size samples each; null: micro_batch_size, and with flow.packing micro_batch_size *
    seq_length tokens."""
    global_batch_tokens: int | None = key(None, at_least=1)
    """wrap.batches() yields batches of about N tokens instead of global_batch_size samples; null: samples."""
    rampup_batch_size: tuple[int, int, int] | None = None
    """[start, increment, samples]: increase the global batch from start in steps of increment over that many samples;
    null: constant."""
    seq_length: int = key(at_least=1)
    """Longest sequence a flow may collate, in tokens."""
    train_iters: int | None = key(None, at_least=1)
    """Optimizer steps of the whole run, resumed parts included; set this, train_samples or train_epochs."""
    train_samples: int | None = key(None, at_least=1)
    """Samples of the whole run, instead of train_iters; the number of steps follows, with a batch size ramp-up as in
    Megatron-LM, and the learning rate uses the keys that end with _samples."""
    train_epochs: float | None = key(None, above=0)
    """Length of the run in epochs of the training data, instead of train_iters: the number of samples, or with
    global_batch_tokens their lengths, determine steps, warm-up and decay."""
    seed: int = key(1234, at_least=0)
    """Seed of initial weights, data order and dropout."""
    log_interval: int = key(1, at_least=1)
    """Print a step's metrics on the console every N iterations; metric loggers get every step."""
    eval_interval: int | None = key(None, at_least=1, null_means_off=True)
    """`wrap.evaluation_due` is true every N iterations, and before the first; null: never."""
    eval_iters: int | None = key(None, at_least=1, null_means_off=True)
    """Global batches taken from each evaluation set; null: the whole set."""
    sample_prompts: list[str | list[dict[str, Any]]] | None = None
    """Prompts that `wrap.evaluate` completes greedily, up to 64 tokens each, and logs: texts, or lists of messages such
    as [{role: user, content: Hello}], which are rendered with the chat template. null: none."""
    early_stop_patience: int | None = key(None, at_least=1, null_means_off=True)
    """`wrap.fit` ends the run after N evaluations in a row without a better checkpoint.best_metric; null: never."""
    stop_after_minutes: float | None = key(None, above=0, null_means_off=True)
    """Save and end the run, with exit code 0, after the first step that ends this long after its model was built; null:
    no limit."""
    stop_within_seconds: float | None = key(None, above=0, null_means_off=True)
    """After a signal, `megatron-wrap train` kills processes that have not saved and ended within N seconds; null: it
    waits for them."""
    stop_before_slurm_end_minutes: float | None = key(5.0, at_least=0, null_means_off=True)
    """In a Slurm job whose end is known (SLURM_JOB_END_TIME), save and end the run that long before it, with exit code
    75; it must cover a step and a save. null: train until Slurm ends the job."""
    save: str | None = None
    """Folder of this run's checkpoints, also s3://, gs:// or hf:// (docs/checkpoints.md); a run resumes from the
    newest. null: nothing is saved."""
    save_interval: int | None = key(None, at_least=1, null_means_off=True)
    """Save every N iterations; null: only when wrap.save() is called."""
    load: str | None = None
    """Folder of a checkpoint to start from, also s3://, gs:// or hf://; null: initial weights from the seed."""
    finetune: bool = False
    """Load only the weights of `load`; iteration, optimizer, schedules and random generators begin again."""
    no_load_optim: bool = False
    """Do not load the optimizer and the learning-rate schedule."""
    no_load_rng: bool = False
    """Do not load the states of the random generators."""
    no_save_optim: bool = False
    """Do not save the optimizer and the learning-rate schedule (the run cannot resume exactly)."""
    no_save_rng: bool = False
    """Do not save the states of the random generators."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that are not trained, such as [model.embed_tokens, "model.layers.[0-3].*"]: names of
    Hugging Face, or of Megatron-Core with global layer numbers (decoder.layers.0.mlp.linear_fc1.weight), with *, ? and
    [...]; the name of a module stands for all of its parameters. []: all are trained."""
    neftune_noise_alpha: float | None = key(None, above=0, null_means_off=True)
    """Add uniform noise between -a and a, a = alpha / sqrt(L * hidden_size) for a sequence of L tokens, to the
    embeddings in training (NEFTune, arXiv:2310.05914); 5 is usual. null: none."""
    router_replay: Literal["disabled", "R2", "R3"] = "disabled"
    """Training routes each token to the experts in its sample's routed_experts. R2: those of the policy's own forward
    pass, which wrap.forward then returns. R3: those of the rollout engine, also in wrap.forward (arXiv:2510.11370)."""
    check_for_nan_in_loss_and_grad: bool = True
    """Refuse a step whose loss or gradient is not finite, before the weights change; megatron_wrap.bad_steps defines
    what follows."""
    check_weight_hash_across_dp_replicas_interval: int | None = key(None, at_least=1, null_means_off=True)
    """Every N iterations, compare checksums of the weights of all processes that have copies of the same ones, and end
    the run before a save if copies differ; null: never."""


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
    """Iterations of linear warm-up; set this or lr_warmup_fraction."""
    lr_warmup_samples: int = key(0, at_least=0)
    """Samples of linear warm-up, with train_samples."""
    lr_warmup_fraction: float | None = key(None, at_least=0, below=1)
    """Warm-up as a share of lr_decay_iters; null: lr_warmup_iters."""
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = "linear"
    """Shape of the decay."""
    lr_decay_iters: int | None = key(None, at_least=1)
    """Iterations until min_lr is reached; null: train_iters."""
    lr_decay_samples: int | None = key(None, at_least=1)
    """Samples until min_lr is reached, with train_samples; null: train_samples."""
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = "exponential"
    """Shape of the last phase of WSD."""
    lr_wsd_decay_iters: int | None = key(None, at_least=1)
    """Iterations of the last phase of WSD; needed for WSD."""
    lr_wsd_decay_samples: int | None = key(None, at_least=1)
    """Samples of the last phase of WSD, with train_samples."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """`megatron_lm.train.optimizer`: the optimizer and its weight-decay schedule."""

    optimizer: Literal["adam", "sgd", "muon"] = "adam"
    """adam: AdamW (decoupled weight decay); sgd: stochastic gradient descent with momentum; muon: Muon for the matrices
    of the layers, AdamW for embedding, output layer, norms and biases."""
    weight_decay: float = key(0.01, at_least=0)
    """Weight decay of matrices; biases and norm weights have none."""
    start_weight_decay: float | None = key(None, at_least=0)
    """First value of a weight-decay schedule; null: weight_decay."""
    end_weight_decay: float | None = key(None, at_least=0)
    """Last value of a weight-decay schedule; null: weight_decay."""
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the weight-decay schedule over the run."""
    clip_grad: float = key(1.0, at_least=0)
    """Largest global norm of the gradient; 0: no clipping."""
    fused_clipping: bool | None = None
    """Adam multiplies the gradients by the clipping factor as it reads them, on GPUs by a kernel of this package
    (without Triton by torch), which also writes the model's weights in half precision; false: clipping reads and writes
    all gradients before. null: true on GPUs with Triton."""
    adam_beta1: float = key(0.9, at_least=0, below=1)
    """Decay of Adam's first moment."""
    adam_beta2: float = key(0.999, at_least=0, below=1)
    """Decay of Adam's second moment."""
    adam_eps: float = key(1e-8, above=0)
    """Term that is added to Adam's denominator."""
    sgd_momentum: float = key(0.9, at_least=0, below=1)
    """Momentum of sgd."""
    muon_momentum: float = key(0.95, at_least=0, below=1)
    """Momentum of muon."""
    muon_nesterov: bool = True
    """Nesterov's momentum in muon."""
    muon_num_ns_steps: int = key(5, at_least=1, below=100)
    """Steps of muon's Newton-Schulz iteration."""
    muon_adjust_lr_fn: Literal["original", "match_rms_adamw"] = "match_rms_adamw"
    """Factor of muon's learning rate for a matrix [A, B], as in torch.optim.Muon: original: sqrt(max(1, A / B));
    match_rms_adamw: 0.2 sqrt(max(A, B)), so that lr and weight_decay of AdamW also suit muon."""
    muon_split_qkv: bool = True
    """Orthogonalize the projections of queries, keys and values separately; false: as one matrix."""
    muon_ns_dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of muon's iteration; torch.optim.Muon has bf16."""
    use_precision_aware_optimizer: bool = False
    """Keep moments, gradients and main weights in the dtypes below; needs Transformer Engine's Adam and
    use_distributed_optimizer."""
    exp_avg_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """Dtype of Adam's first moment."""
    exp_avg_sq_dtype: Literal["fp32", "fp16", "bf16", "fp8"] = "fp32"
    """Dtype of Adam's second moment."""
    main_grads_dtype: Literal["fp32", "bf16"] = "fp32"
    """Dtype of the gradients that Adam reads; bf16 needs ddp.accumulate_allreduce_grads_in_fp32 false."""
    main_params_dtype: Literal["fp32", "fp16"] = "fp32"
    """Dtype of the main weights; fp16 with a scale for each tensor."""
    use_distributed_optimizer: bool | None = None
    """Shard optimizer states over the data- and context-parallel processes (ZeRO-1); null: on GPUs with several
    of them."""
    override_opt_param_scheduler: bool = False
    """On resume, use the schedule of the YAML."""
    use_checkpoint_opt_param_scheduler: bool = False
    """On resume, use the schedule of the checkpoint."""
    upstream: Mapping[str, Any]
    """Further fields of `OptimizerConfig`, by name."""


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """`megatron_lm.train.dtype`: half precision with its loss scaling, and FP8; fp32 unless bf16 or fp16 is true."""

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
    """Matmuls of the layers in FP8 (Transformer Engine, with bf16): hybrid uses e4m3 forward and e5m2 for gradients,
    e4m3 uses e4m3 for both; null: none. Embedding, output layer, attention core and norms stay in bf16."""
    fp8_recipe: Literal["delayed", "tensorwise", "blockwise"] = "delayed"
    """Scales of FP8 tensors: delayed: one per tensor, from earlier steps; tensorwise: one per tensor, from its current
    values; blockwise: one per block of 128 or 128 x 128 values."""
    fp8_param_gather: bool = False
    """Store and gather the weights of the FP8 matmuls in FP8; needs the distributed optimizer, which stores them in
    fp32."""
    first_last_layers_bf16: bool = False
    """With fp8: the first and the last layers stay in bf16; not with fp8_recipe delayed."""
    num_layers_at_start_in_bf16: int = key(1, at_least=0)
    """With first_last_layers_bf16: number of first layers in bf16."""
    num_layers_at_end_in_bf16: int = key(1, at_least=0)
    """With first_last_layers_bf16: number of last layers in bf16."""


@dataclass(frozen=True, kw_only=True)
class RecomputeConfig:
    """`megatron_lm.train.recompute`: activations that the backward pass computes again."""

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
    """Reduce gradients during the backward pass; null: on GPUs with data or context parallelism, for the shipped
    model providers."""
    overlap_param_gather: bool | None = None
    """Gather updated parameters during the next forward pass; null: with use_distributed_optimizer and
    overlap_grad_reduce."""
    ddp_bucket_size: int | None = key(None, at_least=1, null_means_off=True)
    """Number of parameters in one bucket of an overlapped reduction; null: 40 million, or a million per data- and
    context-parallel process if that is more (Megatron-Core's rule)."""
    upstream: Mapping[str, Any]
    """Further fields of `DistributedDataParallelConfig`, by name."""

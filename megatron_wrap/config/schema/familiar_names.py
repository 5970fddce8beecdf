"""Arguments of transformers, trl and axolotl, and our key for each: for messages about unknown keys and for
docs/familiar-names.md.

`tests/unit/config/schema/test_familiar_names.py` verifies that every key exists, and that no field of the installed
trl's SFTConfig, DPOConfig and GRPOConfig is missing.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from megatron_wrap.errors import did_you_mean

_ARCH, _PARALLEL = "megatron_lm.model.arch", "megatron_lm.model.parallel"
_TRAIN, _RATE, _OPTIMIZER = "megatron_lm.train.common", "megatron_lm.train.learning-rate", "megatron_lm.train.optimizer"
_DTYPE, _RECOMPUTE, _DDP = "megatron_lm.train.dtype", "megatron_lm.train.recompute", "megatron_lm.misc.ddp"
_INIT, _LOGGER, _MODEL = "megatron_wrap.init", "megatron_wrap.logger", "megatron_wrap.model_provider"
_REFERENCE, _FLOW, _DATA = "megatron_wrap.models.reference", "megatron_wrap.flow", "megatron_wrap.data"
_CHECKPOINT = "megatron_wrap.checkpoint"


class Counterpart(NamedTuple):
    """What a familiar name is here."""

    key: str | None
    """Dotted path of our key; None: there is none."""
    note: str = ""
    """How values or units differ; without a key, the reason."""


def _none(reason: str, *names: str) -> dict[str, Counterpart]:
    return dict.fromkeys(names, Counterpart(None, reason))


def _same_named(path: str, note: str, *names: str) -> dict[str, Counterpart]:
    return {name: Counterpart(f"{path}.{name}", note) for name in names}


_ACCUMULATION = (
    "global_batch_size = micro_batch_size * accumulation steps * data-parallel size, whatever the number of processes"
)
_PER_DEVICE = f"samples of one forward pass of one replica; {_ACCUMULATION}"
_ALL_LAYERS = "full for all layers, selective for the attention core"
_NO_QUANTIZATION = "frozen weights of an adapter are quantized by megatron_wrap.adapter.base_weights alone"
_ADAPTER = "megatron_wrap.adapter"
_NO_ADAPTER_OPTION = "of adapters only what docs/adapters.md lists is supported"
_SHARDS = "true shards optimizer states (ZeRO-1); keys of megatron_lm.model.parallel split weights and activations"
_METRICS_ONLY = "an evaluation reduces metrics on the processes and gathers no predictions"
_TRAIN_COMMAND = "megatron-wrap train trains; evaluations are made if there are data.validation and eval_interval"
_EVERY_N = "an interval in iterations; null: never"
_HUB_UPLOAD = "call wrap.push_to_hub(repo_id, folder) after training"
_CALLER_SAMPLES = "the caller makes the rollouts and passes them to wrap.train (docs/policy.md)"
_ENGINE = "an argument of the inference engine that the caller starts (docs/policy.md)"
_NO_TRACKIO = "write a logger and name it in megatron_wrap.logger.metric_loggers"
_CUSTOM_LOGGER = "name a logger of your own, my_package.my_module:MyLogger"
_SOURCE = "a key of a source's mapping"
_ATTENTION = "auto: Transformer Engine where it is installed, else torch's scaled_dot_product_attention"

TRANSFORMERS: Mapping[str, Counterpart] = {
    # length and batches
    "per_device_train_batch_size": Counterpart(f"{_TRAIN}.micro_batch_size", _PER_DEVICE),
    "per_device_eval_batch_size": Counterpart(f"{_TRAIN}.micro_batch_size", "the same for training and evaluation"),
    "gradient_accumulation_steps": Counterpart(f"{_TRAIN}.global_batch_size", _ACCUMULATION),
    "num_train_epochs": Counterpart(f"{_TRAIN}.train_epochs", "instead of train_iters"),
    "max_steps": Counterpart(f"{_TRAIN}.train_iters", "null where transformers has -1"),
    **_none(
        "micro_batch_size is not searched; max_tokens_per_micro_batch bounds a micro-batch by its tokens",
        "auto_find_batch_size",
    ),
    # optimizer and schedule
    "learning_rate": Counterpart(f"{_RATE}.lr"),
    "lr_scheduler_type": Counterpart(
        f"{_RATE}.lr_decay_style", "constant, linear, cosine, inverse-square-root or WSD; warm-up has its own keys"
    ),
    "lr_scheduler_kwargs": Counterpart(f"{_RATE}.min_lr", "each option is a key, such as lr_wsd_decay_iters for WSD"),
    "warmup_steps": Counterpart(f"{_RATE}.lr_warmup_iters", "a share of the run is lr_warmup_fraction"),
    "warmup_ratio": Counterpart(f"{_RATE}.lr_warmup_fraction"),
    "optim": Counterpart(f"{_OPTIMIZER}.optimizer", "adam (with decoupled weight decay: AdamW) or sgd"),
    "optim_args": Counterpart(f"{_OPTIMIZER}.optimizer", "each option is a key beside it"),
    **_none("GaLore and APOLLO are not supported", "optim_target_modules"),
    **_same_named(_OPTIMIZER, "", "weight_decay", "adam_beta1", "adam_beta2"),
    "adam_epsilon": Counterpart(f"{_OPTIMIZER}.adam_eps"),
    "max_grad_norm": Counterpart(f"{_OPTIMIZER}.clip_grad"),
    **_none("the loss is always a mean over the whole step, on all devices", "average_tokens_across_devices"),
    # precision, memory and speed
    "bf16": Counterpart(f"{_DTYPE}.bf16", "dtype: {__select__: bf16}, the default; fp32 for neither"),
    "fp16": Counterpart(f"{_DTYPE}.fp16", "dtype: {__select__: fp16}"),
    **_none("an evaluation has the precision of the training", "bf16_full_eval", "fp16_full_eval"),
    **_none("fp32 is computed without TF32", "tf32"),
    "gradient_checkpointing": Counterpart(f"{_RECOMPUTE}.__select__", _ALL_LAYERS),
    "activation_checkpointing": Counterpart(f"{_RECOMPUTE}.__select__", _ALL_LAYERS),
    "gradient_checkpointing_kwargs": Counterpart(f"{_RECOMPUTE}.recompute_num_layers", "with recompute_method"),
    "activation_checkpointing_kwargs": Counterpart(f"{_RECOMPUTE}.recompute_num_layers", "with recompute_method"),
    **_none(
        "models are not compiled; fused kernels are chosen by what is installed",
        *("torch_compile", "torch_compile_backend", "torch_compile_mode"),
    ),
    **_none("Liger's kernels are used where they are installed", "use_liger_kernel", "liger_kernel_config"),
    **_none("training uses no key-value cache", "use_cache"),
    **_none("the allocator's cache is kept", "torch_empty_cache_steps"),
    # logs
    "logging_strategy": Counterpart(f"{_TRAIN}.log_interval", "of the console, in iterations"),
    "logging_steps": Counterpart(
        f"{_TRAIN}.log_interval", "of the console, in iterations; metric loggers get every step"
    ),
    **_none("metric loggers get every step", "logging_first_step"),
    **_none("global rank 0 logs", "log_on_each_node"),
    "logging_nan_inf_filter": Counterpart(
        f"{_TRAIN}.check_for_nan_in_loss_and_grad", "true: training ends before such a step changes the weights"
    ),
    **_none("consumed_tokens is always reported", "include_num_input_tokens_seen"),
    **_none("set the environment variable CONSOLE_LOG_LEVEL", "log_level", "log_level_replica"),
    "disable_tqdm": Counterpart(f"{_LOGGER}.progress_bar", "the opposite value"),
    "report_to": Counterpart(
        f"{_LOGGER}.enable_wandb", "or enable_tensorboard; metrics.jsonl is always written; metric_loggers adds others"
    ),
    "run_name": Counterpart(f"{_LOGGER}.wandb_name", "null: the name of the YAML"),
    "project": Counterpart(f"{_LOGGER}.wandb_project"),
    **_none(_NO_TRACKIO, "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
    "skip_memory_metrics": Counterpart(f"{_LOGGER}.add_memory_to_metrics", "the opposite value"),
    # evaluation
    "eval_strategy": Counterpart(f"{_TRAIN}.eval_interval", _EVERY_N),
    "evaluation_strategy": Counterpart(f"{_TRAIN}.eval_interval", _EVERY_N),
    "eval_steps": Counterpart(f"{_TRAIN}.eval_interval", "in iterations"),
    "eval_on_start": Counterpart(f"{_TRAIN}.eval_interval", "with it, there is always an evaluation before the start"),
    **_none("evaluations begin with the first iteration", "eval_delay"),
    **_none(
        _METRICS_ONLY,
        *("prediction_loss_only", "eval_do_concat_batches", "eval_use_gather_object", "eval_accumulation_steps"),
        *("include_for_metrics", "batch_eval_metrics"),
    ),
    **_none(_TRAIN_COMMAND, "do_train", "do_eval", "do_predict"),
    # checkpoints
    "output_dir": Counterpart(f"{_TRAIN}.save", f"of checkpoints; metrics are in {_LOGGER}.output_dir"),
    "overwrite_output_dir": Counterpart(f"{_CHECKPOINT}.resume", "auto or never; nothing is overwritten"),
    "save_strategy": Counterpart(f"{_TRAIN}.save_interval", _EVERY_N),
    "save_steps": Counterpart(f"{_TRAIN}.save_interval", "in iterations"),
    "save_total_limit": Counterpart(f"{_CHECKPOINT}.keep", "the best one by best_metric is kept in addition"),
    "save_only_model": Counterpart(f"{_TRAIN}.no_save_optim"),
    **_none("all processes save their parts to one shared folder", "save_on_each_node"),
    **_none("Hugging Face folders are always safetensors", "save_safetensors"),
    **_none("save_interval determines when a checkpoint is saved", "enable_jit_checkpoint"),
    "resume_from_checkpoint": Counterpart(
        f"{_CHECKPOINT}.resume",
        "auto, the default: from the newest in train.common.save; another run's checkpoint is train.common.load",
    ),
    "load_best_model_at_end": Counterpart(
        f"{_CHECKPOINT}.best_metric", "the best checkpoint is kept; the weights at the end are those of the last step"
    ),
    "metric_for_best_model": Counterpart(f"{_CHECKPOINT}.best_metric", "SET/METRIC, such as validation/loss"),
    "greater_is_better": Counterpart(f"{_CHECKPOINT}.best_metric_mode", "max for true, min for false"),
    **_none("a run resumes with the sample after the last one", "ignore_data_skip"),
    **_none("there are no callbacks: the training loop is your program", "restore_callback_states_from_checkpoint"),
    **_none(
        _HUB_UPLOAD,
        *("push_to_hub", "hub_model_id", "hub_strategy", "hub_token", "hub_private_repo", "hub_always_push"),
        "hub_revision",
    ),
    # data
    **_same_named(_TRAIN, "", "seed"),
    "data_seed": Counterpart(f"{_TRAIN}.seed", "one seed for weights, data order and dropout"),
    **_none("the last batch of an epoch is completed from the next epoch", "dataloader_drop_last"),
    "dataloader_num_workers": Counterpart(f"{_DATA}.num_workers"),
    "dataloader_prefetch_factor": Counterpart(f"{_DATA}.prefetch_batches", "global batches, not batches of a worker"),
    **_none(
        "the loader decides; the order of samples is exact",
        *("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_multiprocessing_context"),
        "dataloader_in_order",
    ),
    "train_sampling_strategy": Counterpart(
        f"{_DATA}.shuffle",
        "false: sequential; instead of group_by_length, max_tokens_per_micro_batch of train.common balances the work",
    ),
    "group_by_length": Counterpart(
        f"{_TRAIN}.max_tokens_per_micro_batch", "a number of tokens; micro-batches then have equal work"
    ),
    **_none("lengths are counted, and stored in data.cache_dir", "length_column_name"),
    **_none("columns that the flow does not read are ignored", "remove_unused_columns"),
    **_none("the flow defines which fields are labels", "label_names"),
    "label_smoothing_factor": Counterpart(f"{_FLOW}.label_smoothing", "of gpt_sft and gpt_pretrain"),
    **_same_named(_TRAIN, "", "neftune_noise_alpha"),
    # processes
    "use_cpu": Counterpart(f"{_INIT}.platform", "cpu for true"),
    "ddp_backend": Counterpart(f"{_INIT}.platform", "cuda (NCCL) or cpu (gloo)"),
    "ddp_timeout": Counterpart(f"{_INIT}.distributed_timeout_minutes", "minutes, not seconds"),
    "ddp_bucket_cap_mb": Counterpart(f"{_DDP}.ddp_bucket_size", "a number of parameters, not megabytes"),
    **_none("every parameter is in the graph", "ddp_find_unused_parameters", "ddp_static_graph"),
    **_none("models have no buffers to broadcast", "ddp_broadcast_buffers"),
    "fsdp": Counterpart(f"{_OPTIMIZER}.use_distributed_optimizer", _SHARDS),
    "fsdp_config": Counterpart(f"{_OPTIMIZER}.use_distributed_optimizer", _SHARDS),
    "deepspeed": Counterpart(f"{_OPTIMIZER}.use_distributed_optimizer", _SHARDS),
    "parallelism_config": Counterpart(
        f"{_PARALLEL}.tensor_model_parallel_size", "each parallel size is a key of this section"
    ),
    **_none("Accelerate is not used", "accelerator_config"),
    **_none("the launcher sets it", "local_rank"),
    "full_determinism": Counterpart(f"{_ARCH}.deterministic_mode"),
    "debug": Counterpart(f"{_TRAIN}.check_for_nan_in_loss_and_grad", "true, the default"),
}
"""Arguments of transformers' TrainingArguments, those of earlier versions included."""

TRL: Mapping[str, Counterpart] = {
    # models
    "model_name_or_path": Counterpart(f"{_MODEL}.hf_path"),
    "model_init_kwargs": Counterpart(f"{_MODEL}.hf_path", "dtype, attention and dropout have keys of their own"),
    **_none("no code of a hub's repository is run", "trust_remote_code"),
    **_none("download that revision, and give its folder as model_provider.hf_path", "model_revision"),
    "dtype": Counterpart(f"{_DTYPE}.__select__", "bf16, fp16 or fp32"),
    "torch_dtype": Counterpart(f"{_DTYPE}.__select__", "bf16, fp16 or fp32"),
    "attn_implementation": Counterpart(f"{_ARCH}.transformer_impl", _ATTENTION),
    "router_aux_loss_coef": Counterpart(f"{_ARCH}.moe_aux_loss_coeff"),
    "disable_dropout": Counterpart(f"{_ARCH}.hidden_dropout", "0.0, and attention_dropout: 0.0, for true"),
    "use_peft": Counterpart(f"{_ADAPTER}.__select__", "lora"),
    "peft_config": Counterpart(f"{_ADAPTER}.__select__", "lora, with peft's names of the options"),
    "lora_r": Counterpart(f"{_ADAPTER}.r"),
    "lora_alpha": Counterpart(f"{_ADAPTER}.lora_alpha"),
    "lora_dropout": Counterpart(f"{_ADAPTER}.lora_dropout"),
    "lora_target_modules": Counterpart(f"{_ADAPTER}.target_modules"),
    "lora_modules_to_save": Counterpart(f"{_ADAPTER}.modules_to_save"),
    "use_rslora": Counterpart(f"{_ADAPTER}.use_rslora"),
    "ref_adapter_name": Counterpart("megatron_wrap.models.reference", "base: the policy without its adapter"),
    **_none("the flow determines it", "lora_task_type"),
    **_none(_NO_ADAPTER_OPTION, "use_dora"),
    "lora_target_parameters": Counterpart(f"{_ADAPTER}.target_parameters"),
    "load_in_4bit": Counterpart(f"{_ADAPTER}.base_weights", "nf4 for true"),
    "load_in_8bit": Counterpart(f"{_ADAPTER}.base_weights", "fp8 for true, not int8"),
    "bnb_4bit_quant_type": Counterpart(f"{_ADAPTER}.base_weights", "nf4; there is no fp4"),
    **_none("nf4 quantizes its scales, and is stored as bytes", "use_bnb_nested_quant", "bnb_4bit_quant_storage"),
    # data
    "dataset_name": Counterpart(f"{_DATA}.train", "a hub id, folder or file"),
    "dataset_config": Counterpart(f"{_DATA}.train.subset", _SOURCE),
    "dataset_train_split": Counterpart(f"{_DATA}.train.split", _SOURCE),
    "dataset_test_split": Counterpart(f"{_DATA}.validation", "{NAME: {path: ..., split: test}}"),
    "dataset_streaming": Counterpart(f"{_DATA}.train.streaming", _SOURCE),
    **_none("Megatron-Core's own gradient reduction ignores buffers", "ignore_bias_buffers"),
    "chat_template_path": Counterpart(f"{_DATA}.tokenizer", "a folder whose tokenizer has the template"),
    "dataset_text_field": Counterpart(f"{_DATA}.train.columns", "{text: NAME}, a key of a source's mapping"),
    **_none("samples that have input_ids are not prepared", "dataset_kwargs"),
    "dataset_num_proc": Counterpart(f"{_DATA}.num_workers", "processes that tokenize during training"),
    **_none("the tokenizer defines it; edit its folder", "eos_token", "pad_token"),
    "max_length": Counterpart(
        f"{_TRAIN}.seq_length",
        "in tokens; flow.truncation applies to longer samples; a source's max_length drops them",
    ),
    "max_seq_length": Counterpart(f"{_TRAIN}.seq_length", "in tokens; longer samples follow flow.truncation"),
    "max_prompt_length": Counterpart(f"{_TRAIN}.seq_length", "of prompt and answer together"),
    "truncation_mode": Counterpart(f"{_FLOW}.truncation", "right for keep_start, left for keep_end"),
    "shuffle_dataset": Counterpart(f"{_DATA}.shuffle"),
    **_same_named(_FLOW, "", "packing"),
    "packing_strategy": Counterpart(
        f"{_DATA}.packing_window", "always best-fit decreasing, among this number of samples; no sequence is cut"
    ),
    "padding_free": Counterpart(f"{_FLOW}.packing", "rows without padding"),
    "eval_packing": Counterpart(f"{_FLOW}.packing", "the same for training and evaluation"),
    **_none("sequences are padded to what the layout and FP8 need", "pad_to_multiple_of"),
    "completion_only_loss": Counterpart(f"{_FLOW}.loss_on", "a completion is what is trained; all for false, in chats"),
    "assistant_only_loss": Counterpart(f"{_FLOW}.loss_on", "assistant for true, all for false"),
    **_none("recompute activations instead, with megatron_lm.train.recompute", "activation_offloading"),
    # losses
    "loss_type": Counterpart(f"{_FLOW}.loss_type", "of the selected flow; gpt_sft has one loss, trl's nll"),
    **_same_named(
        _FLOW,
        "of gpt_dpo",
        *("loss_weights", "f_divergence_type", "f_alpha_divergence_coef", "use_weighting", "discopop_tau", "rpo_alpha"),
    ),
    "ld_alpha": Counterpart(f"{_FLOW}.ld_alpha", "of gpt_dpo; 1.0 for null"),
    "label_smoothing": Counterpart(
        f"{_FLOW}.label_smoothing",
        "of gpt_dpo and gpt_cpo, whose labels of pairs it swaps; of gpt_sft it smooths tokens",
    ),
    "beta": Counterpart(f"{_FLOW}.beta", "of the selected flow"),
    **_same_named(_FLOW, "of gpt_kto", "desirable_weight", "undesirable_weight"),
    **_same_named(_FLOW, "of gpt_cpo", "cpo_alpha", "simpo_gamma"),
    **_same_named(_FLOW, "of gpt_reward; 0.0 for null", "center_rewards_coefficient"),
    **_none("select gpt_cpo or gpt_orpo, which need no reference model", "reference_free"),
    "precompute_ref_log_probs": Counterpart(
        f"{_REFERENCE}.precomputed", "the folder that megatron-wrap precompute writes before training"
    ),
    "precompute_ref_batch_size": Counterpart(f"{_TRAIN}.micro_batch_size", "of megatron-wrap precompute"),
    "sync_ref_model": Counterpart(f"{_REFERENCE}.refresh_interval", "a number of iterations; null: never"),
    "ref_model_sync_steps": Counterpart(f"{_REFERENCE}.refresh_interval"),
    "ref_model_mixup_alpha": Counterpart(f"{_REFERENCE}.ema_decay", "1 - ref_model_mixup_alpha"),
    # policies
    **_same_named(
        _FLOW,
        "of gpt_grpo",
        *("epsilon", "epsilon_high", "delta", "sapo_temperature_pos", "sapo_temperature_neg", "scale_rewards"),
        *("importance_sampling_level", "mask_truncated_completions", "top_entropy_quantile", "use_bias_correction_kl"),
    ),
    "entropy_coef": Counterpart(f"{_FLOW}.entropy_coefficient", "of gpt_grpo"),
    "max_completion_length": Counterpart(
        f"{_FLOW}.max_completion_length", "of gpt_grpo, for dr_grpo alone; the limit of a rollout is its caller's"
    ),
    "vllm_importance_sampling_correction": Counterpart(f"{_FLOW}.rollout_correction", "of gpt_grpo; none for false"),
    "vllm_importance_sampling_mode": Counterpart(f"{_FLOW}.rollout_correction", "of gpt_grpo; none by default"),
    "vllm_importance_sampling_clip_max": Counterpart(f"{_FLOW}.rollout_correction_threshold", "of gpt_grpo"),
    "vllm_importance_sampling_clip_min": Counterpart(f"{_FLOW}.rollout_correction_minimum", "of gpt_grpo; 0 for null"),
    "vllm_importance_sampling_cap": Counterpart(f"{_FLOW}.rollout_correction_threshold", "of gpt_grpo"),
    **_none(
        "the entropy bonus has the constant factor entropy_coefficient",
        *("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"),
    ),
    **_none(
        "gpt_grpo has no vespo; its loss_type lists the losses",
        *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
    ),
    **_none("rollout_correction of gpt_grpo masks by ratio, not by divergence", "off_policy_mask_threshold"),
    **_none("logits are in the precision of the model, their losses in fp32", "cast_lm_head_to_fp32"),
    **_none("call wrap.train that often with these samples, with old_log_probs (docs/policy.md)", "num_iterations"),
    **_none(
        "the caller computes each sample's reward (docs/policy.md)",
        "reward_weights",
        "multi_objective_aggregation",
    ),
    **_none(
        "an argument of wrap.generate, n for the number of answers, or of your engine (docs/policy.md)",
        *("num_generations", "num_generations_eval", "temperature", "top_p", "top_k"),
    ),
    **_none("wrap.generate has temperature, top_p and top_k", "min_p", "repetition_penalty", "generation_kwargs"),
    **_none(
        _CALLER_SAMPLES,
        *("generation_batch_size", "steps_per_generation", "chat_template_kwargs", "max_tool_calling_iterations"),
    ),
    **_none(
        "wrap.generate has its own cache and batches",
        *("cache_implementation", "use_transformers_continuous_batching", "transformers_continuous_batching_config"),
        *("use_transformers_paged", "ds3_gather_for_generation"),
    ),
    **_none(
        _ENGINE,
        *("use_vllm", "vllm_mode", "vllm_model_impl", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex"),
        *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
        *("vllm_gpu_memory_utilization", "vllm_max_model_length", "vllm_tensor_parallel_size"),
    ),
    "log_completions": Counterpart(
        f"{_TRAIN}.sample_prompts", "texts that each evaluation completes and logs; rollouts are the caller's to log"
    ),
    **_none(
        "the caller logs its rollouts",
        *("num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo", "log_multimodal"),
    ),
}
"""Arguments of trl's SFTConfig, DPOConfig, GRPOConfig and other configurations, ModelConfig and ScriptArguments."""

AXOLOTL: Mapping[str, Counterpart] = {
    # model
    "base_model": Counterpart(f"{_MODEL}.hf_path"),
    "base_model_config": Counterpart(f"{_MODEL}.hf_path"),
    "tokenizer_config": Counterpart(f"{_DATA}.tokenizer", "null: the tokenizer of model_provider.hf_path"),
    **_none("the tokenizer's folder defines it", "tokenizer_use_fast", "tokenizer_legacy", "special_tokens", "tokens"),
    "chat_template": Counterpart(f"{_DATA}.tokenizer", "a folder whose tokenizer has the template"),
    "chat_template_jinja": Counterpart(f"{_DATA}.tokenizer", "a folder whose tokenizer has the template"),
    **_none("model_provider.hf_path and the config.json there determine it", "tokenizer_type", "processor_type"),
    "reward_model": Counterpart(f"{_FLOW}.__select__", "gpt_reward"),
    "rl": Counterpart(f"{_FLOW}.__select__", "gpt_dpo, gpt_kto, gpt_cpo, gpt_orpo or gpt_grpo"),
    "sdp_attention": Counterpart(f"{_ARCH}.transformer_impl", _ATTENTION),
    "flash_attention": Counterpart(f"{_ARCH}.transformer_impl", _ATTENTION),
    "flex_attention": Counterpart(f"{_ARCH}.transformer_impl", _ATTENTION),
    "xformers_attention": Counterpart(f"{_ARCH}.transformer_impl", _ATTENTION),
    "eager_attention": Counterpart(f"{_ARCH}.transformer_impl", _ATTENTION),
    # data
    "datasets": Counterpart(f"{_DATA}.train", "a path, a source's mapping, or a list of these"),
    "test_datasets": Counterpart(f"{_DATA}.validation", "{NAME: source}"),
    "pretraining_dataset": Counterpart(f"{_DATA}.train", "with streaming: true in its mapping"),
    "val_set_size": Counterpart(
        f"{_DATA}.validation", "samples of their own, such as {path: ..., split: 'train[95%:]'} beside train[:95%]"
    ),
    "dataset_prepared_path": Counterpart(f"{_DATA}.cache_dir"),
    "dataset_processes": Counterpart(f"{_DATA}.num_workers", "processes that tokenize during training"),
    "shuffle_merged_datasets": Counterpart(f"{_DATA}.shuffle"),
    "streaming": Counterpart(f"{_DATA}.train.streaming", _SOURCE),
    "sequence_len": Counterpart(f"{_TRAIN}.seq_length"),
    "excess_length_strategy": Counterpart(f"{_FLOW}.truncation", "right for truncate; refuse for raise"),
    "sample_packing": Counterpart(f"{_FLOW}.packing"),
    "eval_sample_packing": Counterpart(f"{_FLOW}.packing", "the same for training and evaluation"),
    "sample_packing_group_size": Counterpart(f"{_DATA}.packing_window"),
    "batch_flattening": Counterpart(f"{_FLOW}.packing"),
    "pad_to_sequence_len": Counterpart(f"{_FLOW}.collate_type", "fixed_length for true, variable_length for false"),
    "train_on_inputs": Counterpart(f"{_FLOW}.loss_on", "all for true, assistant for false"),
    "roles_to_train": Counterpart(f"{_FLOW}.loss_on", "assistant, last_assistant or all"),
    # training
    "num_epochs": Counterpart(f"{_TRAIN}.train_epochs", "instead of train_iters"),
    "eval_batch_size": Counterpart(f"{_TRAIN}.micro_batch_size", "the same for training and evaluation"),
    "batch_size": Counterpart(f"{_TRAIN}.global_batch_size", _ACCUMULATION),
    "lr_scheduler": Counterpart(f"{_RATE}.lr_decay_style", "constant, linear, cosine, inverse-square-root or WSD"),
    "cosine_min_lr_ratio": Counterpart(f"{_RATE}.min_lr", "a learning rate, not a share of lr"),
    "evals_per_epoch": Counterpart(f"{_TRAIN}.eval_interval", "in iterations"),
    "saves_per_epoch": Counterpart(f"{_TRAIN}.save_interval", "in iterations"),
    "early_stopping_patience": Counterpart(
        f"{_TRAIN}.early_stop_patience", f"a number of evaluations; needs {_CHECKPOINT}.best_metric"
    ),
    "auto_resume_from_checkpoints": Counterpart(f"{_CHECKPOINT}.resume", "auto, the default"),
    "unfrozen_parameters": Counterpart(f"{_TRAIN}.freeze", "patterns of those that are not trained"),
    "noisy_embedding_alpha": Counterpart(f"{_TRAIN}.neftune_noise_alpha"),
    "dpo_beta": Counterpart(f"{_FLOW}.beta", "of gpt_dpo"),
    "rl_beta": Counterpart(f"{_FLOW}.beta", "of the selected flow"),
    "dpo_loss_type": Counterpart(f"{_FLOW}.loss_type", "of gpt_dpo"),
    "dpo_loss_weights": Counterpart(f"{_FLOW}.loss_weights", "of gpt_dpo"),
    "dpo_label_smoothing": Counterpart(f"{_FLOW}.label_smoothing", "of gpt_dpo"),
    "dpo_use_weighting": Counterpart(f"{_FLOW}.use_weighting", "of gpt_dpo"),
    "dpo_padding_free": Counterpart(f"{_FLOW}.packing"),
    "orpo_alpha": Counterpart(f"{_FLOW}.beta", "of gpt_orpo"),
    "kto_desirable_weight": Counterpart(f"{_FLOW}.desirable_weight", "of gpt_kto"),
    "kto_undesirable_weight": Counterpart(f"{_FLOW}.undesirable_weight", "of gpt_kto"),
    "use_tensorboard": Counterpart(f"{_LOGGER}.enable_tensorboard"),
    "use_wandb": Counterpart(f"{_LOGGER}.enable_wandb"),
    **_none(
        "set WANDB_ENTITY, WANDB_RUN_ID or WANDB_MODE in the environment", "wandb_entity", "wandb_run_id", "wandb_mode"
    ),
    **_none("gradients and checkpoints are not logged to wandb", "wandb_watch", "wandb_log_model"),
    "use_mlflow": Counterpart(f"{_LOGGER}.metric_loggers", _CUSTOM_LOGGER),
    "use_comet": Counterpart(f"{_LOGGER}.metric_loggers", _CUSTOM_LOGGER),
    "use_trackio": Counterpart(f"{_LOGGER}.metric_loggers", _CUSTOM_LOGGER),
    "profiler_steps": Counterpart("megatron_wrap.profile.steps", "a list of iterations"),
    "profiler_steps_start": Counterpart("megatron_wrap.profile.steps", "a list of iterations"),
    # precision and processes
    **{name: Counterpart(f"{_DTYPE}.__select__", "bf16, fp16 or fp32") for name in ("bfloat16", "float16", "float32")},
    "tensor_parallel_size": Counterpart(f"{_PARALLEL}.tensor_model_parallel_size"),
    "sequence_parallel_degree": Counterpart(f"{_PARALLEL}.context_parallel_size"),
    "dp_shard_size": Counterpart(f"{_OPTIMIZER}.use_distributed_optimizer", _SHARDS),
    **_none("replicas use all processes that are left", "dp_replicate_size", "world_size", "device_map"),
    "adapter": Counterpart(f"{_ADAPTER}.__select__", "lora; for qlora with base_weights: nf4"),
    "lora_model_dir": Counterpart(f"{_ADAPTER}.path"),
    "lora_target_linear": Counterpart(f"{_ADAPTER}.target_modules", "all-linear for true"),
    "peft_use_rslora": Counterpart(f"{_ADAPTER}.use_rslora"),
    "loraplus_lr_ratio": Counterpart(f"{_ADAPTER}.loraplus_lr_ratio"),
    **_none("the model's family determines it", "lora_fan_in_fan_out"),
    **_none("export with `megatron-wrap export-hf --merge`", "merge_lora"),
    **_none(_NO_ADAPTER_OPTION, "relora", "peft", "peft_use_dora"),
    **_none(_NO_QUANTIZATION, "gptq", "bnb_config_kwargs"),
    **_none("an algorithm of your own is a flow (docs/flow-contract.md)", "plugins", "trainer_cls"),
}
"""Keys of axolotl's YAML that are no arguments of transformers and trl."""

LIBRARIES: Mapping[str, Mapping[str, Counterpart]] = {"transformers": TRANSFORMERS, "trl": TRL, "axolotl": AXOLOTL}


def familiar_advice(path: str) -> str | None:
    """What the argument of another library is here that the dotted `path` ends with, for a message about the path.

    None: another name, or the path itself is our key. Case, and `-` or `_`, do not count.
    """
    folded = path.rpartition(".")[2].casefold().lstrip("-").replace("-", "_")
    for library, names in LIBRARIES.items():
        counterpart = names.get(folded)
        if counterpart is not None and counterpart.key != path:
            owner = "transformers'" if library == "transformers" else f"{library}'s"
            if counterpart.key is None:
                return f"{owner} {folded} has no counterpart here: {counterpart.note}"
            note = f" ({counterpart.note})" if counterpart.note else ""
            return f"{owner} {folded} is {counterpart.key} here{note}"
    return None


def unknown_key_hint(path: str, known: Iterable[str], further: Iterable[str] = ()) -> str:
    """The ending of a message about the unknown key at the dotted `path`: an argument of another library, or else the
    closest of the known names."""
    advice = familiar_advice(path)
    return did_you_mean(path.rpartition(".")[2], known, further) if advice is None else f"; {advice}"

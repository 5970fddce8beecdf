"""Contradictions within batches, optimizer, precision, recomputation and intervals."""

from megatron_wrap.config.checks.adapter import check_adapter
from megatron_wrap.config.checks.data import check_data
from megatron_wrap.config.checks.fp8 import check_fp8
from megatron_wrap.config.checks.located_errors import check_each, neighbours, refuse
from megatron_wrap.config.checks.schedule import check_learning_rate, check_length, check_schedule
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig
from megatron_wrap.errors import did_you_mean

_OTHER_MUON = {
    **dict.fromkeys(("muon_scale_mode", "muon_extra_scale_factor"), "muon_adjust_lr_fn"),
    "muon_use_nesterov": "muon_nesterov",
    "muon_fp32_matmul_prec": "muon_ns_dtype",
    **dict.fromkeys(("muon_tp_mode", "muon_coefficient_type", "muon_scalar_optimizer"), "muon_num_ns_steps"),
}
"""Keys of Megatron-Core's Muon -> the closest key of this package's Muon."""


def check_training(config: RunConfig) -> None:
    """Check `megatron_lm.train`, with what it requires of data and checkpoints.

    Raises:
        ConfigError, LayoutError: values that contradict each other; see `check_each`.
    """
    known_length = config.train.train_iters is not None or config.train.train_samples is not None
    schedule = (check_length, _check_batches, check_learning_rate, *((check_schedule,) if known_length else ()))
    numerics = (_check_optimizer, _check_precision, check_fp8, _check_recompute)
    samples = (check_data, _check_intervals, _check_best_metric, _check_models, check_adapter, _check_profile)
    check_each(config, (*schedule, *numerics, *samples))


def _check_batches(config: RunConfig) -> None:
    train = config.train
    micro, final = train.micro_batch_size, train.global_batch_size
    if final % micro:
        refuse(
            config,
            ["train.global_batch_size", "train.micro_batch_size"],
            f"global_batch_size {final} is not divisible by micro_batch_size {micro}; nearest legal sizes: "
            f"{neighbours(final, micro)}",
        )
    _check_token_budgets(config)
    _check_pairing(config)
    if train.rampup_batch_size is None:
        return
    # Megatron-Core's num_microbatches_calculator.py divides by the number of increments
    start, increment, samples = train.rampup_batch_size
    key = ["train.rampup_batch_size"]
    if start < 1 or increment < 1 or samples < 1:
        refuse(config, key, f"[start, increment, samples] must be positive, not {list(train.rampup_batch_size)}")
    if start >= final or (final - start) % increment:
        refuse(
            config,
            key,
            f"steps of {increment} from {start} do not reach global_batch_size {final}; the difference "
            f"{final - start} must be a positive multiple of the increment",
        )
    if start % micro or increment % micro:
        refuse(config, key, f"start {start} and increment {increment} must be multiples of micro_batch_size {micro}")


def _check_pairing(config: RunConfig) -> None:
    """Check the pairing of samples for gpt_kto; trl's KTOTrainer refuses a batch of one sample as well."""
    train = config.train
    smallest = min([train.global_batch_size, *(train.rampup_batch_size or ())[:1]])
    if config.flow.flow_key != "gpt_kto" or config.flow.options.get("loss_type", "kto") != "kto" or smallest > 1:
        return
    if train.global_batch_tokens is None:
        refuse(
            config,
            ["train.global_batch_size" if train.global_batch_size == smallest else "train.rampup_batch_size"],
            f"gpt_kto estimates a KL divergence from each prompt with the answer of another sample of the step, and a "
            f"step of {smallest} has none; set it to at least 2, or megatron_wrap.flow.loss_type: apo_zero_unpaired",
        )


def _check_token_budgets(config: RunConfig) -> None:
    train, budget, packing = config.train, config.train.max_tokens_per_micro_batch, config.flow.packing
    if budget is not None and budget < train.seq_length:
        refuse(
            config,
            ["train.max_tokens_per_micro_batch", "train.seq_length"],
            f"max_tokens_per_micro_batch {budget} is less than seq_length {train.seq_length}, so a sample may not fit; "
            f"set it to at least {train.seq_length}",
        )
    if budget is not None and not packing and config.parallel.pipeline_model_parallel_size > 1:
        refuse(
            config,
            ["train.max_tokens_per_micro_batch", "parallel.pipeline_model_parallel_size"],
            "a pipeline needs micro-batches of equal shape, which max_tokens_per_micro_batch forms only with packing; "
            "set megatron_wrap.flow.packing: true, or max_tokens_per_micro_batch: null",
        )
    per_sequence = "seq_aux_loss" in derived.load_balancing_coefficients(config.arch)
    if packing and config.arch.num_experts is not None and per_sequence:
        refuse(
            config,
            ["flow.packing", "arch.moe_router_load_balancing_type"],
            "seq_aux_loss needs one sequence in each row; set packing: false, or the router's loss to aux_loss, "
            "global_aux_loss or none",
        )


def _check_optimizer(config: RunConfig) -> None:
    optimizer = config.optimizer
    start = optimizer.weight_decay if optimizer.start_weight_decay is None else optimizer.start_weight_decay
    end = optimizer.weight_decay if optimizer.end_weight_decay is None else optimizer.end_weight_decay
    ends = ["optimizer.end_weight_decay", "optimizer.start_weight_decay"]
    if optimizer.weight_decay_incr_style == "constant" and start != end:
        rule = f"weight decay from {start} to {end} needs weight_decay_incr_style linear or cosine, which is constant"
        refuse(config, ends, rule)
    if end < start:  # optimizer_param_scheduler.py: assert self.end_wd >= self.start_wd
        refuse(config, ends, f"weight decay from {start} to {end} decreases, but it can only grow; raise the end")
    _check_offload(config)
    _check_muon(config)


def _check_muon(config: RunConfig) -> None:
    """Refuse keys that Megatron-Core's own Muon reads and this package's Muon does not."""
    path = SECTION_PATHS["optimizer"]
    for name, key in _OTHER_MUON.items():
        if name in config.optimizer.upstream:
            rule = f"it is of Megatron-Core's Muon, which needs emerging_optimizers; delete it, or set {path}.{key}"
            refuse(config, [f"optimizer.{name}"], rule)


def _check_offload(config: RunConfig) -> None:
    upstream, path = config.optimizer.upstream, SECTION_PATHS["optimizer"]
    if not upstream.get("optimizer_cpu_offload"):
        return
    # Megatron-LM's arguments.py; otherwise Megatron-Core fails, or offloads nothing
    needed = {
        "use_precision_aware_optimizer": config.optimizer.use_precision_aware_optimizer,
        "use_distributed_optimizer": config.optimizer.use_distributed_optimizer is not False,
        "optimizer_offload_fraction": upstream.get("optimizer_offload_fraction", 0.0) > 0,
    }
    for name, fulfilled in needed.items():
        if not fulfilled:
            value = "above 0" if name == "optimizer_offload_fraction" else "true"
            refuse(config, ["optimizer.optimizer_cpu_offload"], f"true needs {path}.{name} {value}")


def _check_precision(config: RunConfig) -> None:
    dtype = config.dtype
    if dtype.initial_loss_scale < dtype.min_loss_scale:
        rule = f"initial_loss_scale {dtype.initial_loss_scale} is below min_loss_scale {dtype.min_loss_scale}"
        refuse(config, ["dtype.initial_loss_scale", "dtype.min_loss_scale"], rule)


def _check_recompute(config: RunConfig) -> None:
    if config.recompute.distribute_saved_activations:
        granularity = config.recompute.recompute_granularity
        tensor, sequence = config.parallel.tensor_model_parallel_size, derived.sequence_parallel(config.parallel)
        if granularity != "full" or tensor == 1 or sequence:
            refuse(
                config,
                ["recompute.distribute_saved_activations"],
                "true needs recompute_granularity full, tensor_model_parallel_size > 1 and sequence_parallel false; "
                f"they are {granularity or 'null'}, {tensor} and {str(sequence).lower()}",
            )


def _check_intervals(config: RunConfig) -> None:
    train = config.train
    from_config = derived.has_sources(config.data) or derived.is_indexed(config.data)
    if train.eval_interval is not None and from_config and not derived.evaluation_set_names(config):
        rule = f"{train.eval_interval} needs {SECTION_PATHS['data']}.validation, which is null; set it, or write null"
        refuse(config, ["train.eval_interval"], rule)
    if train.sample_prompts is not None:
        _check_sample_prompts(config)


def _check_models(config: RunConfig) -> None:
    if config.models.reference is not None and config.models.teacher is not None:
        keys = ["models.reference", "models.teacher"]
        refuse(config, keys, "models.reference and models.teacher are both set; set one of them to null")


def _check_profile(config: RunConfig) -> None:
    steps, last = config.profile.steps, config.train.train_iters
    wrong = [step for step in steps if step < 1 or (last is not None and step > last)]
    if wrong:
        rule = "the first iteration is 1" if wrong[0] < 1 else f"the last iteration is train_iters {last}"
        refuse(config, ["profile.steps"], f"{list(steps)} contains {wrong[0]}, but {rule}; change it, or write []")


def _check_best_metric(config: RunConfig) -> None:
    metric, sets = config.checkpoint.best_metric, derived.evaluation_set_names(config)
    if metric is not None and not any(metric.startswith(f"{name}/") for name in sets):
        known = f"the sets are {', '.join(sets)}" if sets else f"{SECTION_PATHS['data']}.validation is null"
        hint = did_you_mean(metric, [f"{name}/loss" for name in sets])
        refuse(config, ["checkpoint.best_metric"], f"{metric!r} is not SET/METRIC of an evaluation set; {known}{hint}")


def _check_sample_prompts(config: RunConfig) -> None:
    key, prompts = ["train.sample_prompts"], config.train.sample_prompts
    if not prompts or not all(prompts):
        refuse(config, key, f"{prompts} must be a list of non-empty texts or lists of messages; null logs no sample")
    messages = [message for prompt in prompts if not isinstance(prompt, str) for message in prompt]
    incomplete = [message for message in messages if not {"role", "content"} <= message.keys()]
    if incomplete:
        refuse(config, key, f"the message {incomplete[0]} lacks role or content; write {{role: user, content: ...}}")
    if derived.has_value_head(config):
        rule = f"{derived.VALUE_PROVIDER} returns scores and completes no prompt; write null"
        refuse(config, [*key, "model_provider.provider_key"], rule)
    if config.data.tokenizer is None:
        refuse(config, key, f"prompts need a tokenizer; set {SECTION_PATHS['data']}.tokenizer, or write null")

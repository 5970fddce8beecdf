"""Contradictions within the length of a run, the phases of its learning rate, batches and intervals."""

from megatron_wrap.config.checks.adapter import check_adapter
from megatron_wrap.config.checks.contradictions import check_each, neighbours, refuse
from megatron_wrap.config.checks.data import check_data
from megatron_wrap.config.checks.numerics import check_numerics
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import SECTION_PATHS, RunConfig
from megatron_wrap.nearest_names import did_you_mean


def check_training(config: RunConfig) -> None:
    """Check `megatron_lm.train`, with what it requires of data and checkpoints.

    Raises:
        ConfigError, LayoutError: values that contradict each other; see `check_each`.
    """
    known_length = config.train.train_iters is not None or config.train.train_samples is not None
    schedule = (check_length, _check_batches, check_learning_rate, *((check_schedule,) if known_length else ()))
    samples = (check_data, _check_intervals, _check_best_metric, _check_models, check_adapter, _check_profile)
    check_each(config, (*schedule, check_numerics, *samples))


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


def check_length(config: RunConfig) -> None:
    """Check that the run has one length, and that its data and the phases of the learning rate agree with it."""
    train, data = config.train, config.data
    keys = ["train.train_iters", "train.train_samples", "train.train_epochs"]
    lengths = {key.partition(".")[2]: config.value(key) for key in keys if config.value(key) is not None}
    if not lengths:
        refuse(config, keys, "the run has no length; set train_iters, train_samples or train_epochs")
    if len(lengths) > 1:
        texts = {name: str(value) if isinstance(value, int) else f"{value:g}" for name, value in lengths.items()}
        names = " and ".join(f"{name} {text}" for name, text in texts.items())
        refuse(config, [f"train.{name}" for name in lengths], f"{names} are set; keep one of them")
    _check_units(config)
    if train.train_epochs is None:
        return
    if derived.is_indexed(data):
        refuse(config, keys[1:], "the index of indexed data has windows, not epochs; set train_iters")
    if not data.train and derived.mock_samples(data) is None:
        refuse(config, keys[1:], "epochs need megatron_wrap.data.train, which is null; set train_iters")
    streamed = [source.name for source in data.train if source.streaming]
    if streamed:
        refuse(config, keys[1:], f"{', '.join(streamed)} stream, so the length of an epoch is unknown; set train_iters")


def _check_units(config: RunConfig) -> None:
    """Check that the phases of the learning rate have the unit of the run's length, as in Megatron-LM's
    arguments.py."""
    of_samples = config.train.train_samples is not None
    wrong, right = ("iters", "samples") if of_samples else ("samples", "iters")
    for phase in ("warmup", "decay", "wsd_decay"):
        name = f"learning_rate.lr_{phase}_{wrong}"
        if config.value(name):
            length = "train_samples" if of_samples else "train_iters or train_epochs"
            refuse(config, [name], f"{config.value(name)} does not apply with {length}; set lr_{phase}_{right}")


def check_learning_rate(config: RunConfig) -> None:
    """Check the keys of the learning rate against each other."""
    rate = config.learning_rate
    unit = "iters" if config.train.train_samples is None else "samples"
    warmup, wsd = getattr(rate, f"lr_warmup_{unit}"), getattr(rate, f"lr_wsd_decay_{unit}")
    if rate.lr_warmup_fraction is not None and warmup:
        rule = f"lr_warmup_fraction {rate.lr_warmup_fraction} and lr_warmup_{unit} {warmup} are both set; delete one"
        refuse(config, ["learning_rate.lr_warmup_fraction", f"learning_rate.lr_warmup_{unit}"], rule)
    for name in ("min_lr", "lr_warmup_init"):
        if getattr(rate, name) > rate.lr:
            rule = f"{name} {getattr(rate, name)} is above lr {rate.lr}; lower it"
            refuse(config, [f"learning_rate.{name}", "learning_rate.lr"], rule)
    if rate.lr_decay_style == "WSD" and wsd is None:
        rule = f"WSD needs lr_wsd_decay_{unit}, the length of its last phase; set it"
        refuse(config, ["learning_rate.lr_decay_style"], rule)


def check_schedule(config: RunConfig) -> None:
    """Check the phases of the learning rate against the length of the run; with train_epochs, once the setup has
    counted its steps.

    Raises:
        ConfigError: a phase is too long.
    """
    rate = config.learning_rate
    if config.train.train_samples is not None:
        decay_samples, warmup_samples = derived.lr_decay_samples(config), derived.lr_warmup_samples(config)
        _check_phases(config, "samples", decay_samples, warmup_samples, rate.lr_wsd_decay_samples)
        return
    decay = derived.lr_decay_iters(config)
    warmup = derived.lr_warmup_iters(config)
    _check_phases(config, "iters", decay, warmup, rate.lr_wsd_decay_iters)


def _check_phases(config: RunConfig, unit: str, decay: float, warmup: float, wsd: int | None) -> None:
    if warmup >= decay:
        keys = [f"learning_rate.lr_{name}" for name in (f"warmup_{unit}", "warmup_fraction", f"decay_{unit}")]
        words = "iterations" if unit == "iters" else unit
        rule = f"the warm-up of {warmup:g} {words} must be shorter than the decay of {decay}"
        refuse(config, keys, f"{rule} (lr_decay_{unit}, else train_{unit})")
    if wsd is not None and wsd > decay:
        rule = f"{wsd} is longer than the whole schedule of {decay}; shorten it"
        refuse(config, [f"learning_rate.lr_wsd_decay_{unit}"], rule)

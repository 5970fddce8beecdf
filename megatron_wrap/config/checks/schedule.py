"""Contradictions within the length of a run and the phases of its learning rate."""

from megatron_wrap.config.checks.located_errors import refuse
from megatron_wrap.config.schema import derived
from megatron_wrap.config.schema.run import RunConfig


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

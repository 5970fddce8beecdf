"""Every metric that a run reports: its name, unit, meaning and form on the console, declared here and nowhere else.

The console line (utils/progress.py) and the tables of the READMEs (scripts/metric_docs.py) are made from `METRICS`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from megatron_wrap.metrics.number_format import (
    duration,
    four_decimals,
    scientific,
    short,
    significant,
    whole,
    with_prefix,
)


def _always(value: float) -> bool:
    return True


@dataclass(frozen=True)
class ConsoleFormat:
    """A metric's part of the console line."""

    number: Callable[[float], str]
    example: float
    """A value that the documentation shows in this format."""
    text: str = "{name} {number}"
    """What stands around the number; `{name}` is the metric's name."""
    shown: Callable[[float], bool] = _always
    """False for values that are left out of the line."""

    def render(self, name: str, value: float) -> str:
        """The part's text, whether the line shows the value or not."""
        return self.text.format(name=name, number=self.number(value))


@dataclass(frozen=True)
class MetricInfo:
    """One metric: a row of the documentation."""

    name: str
    """Key in `wrap.train`'s result and in `metrics.jsonl`; upper-case parts stand for names that the user gives."""
    meaning: str
    unit: str = ""
    """Empty: it has none."""
    console: ConsoleFormat | None = None
    """None: not on the console line."""
    config_key: str | None = None
    """Dotted key of the configuration that adds the metric; None: it is always there."""


_WITHOUT_COEFFICIENT = "; without its coefficient, no part of `loss`"
_LOGGER = "megatron_wrap.logger"
_ARCH = "megatron_lm.model.arch"
_OF_FLOW = partial(short, digits=4)

# The console line in three parts: the flow's own metrics stand between the engine's, beside the routers' losses.
_BEFORE_FLOW_METRICS = (
    MetricInfo(
        "iteration",
        "taken since the start of the run",
        unit="steps",
        console=ConsoleFormat(whole, example=12),
    ),
    MetricInfo(
        "loss",
        "the objective of the step, before its update",
        console=ConsoleFormat(four_decimals, example=5.12341),
    ),
)

EVALUATION_LOSS = MetricInfo(
    "eval/NAME/loss",
    "the objective on the evaluation set NAME",
    console=ConsoleFormat(four_decimals, example=5.45592),
)
EVALUATION_METRIC = MetricInfo(
    "eval/NAME/METRIC",
    "the flow's own metric METRIC on the evaluation set NAME",
    console=ConsoleFormat(_OF_FLOW, example=2.0),
)
FLOW_METRIC = MetricInfo(
    "METRIC",
    "the flow's own, such as `truncated_samples` of `gpt_sft`",
    console=ConsoleFormat(_OF_FLOW, example=0.75),
)

_BESIDE_FLOW_METRICS = (
    MetricInfo(
        "load_balancing_loss",
        f"auxiliary loss of the experts' routers over a micro-batch (`aux_loss`){_WITHOUT_COEFFICIENT}",
        console=ConsoleFormat(_OF_FLOW, example=1.0312),
        config_key=f"{_ARCH}.moe_aux_loss_coeff",
    ),
    MetricInfo(
        "seq_load_balancing_loss",
        f"the same over each sequence (`seq_aux_loss`){_WITHOUT_COEFFICIENT}",
        console=ConsoleFormat(_OF_FLOW, example=1.0874),
        config_key=f"{_ARCH}.moe_aux_loss_coeff",
    ),
    MetricInfo(
        "global_load_balancing_loss",
        f"the same over all micro-batches of the step so far (`global_aux_loss`){_WITHOUT_COEFFICIENT}",
        console=ConsoleFormat(_OF_FLOW, example=1.0071),
        config_key=f"{_ARCH}.moe_aux_loss_coeff",
    ),
    MetricInfo(
        "z_loss",
        f"mean square of the logsumexp of the routers' logits{_WITHOUT_COEFFICIENT}",
        console=ConsoleFormat(_OF_FLOW, example=4.3271),
        config_key=f"{_ARCH}.moe_z_loss_coeff",
    ),
)

_AFTER_FLOW_METRICS = (
    MetricInfo(
        "grad_norm",
        "norm of the whole gradient, before clipping",
        console=ConsoleFormat(partial(short, digits=3), example=1.0249),
    ),
    MetricInfo(
        "params_norm",
        "norm of all parameters, after the update",
        console=ConsoleFormat(partial(short, digits=3), example=1234.5),
        config_key=f"{_LOGGER}.add_params_norm_to_metrics",
    ),
    MetricInfo(
        "num_zeros_in_grad",
        "of the whole gradient that are zero",
        unit="elements",
        console=ConsoleFormat(partial(short, digits=3), example=17),
        config_key=f"{_LOGGER}.add_num_zeros_in_grad_to_metrics",
    ),
    MetricInfo(
        "learning_rate",
        "of this step",
        console=ConsoleFormat(partial(scientific, decimals=1), example=3e-4, text="lr {number}"),
    ),
    MetricInfo(
        "loss_scale",
        "of fp16; 1 elsewhere",
        console=ConsoleFormat(whole, example=65536, shown=lambda value: value != 1),
    ),
    MetricInfo(
        "elapsed_time",
        "of this step",
        unit="s",
        console=ConsoleFormat(duration, example=0.512, text="{number}"),
    ),
    MetricInfo(
        "tokens_per_second",
        "of all devices together, without padding",
        unit="tokens/s",
        console=ConsoleFormat(with_prefix, example=12345.6, text="{number} tokens/s"),
    ),
    MetricInfo(
        "tokens_per_second_per_device",
        "the same divided by the number of devices",
        unit="tokens/s",
    ),
    MetricInfo(
        "tflops",
        "of the model's matrix products, per device",
        unit="TFLOP/s",
        console=ConsoleFormat(
            partial(significant, digits=3),
            example=412.34,
            text="{number} TFLOP/s per device",
            shown=lambda value: value >= 0.1,
        ),
        config_key=f"{_LOGGER}.add_throughput_to_metrics",
    ),
    MetricInfo(
        "throughput",
        "the same as `tflops`",
        unit="TFLOP/s",
        config_key=f"{_LOGGER}.add_throughput_to_metrics",
    ),
    MetricInfo(
        "memory_allocated",
        "allocated on this process's device; on the CPU, resident memory of the process",
        unit="GiB",
        config_key=f"{_LOGGER}.add_memory_to_metrics",
    ),
    MetricInfo(
        "memory_reserved",
        "the same with what torch's allocator keeps for reuse",
        unit="GiB",
        config_key=f"{_LOGGER}.add_memory_to_metrics",
    ),
    MetricInfo(
        "memory_max",
        "peak of `memory_allocated`",
        unit="GiB",
        console=ConsoleFormat(
            partial(significant, digits=3), example=71.26, text="{number} GiB", shown=lambda value: value > 0
        ),
        config_key=f"{_LOGGER}.add_memory_to_metrics",
    ),
    MetricInfo(
        "consumed_samples",
        "since the start of the run",
        unit="samples",
    ),
    MetricInfo(
        "consumed_tokens",
        "since the start of the run, without padding",
        unit="tokens",
    ),
    MetricInfo(
        "skipped_iterations",
        "without an update since the start of the run: no weight, or an overflow in fp16",
        unit="steps",
        console=ConsoleFormat(whole, example=0, text="skipped {number}"),
    ),
)

METRICS = (
    *_BEFORE_FLOW_METRICS,
    FLOW_METRIC,
    EVALUATION_LOSS,
    EVALUATION_METRIC,
    *_BESIDE_FLOW_METRICS,
    *_AFTER_FLOW_METRICS,
)
"""All of them, in the order of the console line and of the documentation."""

ENGINE_METRICS: Mapping[str, MetricInfo] = MappingProxyType(
    {info.name: info for info in (*_BEFORE_FLOW_METRICS, *_BESIDE_FLOW_METRICS, *_AFTER_FLOW_METRICS)}
)
"""Those that the engine makes in a step, by name."""


def metric_info(name: str) -> MetricInfo:
    """The declaration of a reported metric; a name that the engine does not make is the flow's own."""
    if name in ENGINE_METRICS:
        return ENGINE_METRICS[name]
    if name.startswith("eval/"):
        return EVALUATION_LOSS if name.endswith("/loss") else EVALUATION_METRIC
    return FLOW_METRIC


def console_order(names: Iterable[str]) -> list[str]:
    """The names as declared; those of the flow, of evaluations and of routers keep their order, after the loss."""
    given = dict.fromkeys(names)
    before = [info.name for info in _BEFORE_FLOW_METRICS if info.name in given]
    after = [info.name for info in _AFTER_FLOW_METRICS if info.name in given]
    return [*before, *(name for name in given if name not in {*before, *after}), *after]


def console_text(name: str, value: float) -> str | None:
    """A metric's part of the console line; None where it is left out."""
    console = metric_info(name).console
    if console is None or not console.shown(value):
        return None
    return console.render(name, value)

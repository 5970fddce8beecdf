"""The only declaration of all metrics that a run reports: name, unit, meaning and console format.

The console line (utils/progress.py) and the tables of docs/metrics.md (scripts/metric_docs.py) are generated from it.
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
    """How a metric appears on the console line."""

    number: Callable[[float], str]
    example: float
    """Example value for the documentation."""
    text: str = "{name} {number}"
    """Template; `{name}` is the metric's name."""
    shown: Callable[[float], bool] = _always
    """Whether the line includes the value."""

    def render(self, name: str, value: float) -> str:
        """The text of a value, even if `shown` is False for it."""
        return self.text.format(name=name, number=self.number(value))


@dataclass(frozen=True)
class MetricInfo:
    """One metric: a row in the documentation's table."""

    name: str
    """Key in `wrap.train`'s result and in `metrics.jsonl`; upper-case parts are placeholders for the user's names."""
    meaning: str
    unit: str = ""
    """Empty: no unit."""
    console: ConsoleFormat | None = None
    """None: not shown on the console line."""
    config_key: str | None = None
    """Dotted configuration key that enables the metric; None: always enabled."""


_WITHOUT_COEFFICIENT = "; without its coefficient, no part of `loss`"
_LOGGER = "megatron_wrap.logger"
_ARCH = "megatron_lm.model.arch"
_FOUR_DIGITS = partial(short, digits=4)

# Order of the console line: first metrics of the engine, then those of the flow, evaluations and MoE routers, then the
# other metrics of the engine.
_FIRST_METRICS = (
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
EVALUATION_PERPLEXITY = MetricInfo(
    "eval/NAME/perplexity",
    "exp of the loss on the evaluation set NAME, of flows whose objective is the mean negative log-likelihood of a "
    "token (`reports_perplexity`); of a loss above 20 exp(20), as in Megatron-LM",
    console=ConsoleFormat(_FOUR_DIGITS, example=234.14),
)
EVALUATION_METRIC = MetricInfo(
    "eval/NAME/METRIC",
    "the flow's own metric METRIC on the evaluation set NAME",
    console=ConsoleFormat(_FOUR_DIGITS, example=2.0),
)
FLOW_METRIC = MetricInfo(
    "METRIC",
    "the flow's own, such as `truncated_samples` of `gpt_sft`",
    console=ConsoleFormat(_FOUR_DIGITS, example=0.75),
)

_ROUTER_METRICS = (
    MetricInfo(
        "load_balancing_loss",
        f"auxiliary loss of the experts' routers over a micro-batch (`aux_loss`){_WITHOUT_COEFFICIENT}",
        console=ConsoleFormat(_FOUR_DIGITS, example=1.0312),
        config_key=f"{_ARCH}.moe_aux_loss_coeff",
    ),
    MetricInfo(
        "seq_load_balancing_loss",
        f"the same over each sequence (`seq_aux_loss`){_WITHOUT_COEFFICIENT}",
        console=ConsoleFormat(_FOUR_DIGITS, example=1.0874),
        config_key=f"{_ARCH}.moe_aux_loss_coeff",
    ),
    MetricInfo(
        "global_load_balancing_loss",
        f"the same over all micro-batches of the step so far (`global_aux_loss`){_WITHOUT_COEFFICIENT}",
        console=ConsoleFormat(_FOUR_DIGITS, example=1.0071),
        config_key=f"{_ARCH}.moe_aux_loss_coeff",
    ),
    MetricInfo(
        "z_loss",
        f"mean square of the logsumexp of the routers' logits{_WITHOUT_COEFFICIENT}",
        console=ConsoleFormat(_FOUR_DIGITS, example=4.3271),
        config_key=f"{_ARCH}.moe_z_loss_coeff",
    ),
)

_LAST_METRICS = (
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
        "global_batch_size",
        "of this step",
        unit="samples",
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
        "num_tokens",
        "the same as `consumed_tokens`, under trl's name; trl also counts each sequence's last token, which is a label "
        "only",
        unit="tokens",
    ),
    MetricInfo(
        "skipped_iterations",
        "without an update since the start of the run: no weight, or an overflow in fp16",
        unit="steps",
        console=ConsoleFormat(whole, example=0, text="skipped {number}"),
    ),
    MetricInfo(
        "skipped_samples",
        "rows of the data left out since the start of the run (`megatron_wrap.data.on_bad_sample: skip`)",
        unit="samples",
        console=ConsoleFormat(whole, example=3, text="left out {number}", shown=bool),
    ),
)

METRICS = (
    *_FIRST_METRICS,
    FLOW_METRIC,
    EVALUATION_LOSS,
    EVALUATION_PERPLEXITY,
    EVALUATION_METRIC,
    *_ROUTER_METRICS,
    *_LAST_METRICS,
)
"""All metrics, in the order of the console line and the documentation."""

ENGINE_METRICS: Mapping[str, MetricInfo] = MappingProxyType(
    {info.name: info for info in (*_FIRST_METRICS, *_ROUTER_METRICS, *_LAST_METRICS)}
)
"""Metrics that the engine computes in a step, by name."""


def metric_info(name: str) -> MetricInfo:
    """The declaration of a reported metric; unknown names are metrics of the flow."""
    if name in ENGINE_METRICS:
        return ENGINE_METRICS[name]
    if name.startswith("eval/"):
        by_ending = {"loss": EVALUATION_LOSS, "perplexity": EVALUATION_PERPLEXITY}
        return by_ending.get(name.split("/", 2)[-1], EVALUATION_METRIC)
    return FLOW_METRIC


def console_order(names: Iterable[str]) -> list[str]:
    """The names in declared order; metrics of flows, evaluations and routers follow the loss in the given order."""
    given = dict.fromkeys(names)
    first = [info.name for info in _FIRST_METRICS if info.name in given]
    last = [info.name for info in _LAST_METRICS if info.name in given]
    return [*first, *(name for name in given if name not in {*first, *last}), *last]


def console_text(name: str, value: float) -> str | None:
    """A metric's text for the console line; None if the line omits it."""
    console = metric_info(name).console
    if console is None or not console.shown(value):
        return None
    return console.render(name, value)

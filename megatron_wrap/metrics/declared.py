"""The only declaration of all metrics that a run reports: name, unit, meaning and console format.

The console's lines (utils/console_lines.py) and the tables of docs/metrics.md (scripts/metric_docs.py) are generated
from it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

from megatron_wrap.metrics.number_format import (
    counted,
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
    """Format of a metric on the console line."""

    number: Callable[[float], str]
    example: float
    """Example value for the documentation."""
    text: str = "{name} {number}"
    """Template; `{name}` is the metric's name."""
    shown: Callable[[float], bool] = _always
    """Function of a value that returns whether the line includes it."""

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
    """Unit of the value; empty: none."""
    console: ConsoleFormat | None = None
    """Format on the console line; None: not shown there."""
    config_key: str | None = None
    """Dotted configuration key that enables the metric; None: always enabled."""


_LOGGER = "megatron_wrap.logger"
_FOUR_DIGITS, _THREE_DIGITS = partial(short, digits=4), partial(short, digits=3)

# Order of the console line: first metrics of the engine, then those of the flow, evaluations and MoE routers, then the
# other metrics of the engine.
_FIRST_METRICS = (
    MetricInfo("iteration", "taken since the start of the run", "steps", ConsoleFormat(whole, 12)),
    MetricInfo("loss", "the objective of the step, before its update", "", ConsoleFormat(four_decimals, 5.12341)),
)

EVALUATION_LOSS = MetricInfo(
    "eval/NAME/loss", "the objective on the evaluation set NAME", "", ConsoleFormat(four_decimals, 5.45592)
)
EVALUATION_PERPLEXITY = MetricInfo(
    "eval/NAME/perplexity",
    "exp of the loss on the evaluation set NAME, of flows whose objective is the mean negative log-likelihood of a "
    "token (`reports_perplexity`); of a loss above 20 exp(20), as in Megatron-LM",
    "",
    ConsoleFormat(_FOUR_DIGITS, 234.14),
)
EVALUATION_METRIC = MetricInfo(
    "eval/NAME/METRIC", "the flow's own metric METRIC on the evaluation set NAME", "", ConsoleFormat(_FOUR_DIGITS, 2.0)
)
FLOW_METRIC = MetricInfo(
    "METRIC", "the flow's own, such as `truncated_samples` of `gpt_sft`", "", ConsoleFormat(_FOUR_DIGITS, 0.75)
)


def _router_loss(name: str, meaning: str, coefficient: str, example: float) -> MetricInfo:
    console = ConsoleFormat(_FOUR_DIGITS, example)
    without_coefficient = "; without its coefficient, no part of `loss`"
    return MetricInfo(name, meaning + without_coefficient, "", console, f"megatron_lm.model.arch.{coefficient}")


_ROUTER_METRICS = (
    _router_loss(
        "load_balancing_loss",
        "auxiliary loss of the experts' routers over a micro-batch (`aux_loss`)",
        "moe_aux_loss_coeff",
        1.0312,
    ),
    _router_loss(
        "seq_load_balancing_loss", "the same over each sequence (`seq_aux_loss`)", "moe_aux_loss_coeff", 1.0874
    ),
    _router_loss(
        "global_load_balancing_loss",
        "the same over all micro-batches of the step so far (`global_aux_loss`)",
        "moe_aux_loss_coeff",
        1.0071,
    ),
    _router_loss("z_loss", "mean square of the logsumexp of the routers' logits", "moe_z_loss_coeff", 4.3271),
)

_LOAD_KEY = f"{_LOGGER}.add_expert_load_to_metrics"
EXPERT_LOADS = {
    "busiest": MetricInfo(
        "experts/LAYER/busiest",
        "tokens of the busiest expert of a layer such as layer_3 (counted from 0) over the mean of its experts",
        config_key=_LOAD_KEY,
    ),
    "entropy": MetricInfo(
        "experts/LAYER/entropy",
        "mean entropy of the router's scores of a token over all experts of the layer",
        "nats",
        config_key=_LOAD_KEY,
    ),
    "dropped": MetricInfo(
        "experts/LAYER/dropped",
        "choices of an expert that were dropped, with moe_expert_capacity_factor",
        "",
        config_key=_LOAD_KEY,
    ),
}
"""Load of the experts of each layer, by the ending of the metric's name."""

_LAST_METRICS = (
    MetricInfo("grad_norm", "norm of the whole gradient, before clipping", "", ConsoleFormat(_THREE_DIGITS, 1.0249)),
    MetricInfo(
        "params_norm",
        "norm of all parameters, after the update",
        "",
        ConsoleFormat(_THREE_DIGITS, 1234.5),
        f"{_LOGGER}.add_params_norm_to_metrics",
    ),
    MetricInfo(
        "num_zeros_in_grad",
        "of the whole gradient that are zero",
        "elements",
        ConsoleFormat(_THREE_DIGITS, 17),
        f"{_LOGGER}.add_num_zeros_in_grad_to_metrics",
    ),
    MetricInfo(
        "learning_rate", "of this step", "", ConsoleFormat(partial(scientific, decimals=1), 3e-4, "lr {number}")
    ),
    MetricInfo("loss_scale", "of fp16; 1 elsewhere", "", ConsoleFormat(whole, 65536, shown=lambda value: value != 1)),
    MetricInfo("elapsed_time", "of this step", "s", ConsoleFormat(duration, 0.512, "{number}")),
    MetricInfo(
        "tokens_per_second",
        "of all devices together, without padding",
        "tokens/s",
        ConsoleFormat(with_prefix, 12345.6, "{number} tokens/s"),
    ),
    MetricInfo("tokens_per_second_per_device", "the same divided by the number of devices", "tokens/s"),
    MetricInfo(
        "tflops",
        "of the matmuls that the step needs, per device: none for gradients of frozen weights",
        "TFLOP/s",
        ConsoleFormat(partial(significant, digits=3), 412.34, "{number} TFLOP/s", shown=lambda value: value >= 0.1),
        f"{_LOGGER}.add_throughput_to_metrics",
    ),
    MetricInfo("throughput", "the same as `tflops`", "TFLOP/s", config_key=f"{_LOGGER}.add_throughput_to_metrics"),
    MetricInfo(
        "memory_allocated",
        "allocated on this process's device; on the CPU, resident memory of the process",
        "GiB",
        config_key=f"{_LOGGER}.add_memory_to_metrics",
    ),
    MetricInfo(
        "memory_reserved",
        "the same plus memory that torch's allocator keeps for reuse",
        "GiB",
        config_key=f"{_LOGGER}.add_memory_to_metrics",
    ),
    MetricInfo(
        "memory_max",
        "peak of `memory_allocated`",
        "GiB",
        ConsoleFormat(partial(significant, digits=3), 71.26, "{number} GiB", shown=lambda value: value > 0),
        f"{_LOGGER}.add_memory_to_metrics",
    ),
    MetricInfo("global_batch_size", "of this step", "samples"),
    MetricInfo("consumed_samples", "since the start of the run", "samples"),
    MetricInfo("consumed_tokens", "since the start of the run, without padding", "tokens"),
    MetricInfo(
        "num_tokens",
        "the same as `consumed_tokens`, under trl's name; trl also counts each sequence's last token, which is only a "
        "label",
        "tokens",
    ),
    MetricInfo(
        "skipped_iterations",
        "without an update since the start of the run: no weight, an overflow in fp16, or one of `bad_steps`",
        "steps",
        ConsoleFormat(partial(counted, noun="iteration"), 3, "{number} skipped", shown=bool),
    ),
    MetricInfo(
        "bad_steps",
        "skipped or rolled back since the start of the run: loss or gradient not finite, or the loss a spike "
        "(`megatron_wrap.bad_steps`)",
        "steps",
        ConsoleFormat(partial(counted, noun="bad step"), 3, "{number}", shown=bool),
    ),
    MetricInfo(
        "skipped_samples",
        "rows of the data left out since the start of the run (`megatron_wrap.data.on_bad_sample: skip`)",
        "samples",
        ConsoleFormat(partial(counted, noun="sample"), 3, "{number} left out", shown=bool),
    ),
)

METRICS = (
    *_FIRST_METRICS,
    FLOW_METRIC,
    EVALUATION_LOSS,
    EVALUATION_PERPLEXITY,
    EVALUATION_METRIC,
    *_ROUTER_METRICS,
    *EXPERT_LOADS.values(),
    *_LAST_METRICS,
)
"""All metrics, in the order of the console line and the documentation."""

CONSOLE_DISPENSABLE = (
    *("tflops", "memory_max", "num_zeros_in_grad", "params_norm"),
    *(info.name for info in reversed(_ROUTER_METRICS)),
)
"""Metrics of the engine that a console line which is too long omits, in this order."""

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
    if name.startswith("experts/layer_"):
        return EXPERT_LOADS.get(name.rpartition("/")[2], FLOW_METRIC)
    return FLOW_METRIC


def console_order(names: Iterable[str]) -> list[str]:
    """The names in declared order; those of flows, evaluations and routers follow the loss in the order of `names`."""
    reported = dict.fromkeys(names)
    first = [info.name for info in _FIRST_METRICS if info.name in reported]
    last = [info.name for info in _LAST_METRICS if info.name in reported]
    return [*first, *(name for name in reported if name not in {*first, *last}), *last]


def console_text(name: str, value: float) -> str | None:
    """A metric's text for the console line; None if the line omits it."""
    console = metric_info(name).console
    if console is None or not console.shown(value):
        return None
    return console.render(name.split("/", 2)[-1] if name.startswith("eval/") else name, value)

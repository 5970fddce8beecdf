"""A step for the human eye: one line of text, and a progress bar with the time left where someone is watching."""

import math
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from megatron_wrap.utils.dist_logger import logger

if TYPE_CHECKING:
    from tqdm import tqdm
    from typing_extensions import Self

# Names of the step's metrics that the engine makes; every other name is the flow's own (or an evaluation's).
_ENGINE_METRICS = frozenset(
    {
        "iteration",
        "loss",
        "grad_norm",
        "learning_rate",
        "loss_scale",
        "num_zeros_in_grad",
        "params_norm",
        "consumed_samples",
        "consumed_tokens",
        "skipped_iterations",
        "elapsed_time",
        "tokens_per_second",
        "tokens_per_second_per_device",
        "tflops",
        "throughput",
    }
)


def format_step(metrics: Mapping[str, float], train_iters: int | None = None) -> str:
    """One readable line of a step's (or an evaluation's) metrics.

    `iteration 12/100 | loss 5.1234 | grad_norm 1.02 | lr 3.0e-4 | 512 ms | 12.3k tokens/s | skipped 0`

    The flow's own metrics come after the loss, in their order. Left out: what is absent, a loss scale of 1, a rate
    below 0.1 TFLOP/s and memory of 0 GiB (the CPU), and counts that follow from the iteration.

    Args:
        metrics: by the names of `metrics.jsonl`; `elapsed_time` in seconds, `tflops` in model TFLOP/s per device,
            `memory_*` in GiB.
        train_iters: number of steps of the whole run, shown behind the iteration.
    """
    parts = []
    if "iteration" in metrics:
        total = "" if train_iters is None else f"/{train_iters}"
        parts.append(f"iteration {metrics['iteration']:.0f}{total}")
    if "loss" in metrics:
        parts.append(f"loss {_loss(metrics['loss'])}")
    for name, value in metrics.items():
        if name.startswith("eval/") and name.endswith("/loss"):
            parts.append(f"{name} {_loss(value)}")
        elif name not in _ENGINE_METRICS and not name.startswith("memory_"):
            parts.append(f"{name} {_number(value, 4)}")
    for name in ("grad_norm", "params_norm", "num_zeros_in_grad"):
        if name in metrics:
            parts.append(f"{name} {_number(metrics[name], 3)}")
    if "learning_rate" in metrics:
        parts.append(f"lr {_exponent(metrics['learning_rate'], 1)}")
    if metrics.get("loss_scale", 1) != 1:
        parts.append(f"loss_scale {metrics['loss_scale']:.0f}")
    parts += _speed(metrics)
    if "skipped_iterations" in metrics:
        parts.append(f"skipped {metrics['skipped_iterations']:.0f}")
    return " | ".join(parts)


def _speed(metrics: Mapping[str, float]) -> list[str]:
    parts = []
    if "elapsed_time" in metrics:
        seconds = metrics["elapsed_time"]
        parts.append(f"{_digits(seconds * 1000, 3)} ms" if seconds < 0.9995 else f"{_digits(seconds, 3)} s")
    if "tokens_per_second" in metrics:
        parts.append(f"{_thousands(metrics['tokens_per_second'])} tokens/s")
    if metrics.get("tflops", 0) >= 0.1:
        parts.append(f"{_digits(metrics['tflops'], 3)} TFLOP/s per device")
    if metrics.get("memory_max", 0) > 0:
        parts.append(f"{_digits(metrics['memory_max'], 3)} GiB")
    return parts


def _loss(value: float) -> str:
    if value == 0 or 1e-3 <= abs(value) < 1e5 or not math.isfinite(value):
        return f"{value:.4f}"
    return _exponent(value, 4)


def _number(value: float, digits: int) -> str:
    """Whole numbers as they are, others with that many significant digits, very large and small ones as 1.2e-5."""
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int):
        return str(value)
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        return _digits(value, digits)
    return _exponent(value, digits - 1)


def _digits(value: float, digits: int) -> str:
    if not math.isfinite(value) or value == 0:
        return f"{value:.0f}"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # of the rounded value: 9.999 has three digits as 10.0
    return f"{value:.{max(0, digits - 1 - exponent)}f}"


def _exponent(value: float, decimals: int) -> str:
    if not math.isfinite(value) or value == 0:
        return f"{value:.0f}"
    mantissa, _, exponent = f"{value:.{decimals}e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def _thousands(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= 0.9995 * size:
            return f"{_digits(value / size, 3)}{unit}"
    return _digits(value, 3)


class ProgressBar:
    """tqdm's bar over the steps of a run, with the time left; on rank 0 of a terminal only. Log lines appear above it.

    Args:
        total: number of steps of the whole run.
        initial: steps done before (a resumed run).
        enabled: default: this is rank 0 and stderr is a terminal.
    """

    def __init__(self, total: int, initial: int = 0, enabled: bool | None = None) -> None:
        self._bar: tqdm | None = None
        if enabled is None:
            enabled = logger.rank == 0 and sys.stderr is not None and sys.stderr.isatty()
        if enabled:
            from tqdm import tqdm as bar_class

            self._bar = bar_class(total=total, initial=initial, unit="step", dynamic_ncols=True, file=sys.stderr)

    @property
    def enabled(self) -> bool:
        """True while a bar is drawn."""
        return self._bar is not None

    def update(self, iteration: int, metrics: Mapping[str, float] | None = None) -> None:
        """Moves the bar to `iteration` steps done and shows the loss of `metrics` behind it."""
        if self._bar is None:
            return
        if metrics and "loss" in metrics:
            self._bar.set_postfix_str(f"loss {_loss(metrics['loss'])}", refresh=False)
        self._bar.update(iteration - self._bar.n)

    def close(self) -> None:
        """Leaves the bar's last state on the screen; a second call does nothing."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

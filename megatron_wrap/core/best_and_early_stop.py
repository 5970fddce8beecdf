"""The best evaluation of `MegatronWrap.fit`: its checkpoint, and the end of a run that no longer improves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint.run_checkpoints import RunCheckpoints
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import ConfigError, did_you_mean
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.parallel.collectives import all_reduce_values, broadcast_object
from megatron_wrap.utils.dist_logger import logger


class BestCheckpoint:
    """Compares evaluations by `megatron_wrap.checkpoint.best_metric`. All ranks take the same decisions.

    Args:
        state: training state of the run.
        checkpoints: checkpoints of the run.
        save: saves a checkpoint of the run.
    """

    def __init__(self, state: TrainingState, checkpoints: RunCheckpoints, save: Callable[[], Path]) -> None:
        self._state, self._checkpoints, self._save = state, checkpoints, save

    def compare(self, metrics: Mapping[str, float]) -> None:
        """Compare an evaluation with the best one so far, and save a better one. Collective.

        Args:
            metrics: result of `evaluate` at the current iteration; an evaluation before the first step does not count.

        Raises:
            ConfigError: the evaluation has no metric `best_metric`.
        """
        state, settings = self._state, self._state.config.checkpoint
        name, iteration = settings.best_metric, state.progress.iteration
        if name is None:
            return
        value = float(broadcast_object(_value_of(metrics, name), source_rank=0))
        if iteration == 0 or not state.best.compare(iteration, value, largest=settings.best_metric_mode == "max"):
            return
        if state.config.train.save is not None:
            if self._checkpoints.saved() is None:  # train() may have saved this iteration
                self._checkpoints.tolerate(self._save)
            if self._checkpoints.saved() is not None:
                self._checkpoints.record_best()
        logger.info_rank_0(f"iteration {iteration}: the best {name} so far, {value:.6g}")

    def is_out_of_patience(self) -> bool:
        """Whether `early_stop_patience` ends the run, which is logged."""
        patience, best = self._state.config.train.early_stop_patience, self._state.best
        if patience is None or best.evaluations_since < patience:
            return False
        than = "" if best.value is None else f" than {best.value:.6g} of iteration {best.iteration}"
        logger.info_rank_0(
            f"early stop at iteration {self._state.progress.iteration}: "
            f"{counted(best.evaluations_since, 'evaluation')} without a better "
            f"{self._state.config.checkpoint.best_metric}{than}"
        )
        return True

    def any_rank_ends(self, answer: Any) -> bool:
        """Whether `answer`, the result of `on_step`, is False on any rank. Collective."""
        state = self._state
        (count,) = all_reduce_values([float(answer is False)], state.parallel.world.group, state.platform.device)
        return count > 0

    @property
    def metrics(self) -> dict[str, float]:
        """`best_iteration` and `best_value` by name; empty before the first compared evaluation."""
        best = self._state.best
        if self._state.config.checkpoint.best_metric is None or best.iteration is None or best.value is None:
            return {}
        return {"best_iteration": float(best.iteration), "best_value": best.value}


def _value_of(metrics: Mapping[str, float], name: str) -> float:
    """The value of `SET/METRIC` in the result of `evaluate`."""
    known = [key.removeprefix("eval/") for key in metrics]
    if name not in known:
        raise ConfigError(
            f"megatron_wrap.checkpoint.best_metric: the evaluation has no {name}, only {', '.join(known) or 'nothing'}"
            f"{did_you_mean(name, known)}"
        )
    return metrics[f"eval/{name}"]

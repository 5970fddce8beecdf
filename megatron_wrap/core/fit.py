"""`MegatronWrap.fit`: the loop of a whole run, with early stopping and the best checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from megatron_wrap.core.inference import InferenceVerbs
from megatron_wrap.errors import ConfigError, did_you_mean
from megatron_wrap.utils.dist_logger import logger

if TYPE_CHECKING:
    from pathlib import Path

    from typing_extensions import Self

    from megatron_wrap.checkpoint import RunCheckpoints


class FitVerbs(InferenceVerbs):
    """Mixin of `MegatronWrap`, which defines the attributes declared here."""

    batches: Callable[[], Iterator[list[Any]]]
    train: Callable[[list[Any]], dict[str, float]]
    log_last_metrics: Callable[[], None]
    save: Callable[[], Path]
    _run_checkpoints: Callable[[], RunCheckpoints]

    if TYPE_CHECKING:

        @property
        def train_iters(self) -> int:
            """Number of steps of the run."""

    def fit(self, on_step: Callable[[Self, dict[str, float]], Any] | None = None) -> dict[str, float]:
        """The rest of the run in one call: `batches`, `train` and `log_last_metrics` for each step, `evaluate` by
        `eval_interval` and at the end, `save` at the end where `save` is set. Collective.

        With `megatron_wrap.checkpoint.best_metric`, each evaluation by `eval_interval` and that after the last step,
        but not the one before the first step, is compared with the best one so far. A better one is saved, and its
        checkpoint is kept whatever `keep` is. With `early_stop_patience`, the run ends after that many evaluations in a
        row that are not better. A resumed run goes on with the same best value and count.

        Args:
            on_step: called as `on_step(wrap, metrics)` on every rank after each step, with the metrics of `train`. If
                it returns False (None is not False) on any rank, the run ends after this step.

        Returns:
            The metrics of the last evaluation, or of the last step of this call if there are no evaluation sets; the
            same on every rank. With `best_metric`, also `best_iteration` and `best_value`, once there are any.

        Raises:
            ConfigError: the evaluation has no metric `best_metric`. TrainingError, DataError: as `train` and `batches`.
        """
        steps: dict[str, float] = {}
        evaluated: dict[str, float] | None = None  # metrics of an evaluation since the last step
        if not self._is_out_of_patience():
            for batch in self.batches():
                evaluated = self._evaluate_and_compare() if self.evaluation_due else None
                if evaluated is not None and self._is_out_of_patience():
                    break
                steps, evaluated = self.train(batch), None
                self.log_last_metrics()
                if on_step is not None and self._any_is_false(on_step(self, dict(steps))):
                    break
        if evaluated is None:
            is_over = self._ready().progress.iteration >= self.train_iters
            evaluated = self._evaluate_and_compare() if is_over else self.evaluate()
        if self.config.train.save is not None:
            self.save()
        return {**(evaluated or steps), **self._best()}

    def _evaluate_and_compare(self) -> dict[str, float]:
        """Evaluate, and save the state if it is the best one so far."""
        metrics, state, settings = self.evaluate(), self._ready(), self.config.checkpoint
        name, iteration = settings.best_metric, state.progress.iteration
        if name is None:
            return metrics
        value = self._same_on_all_ranks(metric_of(metrics, name))
        if iteration == 0 or not state.best.compare(iteration, value, largest=settings.best_metric_mode == "max"):
            return metrics
        folder = self.config.train.save
        where = ""
        if folder is not None:
            checkpoints = self._run_checkpoints()
            path = checkpoints.saved_in(folder) or self.save()  # train() may have saved this iteration
            checkpoints.record_best(folder)
            where = f"; its checkpoint: {path}"
        logger.info_rank_0(f"iteration {iteration}: the best {name} so far, {value:.6g}{where}")
        return metrics

    def _is_out_of_patience(self) -> bool:
        patience, best = self.config.train.early_stop_patience, self._ready().best
        if patience is None or best.evaluations_since < patience:
            return False
        than = "" if best.value is None else f" than {best.value:.6g} of iteration {best.iteration}"
        logger.info_rank_0(
            f"early stop at iteration {self._ready().progress.iteration}: {best.evaluations_since} evaluations without "
            f"a better {self.config.checkpoint.best_metric}{than}"
        )
        return True

    def _best(self) -> dict[str, float]:
        best = self._ready().best
        if self.config.checkpoint.best_metric is None or best.iteration is None or best.value is None:
            return {}
        return {"best_iteration": float(best.iteration), "best_value": best.value}

    def _any_is_false(self, answer: Any) -> bool:
        from megatron_wrap.parallel.collectives import all_reduce_values

        state = self._ready()
        (count,) = all_reduce_values([float(answer is False)], state.parallel.world.group, state.platform.device)
        return count > 0

    def _same_on_all_ranks(self, value: float) -> float:
        """The value of global rank 0: all ranks must decide alike."""
        from megatron_wrap.parallel.collectives import broadcast_object

        return float(broadcast_object(value, source_rank=0))


def metric_of(metrics: Mapping[str, float], name: str) -> float:
    """The value of `SET/METRIC` in the result of `evaluate`.

    Raises:
        ConfigError: there is none.
    """
    known = [key.removeprefix("eval/") for key in metrics]
    if name not in known:
        raise ConfigError(
            f"megatron_wrap.checkpoint.best_metric: the evaluation has no {name}, only {', '.join(known) or 'nothing'}"
            f"{did_you_mean(name, known)}"
        )
    return metrics[f"eval/{name}"]

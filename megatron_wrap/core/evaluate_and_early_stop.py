"""Evaluations of a run: their sets and records, the best one and its checkpoint, the end of a run that no longer
improves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_wrap.checkpoint.run_checkpoints import RunCheckpoints
from megatron_wrap.core.records import RunRecords
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.errors import ConfigError
from megatron_wrap.evaluation.evaluate import evaluate
from megatron_wrap.generation.generate import sample_texts
from megatron_wrap.metrics.number_format import counted
from megatron_wrap.nearest_names import did_you_mean
from megatron_wrap.parallel.collectives import all_reduce_values, broadcast_object
from megatron_wrap.utils.dist_logger import logger

_LARGEST_LOGARITHM = 20.0
"""Largest logarithm of a perplexity, as in Megatron-LM's evaluate_and_print_results (megatron/training/training.py)."""


def evaluate_sets(
    state: TrainingState, tokenizer: Any, records: RunRecords, sets: Mapping[str, Sequence[Any] | None]
) -> dict[str, float]:
    """Metrics of each set by `eval/NAME/METRIC`; recorded, as are completions of `sample_prompts`. Collective.

    Args:
        sets: name -> samples, or None on ranks other than 0.
    """
    train, iteration = state.config.train, state.progress.iteration
    metrics: dict[str, float] = {}
    for name, samples in sets.items():
        if train.eval_iters and samples is not None:
            samples = samples[: train.eval_iters * train.global_batch_size]
        set_metrics = evaluate(state, name, samples)
        if state.flow.reports_perplexity:
            log_perplexity = set_metrics.get("nll_loss", set_metrics["loss"])
            set_metrics["perplexity"] = math.exp(min(log_perplexity, _LARGEST_LOGARITHM))
        metrics |= {f"eval/{name}/{key}": value for key, value in set_metrics.items()}
    if metrics:
        records.evaluation(iteration, metrics)
    if train.sample_prompts:
        records.sample_texts(iteration, sample_texts(state, tokenizer, train.sample_prompts))
    return metrics


def compare_with_best(
    state: TrainingState, checkpoints: RunCheckpoints, metrics: Mapping[str, float], save: Callable[[], Path]
) -> None:
    """Compare an evaluation with the best one so far by `best_metric`, and save a better one. All ranks take the same
    decisions. Collective.

    Args:
        metrics: result of `evaluate` at the current iteration; an evaluation before the first step does not count.
        save: saves a checkpoint of the run.

    Raises:
        ConfigError: the evaluation has no metric `best_metric`.
    """
    settings, iteration = state.config.checkpoint, state.progress.iteration
    name = settings.best_metric
    if name is None:
        return
    value = float(broadcast_object(_value_of(metrics, name), source_rank=0))
    if iteration == 0 or not state.best.compare(iteration, value, largest=settings.best_metric_mode == "max"):
        return
    if state.config.train.save is not None:
        if checkpoints.saved() is None:  # train() may have saved this iteration
            checkpoints.tolerate(save)
        if checkpoints.saved() is not None:
            checkpoints.record_best()
    logger.info_rank_0(f"iteration {iteration}: the best {name} so far, {value:.6g}")


def _value_of(metrics: Mapping[str, float], name: str) -> float:
    """The value of `SET/METRIC` in the result of `evaluate`."""
    known = [key.removeprefix("eval/") for key in metrics]
    if name not in known:
        raise ConfigError(
            f"megatron_wrap.checkpoint.best_metric: the evaluation has no {name}, only {', '.join(known) or 'nothing'}"
            f"{did_you_mean(name, known)}"
        )
    return metrics[f"eval/{name}"]


def is_out_of_patience(state: TrainingState) -> bool:
    """Whether `early_stop_patience` ends the run, which is logged."""
    patience, best = state.config.train.early_stop_patience, state.best
    if patience is None or best.evaluations_since < patience:
        return False
    than = "" if best.value is None else f" than {best.value:.6g} of iteration {best.iteration}"
    logger.info_rank_0(
        f"early stop at iteration {state.progress.iteration}: {counted(best.evaluations_since, 'evaluation')} without "
        f"a better {state.config.checkpoint.best_metric}{than}"
    )
    return True


def any_rank_ends(state: TrainingState, answer: Any) -> bool:
    """Whether `answer`, the result of `on_step`, is False on any rank. Collective."""
    (count,) = all_reduce_values([float(answer is False)], state.parallel.world.group, state.platform.device)
    return count > 0


def best_metrics(state: TrainingState) -> dict[str, float]:
    """`best_iteration` and `best_value` by name; empty before the first compared evaluation."""
    best = state.best
    if state.config.checkpoint.best_metric is None or best.iteration is None or best.value is None:
        return {}
    return {"best_iteration": float(best.iteration), "best_value": best.value}

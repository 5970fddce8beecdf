"""Evaluations of a run: when they are due, their sets, and their records."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_wrap.core.step_reporting import RunRecords
from megatron_wrap.data.chat.encode import prompt_token_ids
from megatron_wrap.engine.state.state import TrainingState
from megatron_wrap.evaluation.evaluate import evaluate
from megatron_wrap.generation.generate import sample_texts

_LARGEST_LOGARITHM = 20.0
"""Largest logarithm of a perplexity, as in Megatron-LM's evaluate_and_print_results (megatron/training/training.py)."""


class RunEvaluation:
    """Evaluates the current weights; `MegatronWrap` has the same methods.

    Args:
        state: training state of the run.
        tokenizer: the run's Hugging Face tokenizer, or None.
        records: records of the run, which receive each evaluation.
        evaluation_sets: opens the sets of the configuration: name -> samples.
    """

    def __init__(
        self,
        state: TrainingState,
        tokenizer: Any,
        records: RunRecords,
        evaluation_sets: Callable[[], Mapping[str, Sequence[Any]]],
    ) -> None:
        self._state, self._tokenizer, self._records = state, tokenizer, records
        self._evaluation_sets = evaluation_sets
        for prompt in state.config.train.sample_prompts or ():  # a mistake is found before the first step
            prompt_token_ids(tokenizer, prompt, state.shape.vocab_size)

    @property
    def is_due(self) -> bool:
        """Whether `eval_interval` asks for an evaluation at this iteration."""
        interval = self._state.config.train.eval_interval
        return interval is not None and self._state.progress.iteration % interval == 0

    def evaluate(self, sets: Mapping[str, Sequence[Any] | None] | None) -> dict[str, float]:
        """Metrics of each set."""
        state, train = self._state, self._state.config.train
        metrics: dict[str, float] = {}
        for name, samples in (self._evaluation_sets() if sets is None else sets).items():
            if train.eval_iters and samples is not None:
                samples = samples[: train.eval_iters * train.global_batch_size]
            of_set = evaluate(state, name, samples)
            if state.flow.reports_perplexity:
                of_set["perplexity"] = math.exp(min(of_set.get("nll_loss", of_set["loss"]), _LARGEST_LOGARITHM))
            metrics |= {f"eval/{name}/{key}": value for key, value in of_set.items()}
        if metrics:
            self._records.evaluation(state.progress.iteration, metrics)
        if train.sample_prompts:
            texts = sample_texts(state, self._tokenizer, train.sample_prompts)
            self._records.sample_texts(state.progress.iteration, texts)
        return metrics

"""Methods of `MegatronWrap` that do not change the state: evaluate, forward, generate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_wrap.config import RunConfig
    from megatron_wrap.core.records import RunRecords
    from megatron_wrap.engine.generate import Completion
    from megatron_wrap.engine.state import TrainingState


class InferenceVerbs:
    """Mixin of `MegatronWrap`, which defines the attributes declared here."""

    config: RunConfig
    tokenizer: Any
    _records: RunRecords

    if TYPE_CHECKING:

        def _ready(self) -> TrainingState: ...

        def _evaluation_sets(self) -> Mapping[str, Sequence[Any]]: ...

    def evaluate(self, sets: Mapping[str, Sequence[Any] | None] | None = None) -> dict[str, float]:
        """The objective and the flow's metrics over named evaluation sets; the state is unchanged. Collective.

        Args:
            sets: name -> samples, on every rank or only on global rank 0 with None on the others; default: the
                evaluation sets of `megatron_wrap.data`. At most `eval_iters` global batches of each set are used.

        Returns:
            `eval/NAME/loss`, `eval/NAME/METRIC` and, if the flow reports it, `eval/NAME/perplexity` for each set.
            They are also logged, and so are completions of `megatron_lm.train.common.sample_prompts`.
        """
        from megatron_wrap.engine.forward import evaluate

        state = self._ready()
        chosen: Mapping[str, Sequence[Any] | None] = self._evaluation_sets() if sets is None else sets
        metrics: dict[str, float] = {}
        for name, samples in chosen.items():
            limit = self.config.train.eval_iters
            if limit and samples is not None:
                samples = samples[: limit * self.config.train.global_batch_size]
            found = evaluate(state, name, samples)
            if state.flow.reports_perplexity:
                found["perplexity"] = math.exp(min(found["loss"], 20.0))  # Megatron-LM's evaluate_and_print_results
            metrics |= {f"eval/{name}/{key}": value for key, value in found.items()}
        if metrics:
            self._records.evaluation(state.progress.iteration, metrics)
        self._log_sample_text()
        return metrics

    @property
    def evaluation_due(self) -> bool:
        """Whether an evaluation is due by `eval_interval`: before the first step and after each interval."""
        interval = self.config.train.eval_interval
        return bool(interval) and self._ready().progress.iteration % int(interval or 1) == 0

    def forward(self, samples: Sequence[Any] | None) -> list[dict[str, Tensor]]:
        """The outputs of the flow's `calculate_outputs` for each sample, without a graph. Collective.

        Returns:
            For each sample, in order, a dictionary of CPU tensors; the same on every rank.
        """
        from megatron_wrap.engine.forward import forward

        return forward(self._ready(), samples)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | Sequence[Mapping[str, Any]]] | None,
        max_new_tokens: int = 64,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str | int] = (),
        batch_size: int = 8,
        n: int = 1,
        log_probs: bool = False,
    ) -> list[Completion]:
        """Complete prompts with the current weights, on any layout. Collective.

        Args:
            prompts: texts, lists of messages (rendered with the chat template) or lists of token ids; on every rank, or
                only on global rank 0 with None on the others.
            max_new_tokens: maximum number of tokens of a completion.
            temperature: 0 chooses the most probable token, as transformers does with do_sample=False; otherwise logits
                are divided by it and a token is sampled.
            top_p: sample from the most probable tokens of this total probability, as in transformers; None: from all.
            top_k: sample from the k most probable tokens, as in transformers; None: from all.
            seed: of the sampling; None: `megatron_lm.train.common.seed`. The same seed returns the same completions on
                every layout and in every batch, so a rollout loop must pass another seed in each call.
            stop: texts and token ids that end a completion, in addition to the model's end tokens.
            batch_size: completions that a replica computes at a time; the KV cache has room for that many sequences.
            n: completions of each prompt, drawn independently. Equal prompts in a batch are processed once.
            log_probs: return the log-probability of each new token given those before it, in nats, before temperature,
                top_p and top_k; as `rollout_log_probs` of gpt_grpo when the temperature is 1.

        Returns:
            For each prompt `n` times, in order and on every rank, {"text": ..., "token_ids": [...], "finish_reason":
            "stop" or "length"}, without the prompt; with `log_probs` also "log_probs", one for each of `token_ids`. The
            text is cut before a stop text, and None without a tokenizer.

        Raises:
            DataError: a prompt or an argument is wrong.
        """
        from megatron_wrap.engine.generate import generate
        from megatron_wrap.engine.sampling import SamplingRule

        rule = SamplingRule(temperature, top_k, top_p)
        seed = self.config.train.seed if seed is None else seed
        return generate(
            self._ready(), self.tokenizer, prompts, max_new_tokens, rule, seed, stop, batch_size, n, log_probs
        )

    def _log_sample_text(self) -> None:
        prompts = self.config.train.sample_prompts
        if not prompts:
            return
        from megatron_wrap.engine.generate import sample_texts

        state = self._ready()
        self._records.sample_texts(state.progress.iteration, sample_texts(state, self.tokenizer, prompts))

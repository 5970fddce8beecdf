"""Rollouts for the tests of `gpt_grpo`, and trl's GRPOTrainer on them, as an oracle."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _dpo_runs import CONFIG, DPO, TRAIN, steps
from _started import started
from _trl_runs import in_order, number_tokenizer, plain_arguments

from megatron_wrap.config import RunConfig

BATCH, GROUP, STEPS, EOS = 8, 4, 10, 1
GRPO = (*DPO, "megatron_wrap.flow.__select__=gpt_grpo", f"{TRAIN}.global_batch_size={BATCH}")
"""Steps of two groups of four responses."""


def rollouts(count: int = BATCH * STEPS) -> list[dict[str, Any]]:
    """Responses of unequal lengths with a part that the policy did not generate; every third is truncated. One group
    has equal rewards."""
    generator = random.Random(7)
    samples = []
    for index in range(count):
        if index % GROUP == 0:
            prompt = [generator.randrange(3, 500) for _ in range(generator.randint(2, 12))]
        response = [generator.randrange(3, 500) for _ in range(generator.randint(3, 20))]
        response = response if index % 3 == 0 else [*response, EOS]
        start = generator.randrange(1, len(response))
        mask = [int(not start <= token < start + 2) for token in range(len(response))]
        samples.append(
            {
                "prompt_ids": prompt,
                "response_ids": response,
                "response_mask": mask,
                "reward": 1.0 if index // GROUP == 3 else round(generator.gauss(0, 1), 3),
                "group": index // GROUP,
                "truncated": response[-1] != EOS,
            }
        )
    return samples


def with_log_probs(samples: Sequence[dict[str, Any]], model: Any, noise: dict[str, float]) -> list[dict[str, Any]]:
    """The samples with a transformers model's log-probabilities of the responses plus noise, by key."""
    generator, added = torch.Generator().manual_seed(3), []
    for sample in samples:
        ids = torch.tensor([sample["prompt_ids"] + sample["response_ids"]])
        with torch.no_grad():
            of_ids = model(ids).logits[0, :-1].log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        of_response = of_ids[len(sample["prompt_ids"]) - 1 :]
        noisy = {
            key: (of_response + size * torch.randn(of_response.shape, generator=generator))
            for key, size in noise.items()
        }
        added.append({**sample, **{key: value.clamp(max=-1e-3).tolist() for key, value in noisy.items()}})
    return added


def train(overrides: Sequence[str], samples: Sequence[Any], until: int = STEPS) -> list[dict[str, float]]:
    """Train to iteration `until`; returns the metrics of each step."""
    return steps([*GRPO, *overrides], samples, until)


def several_updates(overrides: Sequence[str], samples: Sequence[Any]) -> list[dict[str, float]]:
    """Two updates on one rollout, whose log-probabilities come from `wrap.forward` before them."""
    with started(CONFIG, [*GRPO, *overrides]) as wrap:
        batch = list(samples[:BATCH])
        for sample, outputs in zip(batch, wrap.forward(batch), strict=True):
            sample["old_log_probs"] = outputs["log_probs"]
        return [dict(wrap.train(batch)) for _ in range(2)]


def steps_of_trl(
    config: RunConfig,
    model: Any,
    samples: Sequence[dict[str, Any]],
    folder: Path,
    reference: Any = None,
    beta: float = 0.0,
    **options: Any,
) -> list[dict[str, float]]:
    """The metrics of each step of trl's GRPOTrainer, which gets the responses by its `rollout_func` and computes
    advantages, masks, weights and losses itself, with the whole step in one micro-batch.

    Args:
        options: of GRPOConfig. With `vllm_importance_sampling_mode` the responses have the samples'
            `rollout_log_probs`, and trl computes the old ones.
    """
    from trl import GRPOConfig
    from trl.trainer.utils import add_fused_lm_head

    arguments = GRPOConfig(
        per_device_train_batch_size=BATCH,
        num_generations=GROUP,
        max_steps=len(samples) // BATCH,
        shuffle_dataset=False,
        **plain_arguments(config, folder),
        **options,
    )
    trainer = _trainer(samples, model, arguments, config.arch.vocab_size or 0)
    if reference is not None:  # as the trainer's own, which an argument would load from the hub
        add_fused_lm_head(reference, temperature=trainer.temperature)
        trainer.beta, trainer.ref_model = beta, reference
    if "vllm_importance_sampling_mode" in options:
        trainer.use_vllm, trainer._last_loaded_step = True, 0
        trainer.vllm_generation = mock.Mock()  # the engine that trl sends weights to
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "entropy" in entry]
    return [{**entry, "loss": loss} for entry, loss in zip(entries, trainer.losses, strict=True)]


def _trainer(samples: Sequence[dict[str, Any]], model: Any, arguments: Any, vocab_size: int) -> Any:
    from datasets import Dataset
    from trl import GRPOTrainer

    class OfRollouts(in_order(GRPOTrainer)):  # type: ignore[misc]
        losses: list[float] = []

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            output = super()._generate_and_score_completions(inputs)
            samples_of_rows = [samples[int(row["prompt"])] for row in inputs]
            if "old_log_probs" in samples_of_rows[0]:
                rows = [torch.tensor(sample["old_log_probs"]) for sample in samples_of_rows]
                output["old_per_token_logps"] = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
            return output

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            self.losses.append(float(loss.detach()))
            return loss

    def rollouts_of(prompts: list[str], *_: Any) -> dict[str, Any]:
        of_group = [samples[int(prompt)] for prompt in prompts]
        known = {"prompt_ids": "prompt_ids", "completion_ids": "response_ids", "env_mask": "response_mask"}
        known |= {"logprobs": "rollout_log_probs"} if "rollout_log_probs" in of_group[0] else {}
        return {"logprobs": None} | {name: [sample[key] for sample in of_group] for name, key in known.items()}

    return OfRollouts(
        model=model,
        reward_funcs=lambda prompts, **_: [samples[int(prompt)]["reward"] for prompt in prompts],
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": str(index)} for index in range(len(samples))]),
        processing_class=number_tokenizer(vocab_size),
        rollout_func=rollouts_of,
    )

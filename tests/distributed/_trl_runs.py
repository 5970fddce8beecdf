"""trl's trainers on the weights and samples of a test, as an oracle."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "model"))
from transformers_models import build, load_all, to_llama_like

from megatron_wrap.config import RunConfig

BATCH = 4
"""Samples of an optimizer step."""


def model_of(config: RunConfig, weights: Mapping[str, numpy.ndarray]) -> Any:
    """transformers' Llama of a run with unsharded weights by our names."""
    from transformers import LlamaForCausalLM

    model = build(LlamaForCausalLM, config.arch, to_llama_like)
    ours = {name: torch.from_numpy(weight) for name, weight in weights.items()}
    load_all(model, to_llama_like(ours, config))
    return model


def on_tokens(trainer: type) -> type:
    """A trl trainer whose samples are tokenized already (DPOTrainer, KTOTrainer, RewardTrainer)."""

    class OnTokens(trainer):
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

    return OnTokens


def on_numbers(trainer: type) -> type:
    """A trl trainer on texts of token numbers, separated by spaces (CPOTrainer, ORPOTrainer, which always tokenize)."""

    class OnNumbers(trainer):
        def tokenize_row(self, feature: dict[str, str], model: Any = None) -> dict[str, Any]:
            prompt = [int(word) for word in feature["prompt"].split()]
            row: dict[str, Any] = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
            for answer in ("chosen", "rejected"):
                ids = [int(word) for word in feature[answer].split()]
                row[f"{answer}_input_ids"] = prompt + ids
                row[f"{answer}_attention_mask"] = [1] * len(prompt + ids)
                row[f"{answer}_labels"] = [-100] * len(prompt) + ids
            return row

    return OnNumbers


def as_text(pairs: Sequence[dict[str, list[int]]]) -> list[dict[str, str]]:
    """Pairs of token numbers as texts for `on_numbers`."""
    return [{key: " ".join(map(str, pair[f"{key}_ids"])) for key in ("prompt", "chosen", "rejected")} for pair in pairs]


def in_order(trainer: type) -> type:
    """A trl trainer that takes the samples in their order."""
    from torch.utils.data import SequentialSampler

    class InOrder(trainer):
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

    return InOrder


def word_tokenizer(words: Mapping[str, int], **special: str) -> Any:
    """A tokenizer of words between spaces; the first word stands for unknown ones."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(dict(words), unk_token=next(iter(words))))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def number_tokenizer(count: int) -> Any:
    """A tokenizer of the numbers below `count`; 1 ends a text."""
    return word_tokenizer({str(number): number for number in range(count)}, pad_token="0", eos_token="1")


def plain_arguments(config: RunConfig, folder: str | Path) -> dict[str, Any]:
    """Arguments of each trl trainer: the run's optimizer, fp32 on the CPU, metrics of each step."""
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    return {
        "output_dir": str(folder),
        "learning_rate": config.learning_rate.lr,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": config.optimizer.clip_grad,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
    }


def steps_of_trl(
    trainer: type,
    settings: type,
    config: RunConfig,
    model: Any,
    samples: Sequence[Any],
    folder: str | Path,
    reference: Any = None,
    micro_batches: int = 1,
    **options: Any,
) -> list[dict[str, float]]:
    """The metrics of each optimizer step of a trl trainer, on samples in their order, BATCH a step.

    Args:
        trainer: from `on_tokens` or `on_numbers`.
        settings: the trainer's configuration class, such as DPOConfig.
        config: the run that it is compared with; defines the vocabulary and the optimizer.
        reference: the reference model of a trainer that has one.
        micro_batches: of a step, of equal size.
        options: further arguments of `settings`.
    """
    from datasets import Dataset

    arguments = {
        "per_device_train_batch_size": BATCH // micro_batches,
        "gradient_accumulation_steps": micro_batches,
        "max_steps": len(samples) // BATCH,
        "remove_unused_columns": False,
        "max_length": None,
        **plain_arguments(config, folder),
        **options,
    }
    made = in_order(trainer)(
        model=model,
        **({} if reference is None else {"ref_model": reference}),
        args=settings(**arguments),
        train_dataset=Dataset.from_list(list(samples)),
        processing_class=number_tokenizer(config.arch.vocab_size or 0),
    )
    made.train()
    steps = [entry for entry in made.state.log_history if "loss" in entry]
    assert len(steps) == len(samples) // BATCH
    return steps

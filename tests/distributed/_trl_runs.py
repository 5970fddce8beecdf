"""trl's trainers on the weights and samples of a test, as an oracle."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from transformers_models import build, load_all, to_llama_like

from megatron_wrap.config import RunConfig


def steps_of_trl(
    trainer: type,
    settings: type,
    config: RunConfig,
    weights: Mapping[str, numpy.ndarray],
    samples: Sequence[Any],
    folder: Path,
    vocab: int,
    batch: int,
    **options: Any,
) -> list[dict[str, float]]:
    """The metrics of each optimizer step of a trl trainer from the weights, on tokenized samples in their order.

    Args:
        trainer, settings: such as DPOTrainer and DPOConfig.
        config: the run that it is compared with; defines the model and the optimizer.
        weights: unsharded, by our names; the reference has the same.
        batch: samples of a step, in one micro-batch.
        options: of `settings`.
    """
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from torch.utils.data import SequentialSampler
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    class InOrder(trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> SequentialSampler:
            return SequentialSampler(self.train_dataset)

        def _prepare_dataset(self, dataset: Dataset, *_: Any) -> Dataset:
            return dataset  # already tokenized

    ours = {name: torch.from_numpy(weight) for name, weight in weights.items()}
    model, reference = (build(LlamaForCausalLM, config.arch, to_llama_like) for _ in range(2))
    for one in (model, reference):
        load_all(one, to_llama_like(ours, config))
    words = {str(number): number for number in range(vocab)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="0", eos_token="1"
    )
    arguments = settings(
        output_dir=str(folder),
        per_device_train_batch_size=batch,
        max_steps=len(samples) // batch,
        learning_rate=config.learning_rate.lr,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=config.optimizer.clip_grad,
        logging_steps=1,
        max_length=None,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        **options,
    )
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    made = InOrder(
        model, reference, args=arguments, train_dataset=Dataset.from_list(list(samples)), processing_class=tokenizer
    )
    made.train()
    return [entry for entry in made.state.log_history if "loss" in entry]

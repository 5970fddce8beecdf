"""Functions that the tests of indexed data run on each rank, and the files that they read."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from _checkpoint_runs import TRAIN, VOCAB, started

from megatron_wrap.testing.ranks import import_for_ranks

DATA, FLOW = "megatron_wrap.data", "megatron_wrap.flow"
EOD = 2


def write_prefix(prefix: Path, count: int, seed: int, vocab: int = VOCAB) -> str:
    """Random documents of unequal lengths that end with EOD, by Megatron-Core's own writer; returns the prefix."""
    import torch

    import_for_ranks()
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    generator = numpy.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=numpy.uint16)
    for length in generator.integers(4, 60, count).tolist():
        ids = [*generator.integers(3, vocab, length).tolist(), EOD]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def keys_of(train: str, *further: str) -> tuple[str, ...]:
    """Overrides that select indexed data and its flow."""
    selected = (f"{DATA}.__select__=indexed", f"{FLOW}.__select__=gpt_pretrain", f"{DATA}.eod_token={EOD}")
    return (*selected, f"{DATA}.train={train}", *further)


def train(
    folder: Path, overrides: Sequence[str], until: int, save_at: int | None = None, die_at: int | None = None
) -> list[Any]:
    """Train to iteration `until`; of each step the first tokens of its samples, loss and learning rate. With `die_at`,
    each rank ends by SIGKILL after that step."""
    taken = []
    with started(folder, (f"{TRAIN}.train_iters=30", *overrides)) as wrap:
        for batch in wrap.batches():
            if wrap.iteration == until:
                break
            ids = [(sample["source"], *sample["tokens"][:6].tolist()) for sample in batch]
            (rate,) = {group["lr"] for group in wrap.state.optimizer.param_groups}
            metrics = wrap.train(batch)
            assert rate == pytest.approx(metrics["learning_rate"]), wrap.iteration  # what the optimizer uses
            taken.append((ids, metrics["loss"], rate))
            if wrap.iteration == save_at:
                wrap.save()
            if wrap.iteration == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
    return taken


def train_from(folder: str, config: Path, overrides: Sequence[str]) -> tuple[list[tuple[float, float]], float]:
    """(loss, gradient norm) of each step from a Hugging Face folder, and the loss of the evaluation set."""
    from megatron_wrap.core import MegatronWrap

    with MegatronWrap.from_pretrained(folder, config, overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        result = []
        for batch in wrap.batches():
            metrics = wrap.train(batch)
            result.append((metrics["loss"], metrics["grad_norm"]))
        return result, wrap.evaluate()["eval/validation/loss"]


def megatron_windows(prefix: str, seq_length: int, vocab: int, count: int) -> tuple[Any, Any]:
    """Megatron-Core's training and validation sets of split 90,10,0, straight from its API."""
    import_for_ranks()  # Megatron-Core is imported for the CPU
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        vocab_size, eod, unique_identifiers = vocab, EOD, {"name": "theirs"}

    config = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=seq_length,
        tokenizer=Tokenizer(),
        blend=([prefix], None),
        split="90,10,0",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    training, validation, _ = BlendedMegatronDatasetBuilder(
        GPTDataset, [count, None, None], lambda: True, config
    ).build()
    return training, validation

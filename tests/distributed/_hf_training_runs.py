"""Supervised fine-tuning from a Hugging Face folder, by ranks and by a plain transformers loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import _bridge_runs as runs
import numpy
from _started import from_folder, train_until

BATCH, RATE, WARMUP, DECAY, CLIP = 4, 2e-3, 3, 0.1, 1.0


def settings(steps: int) -> tuple[str, ...]:
    """Overrides of a run of `steps` steps that `train_transformers` repeats."""
    return (
        f"megatron_lm.train.common.train_iters={steps}",
        f"megatron_lm.train.common.global_batch_size={BATCH}",
        "megatron_lm.train.common.micro_batch_size=2",
        f"megatron_lm.train.learning-rate.lr={RATE}",
        "megatron_lm.train.learning-rate.min_lr=0.0",
        "megatron_lm.train.learning-rate.lr_decay_style=cosine",
        f"megatron_lm.train.learning-rate.lr_warmup_iters={WARMUP}",
        f"megatron_lm.train.optimizer.weight_decay={DECAY}",
        f"megatron_lm.train.optimizer.clip_grad={CLIP}",
        "megatron_lm.train.optimizer.adam_beta1=0.9",
        "megatron_lm.train.optimizer.adam_beta2=0.95",
        "megatron_lm.train.optimizer.adam_eps=1e-8",
        # transformers leaves the bias that chooses experts as it is
        "megatron_lm.model.arch.moe_router_bias_update_rate=0.0",
    )


def samples(count: int, seed: int) -> list[dict[str, list[int]]]:
    """Tokenized samples of unequal lengths; some labels are -100."""
    generator = numpy.random.default_rng(seed)
    made = []
    for _ in range(count):
        ids = generator.integers(0, 40, int(generator.integers(20, 66)))  # part of the vocabulary, so the loss falls
        made.append(
            {"input_ids": ids.tolist(), "labels": numpy.where(generator.random(len(ids)) < 0.6, ids, -100).tolist()}
        )
    return made


def their_loss(model: Any, batch: list[dict[str, list[int]]]) -> Any:
    """transformers' loss of one padded batch; transformers shifts the labels."""
    import torch

    longest = max(len(sample["input_ids"]) for sample in batch)

    def padded(rows: list[list[int]], value: int) -> Any:
        return torch.tensor([row + [value] * (longest - len(row)) for row in rows])

    return model(
        input_ids=padded([sample["input_ids"] for sample in batch], 0),
        attention_mask=padded([[1] * len(sample["input_ids"]) for sample in batch], 0),
        labels=padded([sample["labels"] for sample in batch], -100),
    ).loss


def train_transformers(folder: Path, steps: int, muon: bool = False) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of each step.

    Args:
        muon: torch's Muon for the matrices of the layers, with its iteration in fp32.
    """
    import torch
    from transformers import get_cosine_schedule_with_warmup

    model = runs.transformers_model(folder, attn_implementation="eager")
    # biases of stacked experts are matrices
    is_matrix = {p: p.dim() > 1 and "bias" not in name for name, p in model.named_parameters()}
    of_muon = [p for name, p in model.named_parameters() if muon and p.dim() == 2 and ".layers." in name]
    matrices = [
        parameter for parameter, matrix in is_matrix.items() if matrix and not any(parameter is p for p in of_muon)
    ]
    vectors = [parameter for parameter, matrix in is_matrix.items() if not matrix]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizers = [torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)]
    if muon:
        options = {"weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
        optimizers.append(torch.optim.Muon(of_muon, lr=RATE, **options))
    schedules = [get_cosine_schedule_with_warmup(optimizer, WARMUP, steps) for optimizer in optimizers]
    batches = samples(steps * BATCH, seed=31)
    actual = []
    for step in range(steps):
        loss = their_loss(model, batches[step * BATCH : (step + 1) * BATCH])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):  # where Muon rounds to bf16
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        actual.append((loss.item(), norm.item()))
    return actual


def train_ours(
    folder: str, overrides: tuple[str, ...], outputs: str, steps: int, prompts: Sequence[list[int]] = ()
) -> Any:
    """(loss, gradient norm) of each step, the final evaluation loss, and greedy completions of `prompts` before
    training; writes `outputs`/model."""
    with from_folder(folder, (*settings(steps), *overrides), outputs) as wrap:
        greedy = [completion["token_ids"] for completion in wrap.generate(list(prompts), max_new_tokens=12)]
        taken = train_until(wrap, samples(steps * BATCH, seed=31), steps)
        evaluation = wrap.evaluate({"set": samples(6, seed=32)})["eval/set/loss"]
        wrap.save_pretrained(f"{outputs}/model")
    return [(step["loss"], step["grad_norm"]) for step in taken], evaluation, greedy

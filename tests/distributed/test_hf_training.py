"""Thirty steps of supervised fine-tuning from one Hugging Face folder, compared with a transformers model, torch's
AdamW and gradient clipping and transformers' cosine schedule. Loss and gradient norm agree at every step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _bridge_runs as runs
import numpy
import pytest
from _covering import covering

STEPS, BATCH, RATE, WARMUP, DECAY, CLIP = 30, 4, 2e-3, 3, 0.1, 1.0
PARALLEL = "megatron_lm.model.parallel."
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "tp2-pp2": (4, (f"{PARALLEL}tensor_model_parallel_size=2", f"{PARALLEL}pipeline_model_parallel_size=2")),
    "cp2": (2, (f"{PARALLEL}context_parallel_size=2",)),
}
SETTINGS = (
    f"megatron_lm.train.common.train_iters={STEPS}",
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


def train_transformers(folder: Path) -> list[tuple[float, float]]:
    """(loss, gradient norm before clipping) of each step."""
    import torch
    from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=DECAY)
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP, STEPS)
    batches = samples(STEPS * BATCH, seed=31)
    actual = []
    for step in range(STEPS):
        loss = their_loss(model, batches[step * BATCH : (step + 1) * BATCH])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        actual.append((loss.item(), norm.item()))
    return actual


def train_ours(folder: str, overrides: tuple[str, ...], outputs: str) -> Any:
    """(loss, gradient norm) of each step, and the final evaluation loss; writes `outputs`/model."""
    from megatron_wrap.core import MegatronWrap

    settings = (*SETTINGS, *overrides, f"megatron_wrap.logger.output_dir={outputs}")
    batches = samples(STEPS * BATCH, seed=31)
    with MegatronWrap.from_pretrained(folder, runs.CONFIG, settings) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        actual = []
        for step in range(STEPS):
            metrics = wrap.train(batches[step * BATCH : (step + 1) * BATCH])
            actual.append((metrics["loss"], metrics["grad_norm"]))
        evaluation = wrap.evaluate({"set": samples(6, seed=32)})["eval/set/loss"]
        wrap.save_pretrained(f"{outputs}/model")
    return actual, evaluation


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """theirs(family) -> the folder, and transformers' (loss, norm) of each step."""
    made: dict[str, tuple[Path, list[tuple[float, float]]]] = {}

    def train(family: str) -> tuple[Path, list[tuple[float, float]]]:
        if family not in made:
            folder = runs.make_folder(family, tmp_path_factory.mktemp(family))
            made[family] = folder, train_transformers(folder)
        return made[family]

    return train


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        *covering((family, layout) for family in ("llama", "qwen3") for layout in LAYOUTS),
        pytest.param("smollm3", "tp2-pp2", marks=pytest.mark.matrix),
        pytest.param("seed-oss", "cp2", marks=pytest.mark.matrix),
    ],
)
def test_thirty_steps_agree_with_transformers(family, layout, ranks, theirs, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    folder, expected = theirs(family)
    world_size, overrides = LAYOUTS[layout]
    actual, evaluation = ranks(world_size).run(train_ours, str(folder), overrides, str(tmp_path))[0]
    assert max(norm for _, norm in expected) > CLIP  # gradients were clipped
    assert expected[-1][0] < 0.9 * expected[0][0]
    numpy.testing.assert_allclose(actual, expected, rtol=1e-5)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        assert their_loss(model.eval(), samples(6, seed=32)).item() == pytest.approx(evaluation, rel=1e-5)

"""Training on one GPU with both implementations, and checkpoints between them; skipped without a GPU."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import numpy
from _implementations import HAS_TE, IMPLEMENTATIONS

from megatron_wrap.core import MegatronWrap
from megatron_wrap.engine.step import gradients_of_batch
from megatron_wrap.model.chunks import bare_model
from megatron_wrap.platform.megatron_core.kernels import LayerKernels, use
from megatron_wrap.platform.megatron_core.undoable_changes import Replacements

CONFIG = Path(__file__).parents[2] / "scripts/benchmark/overhead.yaml"


def samples(count: int) -> list[dict]:
    """Random tokens that fill the context of 256."""
    tokens = numpy.random.default_rng(3).integers(0, 4096, (count, 257))
    return [{"input_ids": row.tolist(), "loss_mask": [1] * 257} for row in tokens]


def train(folder: Path, implementation: str, steps: int, dtype: str = "bf16", save: bool = False, *more: str) -> tuple:
    """(losses of the steps, loss of an evaluation before them)."""
    overrides = [
        *more,
        f"megatron_lm.model.arch.transformer_impl={implementation}",
        f"megatron_lm.train.dtype.__select__={dtype}",
        f"megatron_lm.train.common.save={folder}/checkpoints",
        f"megatron_wrap.logger.output_dir={folder}",
    ]
    with MegatronWrap(CONFIG, overrides=overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        data = samples(64)
        before = wrap.evaluate({"some": data[:8]})["eval/some/loss"]
        size, first = wrap.global_batch_size, wrap.iteration
        batches = [data[step * size : (step + 1) * size] for step in range(first, first + steps)]
        losses = [wrap.train(batch)["loss"] for batch in batches]
        if save:
            wrap.save()
    return losses, before


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_gradient_of_the_embedding_is_megatron_core_s(tmp_path, implementation):
    """Up to the rounding of the gradient of each of four micro-batches to bf16."""
    overrides = [
        f"megatron_lm.model.arch.transformer_impl={implementation}",
        "megatron_lm.train.dtype.__select__=bf16",
        "megatron_lm.train.common.micro_batch_size=2",
        f"megatron_wrap.logger.output_dir={tmp_path}",
    ]
    with MegatronWrap(CONFIG, overrides=overrides) as wrap, Replacements() as replacements:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        weight = bare_model(wrap.state.chunks[0]).embedding.word_embeddings.weight
        batch, gradients = samples(wrap.global_batch_size), []
        for added in (True, False):
            gradients_of_batch(wrap.state, batch)
            assert weight.grad_added_to_main_grad == added
            gradients.append(weight.main_grad.double())
            use(LayerKernels(embedding=torch.nn.functional.embedding), replacements)
    actual, expected = gradients
    assert torch.equal(actual.any(dim=1), expected.any(dim=1))  # others have no tokens
    assert (actual - expected).norm() / expected.norm() < 2**-7


@pytest.mark.skipif(not HAS_TE, reason="Transformer Engine is not installed")
def test_the_two_implementations_agree(tmp_path):
    ours, _ = train(tmp_path / "torch", "torch", 4)
    theirs, _ = train(tmp_path / "te", "transformer_engine", 4)
    numpy.testing.assert_allclose(ours, theirs, rtol=0.01)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_resumed_run_equals_an_uninterrupted_run(tmp_path, implementation, ranks):
    """Bit for bit, in a process with deterministic kernels; attention's fast backward kernels are not deterministic."""

    def train_deterministically(folder, steps, save=False):
        [(losses, _)] = ranks(1).run(train, tmp_path / folder, implementation, steps, save=save)
        return losses

    uninterrupted = train_deterministically("uninterrupted", 6)
    assert train_deterministically("resumed", 3, save=True) + train_deterministically("resumed", 3) == uninterrupted


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_deterministic_mode_repeats_a_run_bit_for_bit(tmp_path, implementation):
    deterministic = "megatron_lm.model.arch.deterministic_mode=true"
    runs = [train(tmp_path / name, implementation, 6, "bf16", False, deterministic) for name in ("first", "second")]
    assert runs[0] == runs[1]


@pytest.mark.skipif(not HAS_TE, reason="Transformer Engine is not installed")
@pytest.mark.parametrize(("saves", "loads"), [("torch", "transformer_engine"), ("transformer_engine", "torch")])
def test_checkpoint_of_one_implementation_loads_in_the_other(tmp_path, saves, loads):
    uninterrupted, start = train(tmp_path / "uninterrupted", saves, 6)
    train(tmp_path / "resumed", saves, 3, save=True)
    second, before = train(tmp_path / "resumed", loads, 3)
    numpy.testing.assert_allclose(second, uninterrupted[3:], rtol=0.01)
    assert before < start  # the trained weights were loaded before the first resumed step

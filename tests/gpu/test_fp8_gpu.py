"""Training in FP8 on one and two GPUs: the recipes compared with bf16, checkpoints, exports; skipped without a GPU,
Transformer Engine, or a GPU that has FP8."""

from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import numpy
from _implementations import HAS_TE

from megatron_wrap.core import MegatronWrap
from megatron_wrap.platform import choose_platform

CONFIG = Path(__file__).parents[2] / "scripts/benchmark/overhead.yaml"
DTYPE = "megatron_lm.train.dtype"
RECIPES = ("delayed", "tensorwise", "blockwise")
FORMS = {
    **{recipe: (f"{DTYPE}.fp8=hybrid", f"{DTYPE}.fp8_recipe={recipe}") for recipe in RECIPES},
    **{
        f"{recipe}-fp8-weights": (
            f"{DTYPE}.fp8=hybrid",
            f"{DTYPE}.fp8_recipe={recipe}",
            f"{DTYPE}.fp8_param_gather=true",
            "megatron_lm.train.optimizer.use_distributed_optimizer=true",
        )
        for recipe in RECIPES
    },
    "tensorwise-first-last": (
        f"{DTYPE}.fp8=hybrid",
        f"{DTYPE}.fp8_recipe=tensorwise",
        f"{DTYPE}.first_last_layers_bf16=true",
    ),
}

pytestmark = pytest.mark.skipif(not HAS_TE, reason="Transformer Engine is not installed")


@pytest.fixture(autouse=True)
def _machine_has(request):
    form = request.node.callspec.params.get("form", "delayed") if hasattr(request.node, "callspec") else "delayed"
    missing = choose_platform("cuda").missing_for_fp8(form.partition("-")[0])
    if missing is not None:
        pytest.skip(missing)


def run_of(folder, *overrides):
    """A run of the tiny Llama in bf16, with dimensions that FP8 can have and a sequence length that it cannot."""
    return MegatronWrap(
        CONFIG,
        overrides=[
            "megatron_lm.model.arch.transformer_impl=transformer_engine",
            "megatron_lm.model.arch.ffn_hidden_size=768",
            "megatron_lm.train.common.seq_length=250",
            "megatron_lm.train.learning-rate.lr=1e-4",
            f"{DTYPE}.__select__=bf16",
            f"megatron_lm.train.common.save={folder}/checkpoints",
            f"megatron_wrap.logger.output_dir={folder}",
            *overrides,
        ],
    )


def batch() -> list[dict]:
    """8 samples of random tokens that fill the context."""
    tokens = numpy.random.default_rng(3).integers(0, 4096, (8, 251))
    return [{"input_ids": row.tolist(), "loss_mask": [1] * 251} for row in tokens]


def train(folder, overrides, steps, evaluate=False, save=False):
    """Losses of steps on one batch, which the model learns by heart; optionally an evaluation and a checkpoint after
    them."""
    with run_of(folder, *overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        losses = [wrap.train(batch())["loss"] for _ in range(steps)]
        if evaluate:
            losses.append(wrap.evaluate({"same": batch()})["eval/same/loss"])
        if save:
            wrap.save()
    return losses


@pytest.fixture(scope="module")
def in_bf16(tmp_path_factory):
    losses = train(tmp_path_factory.mktemp("bf16"), (), 20)
    assert losses[-1] < 0.95 * losses[0]
    return losses


@pytest.mark.parametrize("form", FORMS)
def test_losses_are_those_of_bf16(form, in_bf16, tmp_path):
    actual = train(tmp_path, FORMS[form], 20)
    difference = abs(numpy.mean(actual) / numpy.mean(in_bf16) - 1)
    print(f"FP8 {form}: the mean loss of 20 steps differs from bf16's by {difference:.5f}, last {actual[-1]:.4f}")
    assert difference < 0.01
    assert actual != in_bf16  # it was FP8


@pytest.mark.parametrize("form", FORMS)
def test_resumed_run_equals_an_uninterrupted_run(form, tmp_path, ranks):
    """Bit for bit, in a process with deterministic kernels; an evaluation before the save changes nothing."""

    def run(folder, steps, **further):
        [losses] = ranks(1).run(train, tmp_path / folder, FORMS[form], steps, **further)
        return losses

    uninterrupted = run("uninterrupted", 6)
    first = run("resumed", 3, evaluate=True, save=True)
    assert first[:3] + run("resumed", 3) == uninterrupted


@pytest.mark.parametrize("form", FORMS)
def test_export_is_read_by_transformers(form, tmp_path):
    from transformers import AutoModelForCausalLM

    with run_of(tmp_path, *FORMS[form]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        for _ in range(5):
            wrap.train(batch())
        expected = wrap.evaluate({"same": batch()})["eval/same/loss"]
        wrap.save_pretrained(tmp_path / "hf")
        tokens = wrap.generate([[1, 2, 3]], max_new_tokens=4)[0]["token_ids"]
        wrap.save()
    assert len(tokens) == 4
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.bfloat16).cuda().eval()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    ids = torch.tensor([sample["input_ids"] for sample in batch()], device="cuda")
    with torch.no_grad():
        logits = model(ids[:, :-1]).logits.float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
    assert loss == pytest.approx(expected, rel=2e-3)
    with run_of(tmp_path, *FORMS[form]) as wrap:  # of the checkpoint, without training
        wrap.initialize()
        wrap.setup_model()
        assert wrap.evaluate({"same": batch()})["eval/same/loss"] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("form", ["delayed", "tensorwise-fp8-weights"])
def test_a_checkpoint_of_bf16_continues_in_fp8_and_back(form, tmp_path):
    optimizer = ("megatron_lm.train.optimizer.use_distributed_optimizer=true",)
    train(tmp_path, optimizer, 10, save=True)
    in_fp8 = train(tmp_path, (*optimizer, *FORMS[form]), 3, save=True)
    back = train(tmp_path, optimizer, 3)
    uninterrupted = train(tmp_path / "uninterrupted", optimizer, 16)
    numpy.testing.assert_allclose(in_fp8 + back, uninterrupted[10:], rtol=0.02)


@pytest.mark.parametrize("form", [*RECIPES, *(f"{recipe}-fp8-weights" for recipe in RECIPES)])
@pytest.mark.gpus(2)
def test_two_gpus_train_as_one(form, tmp_path, ranks):
    shared = ("megatron_lm.train.optimizer.use_distributed_optimizer=true", *FORMS[form])
    pair = ranks(2)
    uninterrupted = train(tmp_path / "one", shared, 6)
    overlap = ("megatron_lm.misc.ddp.overlap_grad_reduce=true", "megatron_lm.misc.ddp.overlap_param_gather=true")
    two = pair.run(train, tmp_path / "two", (*shared, *overlap), 6)
    assert two[0] == two[1]
    numpy.testing.assert_allclose(two[0], uninterrupted, rtol=0.01)

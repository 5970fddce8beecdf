"""Frozen parameters and noise on embeddings in a run on one process."""

from typing import Any

import _runs
import pytest
import torch

from megatron_wrap.bridge.adapters.trained_parameters import check_frozen
from megatron_wrap.config import load_run_config
from megatron_wrap.core import MegatronWrap
from megatron_wrap.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.process_group

RUN = ("megatron_lm.model.arch.num_layers=2", "megatron_lm.train.optimizer.use_distributed_optimizer=true")
FREEZE = "megatron_lm.train.common.freeze="
NOISE = "megatron_lm.train.common.neftune_noise_alpha="
SAMPLES = [
    {"input_ids": [(3 * index + offset) % 37 for offset in range(13)], "loss_mask": [1] * 13} for index in range(4)
]


def started(*overrides: str) -> Any:
    return _runs.started(*RUN, *overrides)


def weights(wrap: MegatronWrap) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in wrap.export_weights()}


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("[model.embed_tokens, '*.layers.0.*', lm_head]", ("model.embed_tokens", "model.layers.0.", "lm_head")),
        ("['decoder.layers.*.mlp']", ("model.layers.0.mlp.", "model.layers.1.mlp.")),
        ("['*norm*']", ("input_layernorm", "post_attention_layernorm", "model.norm")),
    ],
)
def test_frozen_parameters_keep_their_values_and_have_no_optimizer_state(patterns, expected):
    with started(FREEZE + patterns) as wrap:
        before = weights(wrap)
        for _ in range(2):
            wrap.train(SAMPLES)
        after = weights(wrap)
        unchanged = {name for name in before if torch.equal(before[name], after[name])}
        assert unchanged == {name for name in before if any(part in name for part in expected)}
        parameters = [parameter for chunk in wrap.state.chunks for parameter in chunk.parameters()]
        trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
        states = wrap.state.optimizer.chained_optimizers[0].optimizer.state.values()
        assert sum(state["exp_avg"].numel() for state in states) == trained
        assert [hasattr(parameter, "main_grad") for parameter in parameters] == [
            parameter.requires_grad for parameter in parameters
        ]


def test_the_first_step_is_that_of_a_run_without_frozen_parameters_for_the_others():
    """Also with recomputation, which computes no gradients of a module whose input requires none."""
    clip = "megatron_lm.train.optimizer.clip_grad=0.0"
    freeze = FREEZE + "[embedding, model.layers.0.input_layernorm, model.layers.0.self_attn]"
    full = [
        f"megatron_lm.train.recompute.recompute_{name}"
        for name in ("granularity=full", "method=uniform", "num_layers=1")
    ]
    results = []
    for overrides in ((), (freeze,), (freeze, *full)):
        with started(clip, *overrides) as wrap:
            wrap.train(SAMPLES)
            results.append(weights(wrap))
    everything, frozen, recomputed = results
    names = [name for name in everything if "mlp" in name or "layers.1." in name or "lm_head" in name]
    for name in names:
        torch.testing.assert_close(frozen[name], everything[name], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(recomputed[name], frozen[name], rtol=1e-5, atol=1e-6)
    assert not torch.equal(frozen["model.embed_tokens.weight"], everything["model.embed_tokens.weight"])


def test_the_log_counts_what_is_trained(capfd):
    with started(FREEZE + "[model.embed_tokens, lm_head]") as wrap:
        sizes = {name: tensor.numel() for name, tensor in weights(wrap).items()}
    total, frozen = sum(sizes.values()), 2 * 60 * 32
    shown = capfd.readouterr()
    assert f"trainable: {total - frozen:,} of {total:,} parameters" in shown.out + shown.err


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            "[model.embed_tokenz]",
            "model.embed_tokenz matches no parameter of the model; did you mean model.embed_tokens?",
        ),
        ("[decoder.layers.7]", "decoder.layers.7 matches no parameter"),
        ("[zebra]", "a name is, for instance, model.layers.0.input_layernorm.weight or decoder.layers.0."),
        ("['*.q_proj.*']", r"q_proj.weight matches and model.layers.0.self_attn.k_proj.weight does not"),
        ("['*']", "so nothing is trained"),
    ],
)
def test_a_pattern_that_names_no_whole_parameter_is_refused(patterns, message):
    with pytest.raises(ConfigError) as refusal:  # before any process starts
        check_frozen(load_run_config("run.yaml", [*RUN, FREEZE + patterns]))
    assert "command line megatron_lm.train.common.freeze: " in str(refusal.value)
    assert message in str(refusal.value)


def test_a_resumed_run_has_the_same_frozen_parameters():
    def run(steps: int, *overrides: str) -> list[float]:
        with started(FREEZE + "[lm_head]", "megatron_lm.train.common.save=saved", NOISE + "5", *overrides) as wrap:
            losses = [wrap.train(SAMPLES)["loss"] for _ in range(steps)]
            wrap.save()
            return losses

    straight = run(4, "megatron_lm.train.common.save=other")
    assert run(2) + run(2) == straight
    with pytest.raises(
        CheckpointError, match=r"freeze \['lm_head'\].*here \['lm_head', 'model\.norm'\].*no_load_optim"
    ):
        run(1, FREEZE + "[lm_head, model.norm]")
    run(1, FREEZE + "[lm_head, model.norm]", "megatron_lm.train.common.no_load_optim=true")


def test_noise_changes_training_and_not_evaluation():
    def losses(*overrides: str) -> list[Any]:
        with started(*overrides) as wrap:
            before = wrap.evaluate({"set": SAMPLES})["eval/set/loss"]
            scores = [float(result["log_probs"].sum()) for result in wrap.forward(SAMPLES)]
            return [before, scores, *(wrap.train(SAMPLES)["loss"] for _ in range(2))]

    without, small, large = losses(), losses(NOISE + "1"), losses(NOISE + "20")
    assert without[:2] == small[:2] == large[:2]
    assert without[2] == pytest.approx(without[0])
    assert 0 < abs(small[2] - without[2]) < abs(large[2] - without[2])
    assert losses(NOISE + "20") == large

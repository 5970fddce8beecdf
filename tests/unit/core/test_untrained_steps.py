"""Steps without a trained token: skipped in the same way by every loss, with the metrics that are known without one;
and a run of such steps. One process."""

import math
from pathlib import Path
from typing import Any

import _runs
import pytest
import torch

from megatron_wrap.core import MegatronWrap
from megatron_wrap.errors import TrainingError

pytestmark = pytest.mark.process_group

TRAIN, FLOW, DATA = "megatron_lm.train.common", "megatron_wrap.flow", "megatron_wrap.data"
DECAYING = ("megatron_lm.train.optimizer.weight_decay=0.5", "megatron_lm.train.learning-rate.lr=1e-2")
GRPO = {
    "dapo": (),
    "bnpo": (),
    "cispo": (f"{FLOW}.epsilon_high=5.0",),
    "grpo": (),
    "sapo": (),
    "dr_grpo": (f"{FLOW}.max_completion_length=8",),
    "entropy": (f"{FLOW}.entropy_coefficient=0.1",),
    "quantile": (f"{FLOW}.top_entropy_quantile=0.5",),
}


def started(flow: str, *overrides: str) -> Any:
    return _runs.started(f"{FLOW}.__select__={flow}", f"{DATA}.__select__=none", *DECAYING, *overrides)


def weights(wrap: MegatronWrap) -> list[torch.Tensor]:
    return [parameter.detach().clone() for chunk in wrap.state.chunks for parameter in chunk.parameters()]


def take_untrained(wrap: MegatronWrap, trained: list[Any], untrained: list[Any]) -> dict[str, float]:
    """Metrics of a step on `untrained` after one on `trained`, which leaves momentum; it changes neither weights nor
    learning rate, and the next step is the one that it would have been."""
    assert math.isfinite(wrap.train(trained)["loss"])
    before, rate = weights(wrap), wrap.state.lr_scheduler.get_lr({})
    metrics = wrap.train(untrained)
    assert all(map(torch.equal, before, weights(wrap)))
    assert wrap.state.lr_scheduler.get_lr({}) == rate
    assert (metrics["iteration"], metrics["skipped_iterations"]) == (2, 1)
    assert math.isnan(metrics["loss"])
    again = wrap.train(trained)
    assert again["skipped_iterations"] == 1
    assert not any(map(torch.equal, before, weights(wrap)))
    return metrics


def rollouts(truncated: bool) -> list[dict[str, Any]]:
    return [
        {
            "prompt_ids": [1, 2, 3],
            "response_ids": [4 + number, 5, 6, 7][: 2 + number],
            "reward": float(number),
            "group": f"g{number // 2}",
            "truncated": truncated,
        }
        for number in range(4)
    ]


@pytest.mark.parametrize("loss_type", GRPO)
def test_truncated_responses_without_a_loss_are_a_skipped_step_of_every_loss_type(loss_type: str):
    name = loss_type if loss_type not in ("entropy", "quantile") else "dr_grpo"
    length = (f"{FLOW}.max_completion_length=8",) if name == "dr_grpo" and loss_type != name else ()
    keys = (f"{FLOW}.loss_type={name}", f"{FLOW}.mask_truncated_completions=true", *GRPO[loss_type], *length)
    with started("gpt_grpo", *keys) as wrap:
        metrics = take_untrained(wrap, rollouts(truncated=False), rollouts(truncated=True))
    assert metrics["reward"] == pytest.approx(1.5)
    assert metrics["reward_std"] == pytest.approx(1.2909944)  # of 0, 1, 2, 3, unbiased as trl's
    assert metrics["completions/clipped_ratio"] == 1.0
    assert metrics["completions/mean_length"] == pytest.approx((2 + 3 + 4 + 4) / 4)
    assert metrics["grad_norm"] == 0.0


def test_a_first_step_without_a_trained_token_reports_the_known_metrics():
    keys = (f"{FLOW}.loss_type=dapo", f"{FLOW}.mask_truncated_completions=true")
    with started("gpt_grpo", *keys) as wrap:
        assert wrap.train(rollouts(truncated=True))["reward"] == pytest.approx(1.5)


def test_a_step_in_parts_without_a_trained_token_is_skipped_as_well():
    keys = (f"{FLOW}.loss_type=grpo", f"{FLOW}.mask_truncated_completions=true")
    with started("gpt_grpo", *keys) as wrap:
        wrap.train(rollouts(truncated=False))
        before, samples = weights(wrap), rollouts(truncated=True)
        parts = samples[:2], samples[2:]
        counted = wrap.count_weights(parts)
        for part in parts:
            wrap.forward_backward(part, step_weights=counted)
        metrics = wrap.optimizer_step()
        assert all(map(torch.equal, before, weights(wrap)))
    assert (metrics["skipped_iterations"], metrics["reward"]) == (1, pytest.approx(1.5))


def pairs(number: int = 0) -> list[dict[str, Any]]:
    """number: of tokens before the answers."""
    prompt = list(range(1, 4 + number))
    return [
        {"prompt_ids": prompt, "chosen_ids": [5 + index, 6], "rejected_ids": [7, 8 + index], "label": bool(index % 2)}
        | {"completion_ids": [5 + index, 6]}
        for index in range(4)
    ]


@pytest.mark.parametrize("flow", ["gpt_dpo", "gpt_kto"])
def test_answers_that_truncation_removes_are_a_skipped_step(flow: str):
    with started(flow, "megatron_wrap.models.reference=copy") as wrap:
        metrics = take_untrained(wrap, pairs(), pairs(wrap.config.train.seq_length))
    assert metrics["truncated_samples"] == 4


def test_a_run_that_trains_no_token_ends_with_an_error(capfd):
    rows = [{"input_ids": [1, 2, 3, index], "loss_mask": [0] * 4} for index in range(12)]
    _runs.write_rows("train.jsonl", rows)
    data = (f"{DATA}.__select__=dataset", f"{DATA}.train=train.jsonl")
    keys = (*data, f"{TRAIN}.train_iters=3", f"{TRAIN}.log_interval=1", f"{TRAIN}.save=saved")
    with started("gpt_sft", *keys) as wrap, pytest.raises(TrainingError, match="none of the run's 3 iterations"):
        wrap.fit()
    shown = capfd.readouterr().err
    assert "iteration 3/3 | no token trained" in shown
    assert shown.count("no token of iteration") == 1
    assert "nan" not in shown
    assert not list(Path("saved").glob("iter_*"))


def test_a_run_with_one_trained_step_ends_as_usual():
    rows = [{"input_ids": [1, 2, 3, index], "loss_mask": [int(index < 4)] * 4} for index in range(12)]
    _runs.write_rows("train.jsonl", rows)
    data = (f"{DATA}.__select__=dataset", f"{DATA}.train=train.jsonl")
    with started("gpt_sft", *data, f"{DATA}.shuffle=false", f"{TRAIN}.train_iters=3") as wrap:
        assert wrap.fit()["skipped_iterations"] == 2


def test_the_only_sample_of_a_step_or_an_evaluation_of_kto_has_no_kl_estimate():
    """Else the estimate is the sample's own log-ratio, and the loss of a desirable answer 1/2 for ever."""
    budget = (f"{TRAIN}.global_batch_tokens=16", f"{FLOW}.packing=true")
    with started("gpt_kto", "megatron_wrap.models.reference=copy", *budget) as wrap:
        desirable = [pairs()[1]]
        losses = [wrap.train(desirable)["loss"] for _ in range(3)]
        [row] = wrap.forward(desirable)
        evaluated = wrap.evaluate({"one": desirable})
        ratio = evaluated["eval/one/rewards/chosen"] / 0.1
    assert losses[0] == pytest.approx(0.5)
    assert losses[2] < losses[1] < losses[0] - 1e-3
    assert row["answer_log_probs"] == pytest.approx(evaluated["eval/one/logps/chosen"], rel=1e-5)
    assert evaluated["eval/one/loss"] == pytest.approx(1 - 1 / (1 + math.exp(-0.1 * ratio)), rel=1e-5)
    assert evaluated["eval/one/kl"] == 0.0

"""Functions that the tests of router replay run on each rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from _dpo_runs import CONFIG as GRPO_CONFIG
from _grpo_runs import GRPO
from _model_runs import samples
from _started import started

CONFIG = Path(__file__).parent / "models.yaml"
REPLAY = "megatron_lm.train.common.router_replay="


def record(overrides: tuple[str, ...], count: int = 4) -> list[torch.Tensor]:
    """The routing of each sample in a forward pass from initial weights."""
    with started(CONFIG, (*overrides, f"{REPLAY}R2")) as wrap:
        outputs = wrap.forward(samples(count, wrap.config.train.seq_length))
    return [output["routed_experts"] for output in outputs]


def random_routing(count: int, layers: int, experts: int, topk: int) -> list[torch.Tensor]:
    """A routing of each sample that no router of the tests selects; one token of each has none."""
    generator = torch.Generator().manual_seed(11)
    routings = []
    for sample in samples(count, 32):
        scores = torch.rand(len(sample["input_ids"]), layers, experts, generator=generator)
        routing = scores.topk(topk, dim=-1).indices
        routing[3] = -1
        routings.append(routing)
    return routings


def train(overrides: tuple[str, ...], routings: list[torch.Tensor]) -> dict[str, Any]:
    """One step with replayed routing, after the gradients of its batch; and the routing of a forward pass that replays
    it, with the weights after the step."""
    from megatron_wrap.engine.step import gradients_of_batch
    from megatron_wrap.testing.gradients import gather_gradients

    with started(CONFIG, (*overrides, f"{REPLAY}R2")) as wrap:
        state = wrap.state
        plain = samples(wrap.global_batch_size, wrap.config.train.seq_length)
        batch = [
            {**sample, "routed_experts": routing.numpy()} for sample, routing in zip(plain, routings, strict=False)
        ]
        gradients_of_batch(state, batch)
        gradients = {name: gradient.numpy() for name, gradient in gather_gradients(state).items()}
        metrics = [wrap.train(batch) for _ in range(2)]
        replayed = [output["routed_experts"] for output in wrap.forward(batch)]
        unrecorded = [output["routed_experts"] for output in wrap.forward(plain)]
    return {
        "losses": [step["loss"] for step in metrics],
        "load": {name: value for name, value in metrics[0].items() if name.startswith("experts/")},
        "gradients": gradients if state.parallel.world.rank == 0 else {},
        "replayed": replayed,
        "unrecorded": unrecorded,
    }


def step(overrides: tuple[str, ...], routings: list[torch.Tensor] | None) -> dict[str, Any]:
    """Loss and gradient norm of one step, with the routing if there is one."""
    replay = () if routings is None else (f"{REPLAY}R3",)
    with started(CONFIG, (*overrides, *replay)) as wrap:
        batch: list[dict[str, Any]] = [dict(sample) for sample in samples(wrap.global_batch_size, 32)]
        for sample, routing in zip(batch, routings or [], strict=False):
            sample["routed_experts"] = routing.tolist()
        metrics = wrap.train(batch)
        return {name: metrics[name] for name in ("loss", "grad_norm")}


def several_updates(overrides: tuple[str, ...], rollouts: list[dict[str, Any]]) -> dict[str, Any]:
    """Two updates of GRPO on one rollout with the log-probabilities and the routing of the policy's first pass."""
    with started(GRPO_CONFIG, (*GRPO, *overrides)) as wrap:
        outputs = wrap.forward(rollouts)
        batch = [
            {**sample, "old_log_probs": of_sample["log_probs"]}
            for sample, of_sample in zip(rollouts, outputs, strict=True)
        ]
        plain = wrap.train(batch)["loss"]
    with started(GRPO_CONFIG, (*GRPO, *overrides, f"{REPLAY}R2")) as wrap:
        batch = []
        for sample, of_sample in zip(rollouts, wrap.forward(rollouts), strict=True):
            recorded = {"old_log_probs": of_sample["log_probs"], "routed_experts": of_sample["routed_experts"]}
            batch.append({**sample, **recorded})
        losses = [wrap.train(batch)["loss"] for _ in range(2)]
        last = [of_sample["routed_experts"] for of_sample in wrap.forward(batch)]
    first = [sample["routed_experts"] for sample in batch]
    return {"plain_loss": plain, "losses": losses, "first": first, "last": last}


def losses(overrides: tuple[str, ...], routings: list[list[torch.Tensor]] | None, steps: int) -> dict[str, Any]:
    """The loss of each step with replayed routing, and the routing: `routings`, or that of the run itself before each
    step."""
    result: dict[str, Any] = {"losses": [], "routings": []}
    with started(CONFIG, (*overrides, f"{REPLAY}R2", f"megatron_lm.train.common.train_iters={steps}")) as wrap:
        batch = samples(wrap.global_batch_size, wrap.config.train.seq_length)
        for number in range(steps):
            recorded = [outputs["routed_experts"] for outputs in wrap.forward(batch)]
            result["routings"].append(recorded if routings is None else routings[number])
            replayed = zip(batch, result["routings"][-1], strict=True)
            metrics = wrap.train([{**sample, "routed_experts": routing} for sample, routing in replayed])
            result["losses"].append(metrics["loss"])
    return result

"""Functions that the adapter tests run on each rank, and peft's side of each comparison."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _bridge_runs as bridge
import numpy

STEPS, BATCH, RATE = 5, 4, 2e-3
SELECT = "megatron_wrap.adapter.__select__=lora"
SETTINGS = (
    SELECT,
    f"megatron_lm.train.common.train_iters={STEPS}",
    f"megatron_lm.train.common.global_batch_size={BATCH}",
    "megatron_lm.train.common.micro_batch_size=2",
    f"megatron_lm.train.learning-rate.lr={RATE}",
    f"megatron_lm.train.learning-rate.min_lr={RATE}",
    "megatron_lm.train.learning-rate.lr_decay_style=constant",
    "megatron_lm.train.optimizer.weight_decay=0.1",
    "megatron_lm.train.optimizer.clip_grad=1.0",
    "megatron_lm.train.optimizer.adam_beta2=0.95",
    "megatron_lm.train.optimizer.adam_eps=1e-8",
    "megatron_lm.model.arch.hidden_dropout=0.0",  # GPT-2's folder has 0.1
    "megatron_lm.model.arch.attention_dropout=0.0",
)


def samples(count: int) -> list[dict[str, list[int]]]:
    """Tokenized samples of unequal lengths; some labels are -100."""
    generator = numpy.random.default_rng(31)
    made = []
    for _ in range(count):
        ids = generator.integers(0, 40, int(generator.integers(20, 62)))
        labels = numpy.where(generator.random(len(ids)) < 0.6, ids, -100)
        made.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return made


def overrides_of(adapter: dict[str, Any]) -> tuple[str, ...]:
    """The keys of megatron_wrap.adapter as overrides."""
    import json

    return tuple(f"megatron_wrap.adapter.{key}={json.dumps(value)}" for key, value in adapter.items())


def factors_of(wrap: Any) -> dict[str, Any]:
    """peft's name -> whole factor, on every rank."""
    return {name: tensor.numpy().copy() for name, tensor in wrap.export_weights(adapter=True)}


def train(folder: str, overrides: tuple[str, ...], outputs: str) -> Any:
    """(loss, gradient norm) of each step, factors before and after them, logits [2, 64, V], and whether the base is unchanged."""
    import torch

    from megatron_wrap.core import MegatronWrap
    from megatron_wrap.engine.logits import sequence_logits
    from megatron_wrap.nn.lora import adapters_off

    settings = (*SETTINGS, *overrides, f"megatron_wrap.logger.output_dir={outputs}")
    batches = samples(STEPS * BATCH)
    with MegatronWrap.from_pretrained(folder, bridge.CONFIG, settings) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        frozen = [(p, p.detach().clone()) for c in wrap.state.chunks for p in c.parameters() if not p.requires_grad]
        initial = factors_of(wrap)
        steps = []
        for step in range(STEPS):
            metrics = wrap.train(batches[step * BATCH : (step + 1) * BATCH])
            steps.append((metrics["loss"], metrics["grad_norm"]))
        factors = factors_of(wrap)
        logits = sequence_logits(wrap.state, bridge.token_ids())
        with adapters_off(wrap.state.chunks):
            base = sequence_logits(wrap.state, bridge.token_ids())
        unchanged = bool(frozen) and all(torch.equal(parameter, before) for parameter, before in frozen)
        wrap.save_pretrained(f"{outputs}/adapter")
        wrap.save_pretrained(f"{outputs}/merged", merge=True)
        if wrap.state.parallel.world.rank == 0:
            return steps, initial, factors, stack(logits), stack(base), unchanged
    return None


def stack(logits: Any) -> Any:
    """[2, 64, V] of sequences' logits."""
    return numpy.stack([row.numpy() for row in logits])


def train_peft(peft: Any) -> list[tuple[float, float]]:
    """(loss, gradient norm) of the same steps by peft and torch's AdamW."""
    import torch
    from test_hf_training import their_loss

    trained = [parameter for parameter in peft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    batches = samples(STEPS * BATCH)
    steps = []
    for step in range(STEPS):
        loss = their_loss(peft, batches[step * BATCH : (step + 1) * BATCH])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append((loss.item(), norm.item()))
    return steps


def peft_factors(peft: Any) -> dict[str, Any]:
    """Name in peft's files -> trained parameter."""
    named = ((name.replace(".default.", "."), value) for name, value in peft.named_parameters() if value.requires_grad)
    return {name: value.detach().numpy() for name, value in named}


def peft_logits(peft: Any) -> Any:
    """[2, 64, V] of `_bridge_runs.token_ids`."""
    import torch

    with torch.no_grad():
        return peft(torch.tensor(bridge.token_ids())).logits.numpy()


def peft_model(folder: Path, adapter: dict[str, Any], factors: dict[str, Any] | None = None) -> Any:
    """peft's model of a folder with new factors, or with those given under peft's names."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    options = {"target_modules": "all-linear", **adapter}
    peft = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", fan_in_fan_out="gpt2" in str(folder), **options))
    if factors is not None:
        own = {name.replace(".default.", "."): value for name, value in peft.named_parameters() if value.requires_grad}
        assert own.keys() == factors.keys(), own.keys() ^ factors.keys()
        with torch.no_grad():
            for name, value in factors.items():
                own[name].copy_(torch.from_numpy(value))
    return peft

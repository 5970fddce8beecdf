"""What the facade costs over a bare Megatron-Core loop on the same model, data and settings, without data parallelism.

The two take turns on one model. The facade's batches come from `wrap.batches`, prepared ahead; the bare loop gets
tensors that are collated already, on the device, and computes its loss with the fastest of Megatron-Core's
cross-entropies here. One JSON line has the median of the ratios of four neighbouring steps, two of each, in both
orders.

    python scripts/benchmark/overhead.py [CONFIG] [a.b=c ...] [--pairs 20]
    torchrun --nproc-per-node 4 scripts/benchmark/overhead.py [CONFIG] a.b.tensor_model_parallel_size=4 ...
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from train_speed import random_tokens

from megatron_wrap.core import MegatronWrap, exit_on_user_error
from megatron_wrap.engine.state.state import TrainingState

CROSS_ENTROPIES = {
    "unfused": {"cross_entropy_loss_fusion": False},
    "native": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"},
    "te": {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"},
}
"""Name -> fields of Megatron-Core's configuration, which its model reads in each call with labels."""


def use_fastest_cross_entropy(state: TrainingState, step: Callable[[], Any]) -> str:
    """Select the cross-entropy with which `step`, a bare step, is the fastest; returns its name."""

    def seconds() -> float:
        times = []
        for _ in range(4):
            state.platform.synchronize()
            started = time.perf_counter()
            step()
            state.platform.synchronize()
            times.append(time.perf_counter() - started)
        return min(times)

    step_seconds = {}
    for name, settings in CROSS_ENTROPIES.items():
        if name == "te" and not state.platform.has_transformer_engine:
            continue
        for field, value in settings.items():
            setattr(state.transformer_config, field, value)
        step_seconds[name] = seconds()
    fastest = min(step_seconds, key=lambda name: step_seconds[name])
    for field, value in CROSS_ENTROPIES[fastest].items():
        setattr(state.transformer_config, field, value)
    return fastest


def bare_step(state: TrainingState, batches: list[dict[str, torch.Tensor]], seq_length: int) -> float:
    """A step as a plain script on Megatron-Core writes it: labels go to the model, the loss is a mean over tokens."""
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(iterator: Iterator[dict[str, torch.Tensor]], model: torch.nn.Module) -> Any:
        batch = next(iterator)
        per_token = model(batch["input_ids"], batch["position_ids"], None, labels=batch["labels"])

        def loss(output: torch.Tensor) -> Any:
            total = output.float().sum()
            tokens = torch.tensor(output.numel(), dtype=torch.int, device=output.device)
            return total, tokens, total.detach() / tokens

        return per_token, loss

    for chunk in state.chunks:
        chunk.zero_grad_buffer()
    state.optimizer.zero_grad()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=state.chunks[0],
        num_microbatches=len(batches),
        seq_length=seq_length,
        micro_batch_size=batches[0]["input_ids"].shape[0],
        forward_only=False,
    )
    ChainedOptimizer(state.optimizer.chained_optimizers).step()  # Megatron-Core's own, in one piece
    state.lr_scheduler.step(increment=1)
    return float(torch.stack(losses).mean())


def main() -> None:
    """Alternate and compare."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", default="scripts/benchmark/overhead.yaml")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--pairs", type=int, default=20)
    arguments = parser.parse_intermixed_args()
    with MegatronWrap(arguments.config, overrides=arguments.overrides) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        state, train = wrap.state, wrap.config.train
        samples = random_tokens(wrap.global_batch_size, train.seq_length, wrap.config.arch.vocab_size or 0)
        tokens = torch.tensor([sample["input_ids"] for sample in samples], device=wrap.platform.device)
        positions = torch.arange(train.seq_length, device=tokens.device).expand(train.micro_batch_size, -1)
        batches = [
            {"input_ids": part[:, :-1].contiguous(), "labels": part[:, 1:].contiguous(), "position_ids": positions}
            for part in tokens.split(train.micro_batch_size)
        ]

        def timed(step: Any) -> float:
            wrap.platform.synchronize()
            started = time.perf_counter()
            step()
            wrap.platform.synchronize()
            return time.perf_counter() - started

        prepared = wrap.batches(samples)

        def facade() -> None:
            wrap.train(next(prepared))

        def bare() -> None:
            bare_step(state, batches, train.seq_length)

        for _ in range(3):
            facade(), bare()
        cross_entropy = use_fastest_cross_entropy(state, bare)
        pairs = []
        for pair in range(arguments.pairs):  # the order alternates, so that drift favors neither
            order = (facade, bare) if pair % 2 else (bare, facade)
            seconds = {step.__name__: timed(step) for step in order}
            pairs.append((seconds["facade"], seconds["bare"]))
        prepared.close()
        # who goes second may be faster or slower: a ratio takes one pair of each order
        both_orders = [
            (first[0] + second[0]) / (first[1] + second[1])
            for first, second in zip(pairs[::2], pairs[1::2], strict=False)
        ]
        report = {
            "median_ratio": round(statistics.median(both_orders), 4),
            "facade_seconds": round(statistics.median(facade for facade, _ in pairs), 5),
            "bare_seconds": round(statistics.median(bare for _, bare in pairs), 5),
            "pairs": len(pairs),
            "bare_cross_entropy": cross_entropy,
            "platform": wrap.platform.name,
        }
        if wrap.state.parallel.world.rank == 0:
            sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    with exit_on_user_error():
        main()

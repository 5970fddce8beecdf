"""Memory and tokens per second of DPO with its reference model as a copy on the device, as a copy on the host, and
precomputed, compared with supervised fine-tuning on the same tokens. One process; the ways take turns, each in a run of
its own, and print a line each time; the last line has the medians and the share of fine-tuning in speed. `base` is the
policy without its adapter. Its run also times the reference's forward pass alone, over the micro-batches of a step, and
the last line has its step over that of `precomputed` plus that pass:

    python scripts/benchmark/reference_models.py scripts/benchmark/llama-1b.yaml [a.b=c ...] [--pairs 8] [--rounds 3]
    python scripts/benchmark/reference_models.py scripts/benchmark/llama-1b.yaml megatron_wrap.adapter.__select__=lora
        megatron_wrap.adapter.r=16 --ways base,precomputed
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy
import torch

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.checkpoint.reference_config import precompute_config
from megatron_wrap.core import MegatronWrap, exit_on_user_error

TRAIN, FLOW = "megatron_lm.train.common", "megatron_wrap.flow"
REFERENCE = "megatron_wrap.models.reference"
WAYS = ("sft", "device", "offload", "precomputed")  # base needs an adapter


def random_pairs(count: int, length: int, vocab_size: int, seed: int = 0) -> list[dict[str, Any]]:
    """Pairs whose two sequences fill the context: a prompt of a quarter of it, and two answers."""
    tokens = numpy.random.default_rng(seed).integers(0, vocab_size, (count, 2, length + 1))
    prompt = (length + 1) // 4
    return [
        {
            "prompt_ids": chosen[:prompt].tolist(),
            "chosen_ids": chosen[prompt:].tolist(),
            "rejected_ids": rejected[prompt:].tolist(),
        }
        for chosen, rejected in tokens
    ]


def as_sequences(pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Both sequences of each pair as samples of fine-tuning, with a loss on the answers."""
    return [
        {
            "input_ids": pair["prompt_ids"] + pair[kind],
            "loss_mask": [0] * len(pair["prompt_ids"]) + [1] * len(pair[kind]),
        }
        for pair in pairs
        for kind in ("chosen_ids", "rejected_ids")
    ]


def overrides_of(way: str, folder: str, arguments: argparse.Namespace) -> list[str]:
    """The overrides of one way: the same tokens in each micro-batch and step."""
    sequences = 2 if way == "sft" else 1
    reference = {"device": "{copy: true}", "offload": "{copy: true, offload: true}", "sft": "null", "base": "base"}
    return [
        f"{FLOW}.__select__={'gpt_sft' if way == 'sft' else 'gpt_dpo'}",
        f"{FLOW}.collate_type=fixed_length",
        f"{REFERENCE}={reference.get(way, f'{{precomputed: {folder}}}')}",
        f"{TRAIN}.micro_batch_size={sequences * arguments.micro_pairs}",
        f"{TRAIN}.global_batch_size={sequences * arguments.pairs}",
        *arguments.overrides,
    ]


def store(pairs: list[dict[str, Any]], folder: str, arguments: argparse.Namespace) -> None:
    """Compute the reference's outputs once, before the measurement."""
    from megatron_wrap.engine.precompute import precompute

    config = read_run(arguments.config, overrides_of("precomputed", folder, arguments))
    with MegatronWrap(precompute_config(config)) as wrap:
        wrap.initialize()
        wrap.setup_model()
        started = time.perf_counter()
        count = precompute(wrap.state, (("generated", pair) for pair in pairs), folder, "reference", skip_bad=False)
        report({"way": "precompute", "pairs": count, "seconds": round(time.perf_counter() - started, 2)})


def forward_seconds(wrap: MegatronWrap, batch: Any, arguments: argparse.Namespace) -> float:
    """Median time of the reference's forward pass over the micro-batches of a step, which are on the device."""
    from megatron_wrap.engine.reference.reference_model import with_reference_outputs
    from megatron_wrap.engine.step_inputs import replica_micro_batches

    state = wrap.state
    micro_batches = replica_micro_batches(state, batch).training
    seconds = []
    for _ in range(arguments.warmup + arguments.steps):
        local = state.localization.localize(micro_batches, state.extra_padding)
        wrap.platform.synchronize()
        started = time.perf_counter()
        assert state.reference is not None
        with_reference_outputs(state.reference, state.flow, state.pipeline_schedule, local)
        wrap.platform.synchronize()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[arguments.warmup :])


def measure(way: str, pairs: list[dict[str, Any]], folder: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One run of one way."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with MegatronWrap(arguments.config, overrides=overrides_of(way, folder, arguments)) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        batches: Iterator[Any] = wrap.batches(as_sequences(pairs) if way == "sft" else pairs)
        tokens = 2 * wrap.config.train.seq_length * arguments.pairs
        rates = []
        for step in range(arguments.warmup + arguments.steps):
            batch = next(batches)
            wrap.platform.synchronize()
            started = time.perf_counter()
            metrics = wrap.train(batch)
            wrap.platform.synchronize()
            if step >= arguments.warmup:
                rates.append(tokens / (time.perf_counter() - started))
        forward = forward_seconds(wrap, batch, arguments) if way == "base" else None
        batches.close()  # type: ignore[attr-defined]
        measured = {
            "way": way,
            "tokens_per_second": round(statistics.median(rates)),
            "rates": [round(rate) for rate in rates],
            "loss": metrics["loss"],
            "memory_max_gib": round(metrics.get("memory_max", 0.0), 2),
        }
        if forward is not None:
            measured["forward_seconds"] = round(forward, 4)
    report(measured)
    return measured


def report(values: dict[str, Any]) -> None:
    """A line for a program to read."""
    sys.stdout.write("RESULT " + json.dumps(values) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Store the outputs, then measure each way in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--pairs", type=int, default=8, help="of a step")
    parser.add_argument("--micro-pairs", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--ways", default=",".join(WAYS))
    arguments = parser.parse_intermixed_args()
    train = read_run(arguments.config, arguments.overrides)
    count = 2 * arguments.pairs  # the same two batches again and again
    pairs = random_pairs(count, train.train.seq_length, train.arch.vocab_size or 0)
    ways = arguments.ways.split(",")
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if "precomputed" in ways:
            store(pairs, f"{folder}/outputs", arguments)
        for _ in range(arguments.rounds):
            rounds += [measure(way, pairs, f"{folder}/outputs", arguments) for way in ways]
    summary = {}
    for way in ways:
        of_way = [measurement for measurement in rounds if measurement["way"] == way]
        rate = statistics.median(measurement["tokens_per_second"] for measurement in of_way)
        memory = max(measurement["memory_max_gib"] for measurement in of_way)
        summary[way] = {"tokens_per_second": rate, "memory_max_gib": memory}
    for values in summary.values():
        if "sft" in summary:
            values["share_of_sft"] = round(values["tokens_per_second"] / summary["sft"]["tokens_per_second"], 4)
    if "base" in summary and "precomputed" in summary:
        tokens = 2 * train.train.seq_length * arguments.pairs
        forward = statistics.median(each["forward_seconds"] for each in rounds if each["way"] == "base")
        both = tokens / summary["precomputed"]["tokens_per_second"] + forward
        summary["base"]["time_over_precomputed_and_forward"] = round(
            tokens / summary["base"]["tokens_per_second"] / both, 4
        )
    report({"summary": summary})


if __name__ == "__main__":
    with exit_on_user_error():
        main()

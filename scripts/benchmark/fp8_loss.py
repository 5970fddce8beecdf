"""Losses in FP8 compared with bf16 over some hundred steps on real text: the bytes of Python's standard library.

    python scripts/benchmark/fp8_loss.py [a.b=c ...] [--steps 200]

Prints a RESULT line for each recipe with the difference from bf16's loss of the mean over all steps, and the largest
of one step and of means over ten. The line `bf16-torch` is bf16 with torch's kernels: what rounding alone does.
"""

import argparse
import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy

from megatron_wrap.core import MegatronWrap, exit_on_user_error

DTYPE, ARCH, TRAIN = "megatron_lm.train.dtype", "megatron_lm.model.arch", "megatron_lm.train.common"
SHAPE = {"num_layers": 8, "hidden_size": 1024, "ffn_hidden_size": 4096, "num_attention_heads": 16}
CONTROL = "bf16-torch"
RECIPES = (CONTROL, "delayed", "tensorwise", "blockwise")


def text_samples(count: int, length: int) -> list[dict[str, Any]]:
    """Consecutive windows of `length` + 1 bytes of the standard library's modules, in the order of their names."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    data = numpy.frombuffer(text, dtype=numpy.uint8)
    starts = numpy.random.default_rng(0).integers(0, len(data) - length - 1, count)
    mask = [1] * (length + 1)
    return [{"input_ids": data[start : start + length + 1].tolist(), "loss_mask": mask} for start in starts]


def losses(overrides: list[str], steps: int) -> list[float]:
    """Loss of each step of a run of its own."""
    sizes = [f"{ARCH}.{name}={value}" for name, value in SHAPE.items()]
    overrides_of_model = [f"{ARCH}.num_query_groups=8", f"{ARCH}.vocab_size=256", f"{TRAIN}.seq_length=1024"]
    batch = [f"{TRAIN}.micro_batch_size=16", f"{TRAIN}.global_batch_size=16"]
    config = Path(__file__).parent / "llama-1b.yaml"
    with MegatronWrap(config, overrides=[*sizes, *overrides_of_model, *batch, *overrides]) as wrap:
        wrap.initialize()
        wrap.setup_model_and_optimizer()
        samples = text_samples(16 * steps, wrap.config.train.seq_length)
        return [wrap.train(samples[16 * step : 16 * (step + 1)])["loss"] for step in range(steps)]


def main() -> None:
    """Train in bf16, then with each recipe."""
    parser = argparse.ArgumentParser()
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--recipes", default=",".join(RECIPES))
    arguments = parser.parse_intermixed_args()
    reference = numpy.array(losses(arguments.overrides, arguments.steps))
    for recipe in filter(None, arguments.recipes.split(",")):
        changes = [f"{DTYPE}.fp8=hybrid", f"{DTYPE}.fp8_recipe={recipe}"]
        if recipe == CONTROL:
            changes = [f"{ARCH}.transformer_impl=torch"]
        fp8_losses = numpy.array(losses([*arguments.overrides, *changes], arguments.steps))
        tens = numpy.abs(fp8_losses.reshape(-1, 10).mean(1) / reference.reshape(-1, 10).mean(1) - 1)
        report = {
            "recipe": recipe,
            "first_loss": round(float(reference[0]), 4),
            "last_ten_bf16": round(float(reference[-10:].mean()), 4),
            "last_ten": round(float(fp8_losses[-10:].mean()), 4),
            "difference_of_the_mean": round(float(abs(fp8_losses.mean() / reference.mean() - 1)), 5),
            "largest_difference_of_a_step": round(float(numpy.abs(fp8_losses / reference - 1).max()), 5),
            "largest_difference_of_ten": round(float(tens.max()), 5),
        }
        sys.stdout.write("RESULT " + json.dumps(report) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    with exit_on_user_error():
        main()

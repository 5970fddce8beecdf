"""The gated delta rule of one layer: forward and backward, in torch and by the kernels of flash-linear-attention.

    python scripts/benchmark/delta_rule.py [--tokens 4096] [--lengths 1000 3000 96] [--key-heads 16] [--heads 32]
        [--width 128] [--passes 10] [--rows 0] [--ways torch tf32 kept fla]

The defaults are the shape of Qwen3.5-9B, with inputs in bf16. Ways: `torch`; `tf32`, the same with products in TF32;
`kept`, the same without computing its forward pass again in the backward pass; `fla`, which is left out with the reason
where the package is missing or does not train. Prints a RESULT line for each: milliseconds of the forward and of both
passes, and those until the host has launched them; MiB kept for the backward pass and at the peak; the number of
kernels and their time; the distance of the outputs and of each gradient from those of `torch` in fp64, over their norm.
With `--rows` also the longest kernels. With `PYTHONPATH` set to another checkout it measures that one's rule.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from experts_layer import milliseconds, profile
from torch import Tensor

from megatron_wrap.nn.linear_attention import kernels
from megatron_wrap.nn.linear_attention.gated_delta_rule import gated_delta_rule

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Rule = Callable[..., Tensor]


def main() -> None:
    """Measure each way in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--lengths", type=int, nargs="*", help="of the sequences of a packed row, instead of --tokens")
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--width", type=int, default=128, help="of queries, keys and values")
    parser.add_argument("--passes", type=int, default=10, help="measured passes")
    parser.add_argument("--rows", type=int, default=0, help="of the table of kernels")
    parser.add_argument("--ways", nargs="*", default=["torch", "tf32", "kept", "fla"])
    arguments = parser.parse_args()
    lengths = tuple(arguments.lengths or [arguments.tokens])
    torch.manual_seed(0)
    inputs = random_inputs(sum(lengths), arguments.key_heads, arguments.heads, arguments.width)
    grad = torch.randn_like(inputs[2])
    exact = values(lambda *wide: gated_delta_rule(*wide, lengths=lengths)[0], [x.double() for x in inputs], grad)
    for way in arguments.ways:
        reason = why_not(way)
        if reason is not None:
            print("RESULT", way, "left out:", reason, flush=True)
            continue
        with tf32() if way == "tf32" else nullcontext():
            measure(way, rule_of(way, lengths), inputs, grad, exact, arguments.passes, arguments.rows)


def random_inputs(tokens: int, key_heads: int, heads: int, width: int) -> list[Tensor]:
    """Queries, keys, values, log decays (fp32) and betas, as a layer with random weights has them."""
    query, key, value = (torch.randn(1, tokens, count, width, device=DEVICE) for count in (key_heads, key_heads, heads))
    decay = -torch.rand(1, tokens, heads, device=DEVICE)
    beta = torch.randn(1, tokens, heads, device=DEVICE).sigmoid()
    return [*(tensor.bfloat16() for tensor in (query, key, value)), decay, beta.bfloat16()]


def why_not(way: str) -> str | None:
    """Why a way cannot be measured here."""
    if way != "fla":
        return None
    if DEVICE.type != "cuda" or not kernels.has_fla():
        return "flash-linear-attention is not installed, or there is no GPU"
    return kernels.why_fla_cannot_train()


def rule_of(way: str, lengths: tuple[int, ...]) -> Rule:
    """Queries, keys, values, log decays and betas to outputs."""
    borders = torch.tensor([0, *lengths], device=DEVICE, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    packed: Any = SimpleNamespace(lengths=lengths, cu_seqlens_q=borders) if len(lengths) > 1 else None

    def in_torch(*inputs: Tensor) -> Tensor:
        return gated_delta_rule(*inputs, lengths=lengths)[0]

    def kept(*inputs: Tensor) -> Tensor:
        return gated_delta_rule(*inputs, lengths=lengths, recompute=False)[0]

    def fla(query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        return kernels.recur(query, key, value, log_decay, beta, packed, None, keeps_state=False, trains=True)[0]

    rules: dict[str, Rule] = {"torch": in_torch, "tf32": in_torch, "kept": kept, "fla": fla}
    return rules[way]


@contextmanager
def tf32() -> Iterator[None]:
    """A block whose fp32 products are in TF32."""
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision("highest")


def values(rule: Rule, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Outputs, and the gradients of the inputs."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    output = rule(*inputs)
    return [output.detach(), *torch.autograd.grad(output, inputs, grad.to(output.dtype))]


def kept_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that a forward pass keeps for the backward pass, its inputs included."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = forward()
    del output
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def measure(
    way: str, rule: Rule, inputs: list[Tensor], grad: Tensor, exact: list[Tensor], passes: int, rows: int
) -> None:
    """Print the RESULT line of a way, and its longest kernels."""
    distances = [
        f"{float((actual.double() - expected).norm() / expected.norm()):.1e}"
        for actual, expected in zip(values(rule, inputs, grad), exact, strict=True)
    ]
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    line: dict[str, Any] = {"way": way}
    for name, call in {"forward": lambda: rule(*inputs), "both": lambda: values(rule, inputs, grad)}.items():
        call()
        elapsed, launched = milliseconds(call, passes)
        line[name] = {"ms": elapsed, "host_ms": launched}
    line["kept_MiB"] = round(kept_bytes(lambda: rule(*inputs)) / 2**20)
    launches: dict[str, tuple[float, float]] = {}
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        values(rule, inputs, grad)
        line["peak_MiB"] = round((torch.cuda.max_memory_allocated() - before) / 2**20)
        launches = profile(lambda: values(rule, inputs, grad), passes)
        line["kernels"] = round(sum(count for count, _ in launches.values()))
        line["kernel_ms"] = round(sum(each for _, each in launches.values()), 3)
    print("RESULT", json.dumps({**line, "distances": distances}), flush=True)
    for name, (count, elapsed) in sorted(launches.items(), key=lambda item: -item[1][1])[:rows]:
        sys.stdout.write(f"{elapsed:9.3f} ms {count:6.1f} x  {name[:110]}\n")


if __name__ == "__main__":
    main()

"""Adam of 5.6 billion parameters beside the products of the next forward pass, on fewer and more multiprocessors.

    python scripts/benchmark/adam_beside_products.py

The forward pass has the shape of 8 layers of Qwen3-30B-A3B with 16,384 tokens (128 experts of width 768, 8 a token). A
layer waits for its own part of the update. Prints milliseconds, power and clock of each form; needs an H200 (102 GB of
state) and Triton.
"""

from __future__ import annotations

import subprocess
import threading
import time

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

TOKENS, HIDDEN, EXPERTS, WIDTH, TOPK, VOCABULARY, LAYERS = 16384, 2048, 128, 768, 8, 151936, 8
QKV, HEADS = HIDDEN * 5120, 4096 * HIDDEN  # weights of the projections before and after attention
INNER = EXPERTS * HIDDEN * 2 * WIDTH
REPEATS = 12


@triton.jit
def _adam_kernel(values, grads, first, second, copy, count, lr, root, eps, block: tl.constexpr):
    for tile in range(tl.program_id(0), tl.cdiv(count, block), tl.num_programs(0)):
        index = tl.arange(0, block).to(tl.int64) + tile.to(tl.int64) * block
        inside = index < count
        value = tl.load(values + index, mask=inside, eviction_policy="evict_first")
        grad = tl.load(grads + index, mask=inside, eviction_policy="evict_first")
        mean = 0.9 * tl.load(first + index, mask=inside, eviction_policy="evict_first") + 0.1 * grad
        square = 0.95 * tl.load(second + index, mask=inside, eviction_policy="evict_first") + 0.05 * grad * grad
        value -= lr * tl.div_rn(mean, tl.div_rn(tl.sqrt_rn(square), root) + eps)
        tl.store(values + index, value, mask=inside)
        tl.store(copy + index, value.to(tl.bfloat16), mask=inside)
        tl.store(first + index, mean, mask=inside)
        tl.store(second + index, square, mask=inside)


def _state(count: int) -> list[Tensor]:
    """fp32 weights, gradients and moments, and bf16 weights, [count] each."""
    values = torch.empty(count, device="cuda").normal_(0, 0.02)
    grads = torch.empty(count, device="cuda").normal_(0, 1e-4)
    moments = [torch.zeros(count, device="cuda"), torch.full((count,), 1e-6, device="cuda")]
    return [values, grads, *moments, values.bfloat16()]


def _update(state: list[Tensor], programs: int) -> None:
    """With 0 programs, one for each block of values."""
    count, block = state[0].numel(), 2048 if programs else 1024
    blocks = triton.cdiv(count, block)
    grid = (min(programs, blocks) if programs else blocks,)
    _adam_kernel[grid](*state, count, 1e-4, 1.0, 1e-8, block=block, num_warps=8 if programs else 4)


class Step:
    """An update and the forward pass after it."""

    def __init__(self) -> None:
        self.layers = [_state(EXPERTS * 3 * HIDDEN * WIDTH + QKV + HEADS) for _ in range(LAYERS)]
        self.output = _state(2 * VOCABULARY * HIDDEN)  # and the embedding
        self.hidden = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16)
        self.ends = (torch.arange(1, EXPERTS + 1, device="cuda") * (TOKENS * TOPK // EXPERTS)).int()
        self.order = torch.randperm(TOKENS * TOPK, device="cuda") // TOPK
        self.logits = torch.empty(TOKENS // 8, VOCABULARY, device="cuda", dtype=torch.bfloat16)
        self.stream = torch.cuda.Stream()

    def run(
        self, programs: int = 0, beside: bool = False, forward: bool = True, adam: bool = True, left: int = 0
    ) -> None:
        """`left`: multiprocessors that the products leave to Adam."""
        torch._C._set_sm_carveout_experimental(left or None)
        states, done = [*self.layers, self.output], []
        stream = self.stream if beside else torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for state in states if adam else ():
                _update(state, programs)
                done.append(stream.record_event())
        hidden = self.hidden
        for number, state in enumerate(states if forward else ()):
            if done:
                torch.cuda.current_stream().wait_event(done[number])
            if number < LAYERS:
                hidden = self._layer(hidden, state[-1])
            else:
                weight = state[-1][: VOCABULARY * HIDDEN].view(VOCABULARY, HIDDEN)
                for part in hidden.split(TOKENS // 8):
                    torch.mm(part, weight.t(), out=self.logits)

    def _layer(self, hidden: Tensor, weights: Tensor) -> Tensor:
        qkv, heads, inner, outer = weights.split([QKV, HEADS, INNER, INNER // 2])
        projected = functional.rms_norm(hidden, (HIDDEN,)) @ qkv.view(HIDDEN, 5120)
        parts = projected.view(4, 4096, 40, 128).transpose(1, 2).split([32, 4, 4], dim=1)
        key, value = (part.repeat_interleave(8, dim=1) for part in parts[1:])
        attended = functional.scaled_dot_product_attention(parts[0], key, value, is_causal=True)
        hidden = hidden + attended.transpose(1, 2).reshape(TOKENS, 4096) @ heads.view(4096, HIDDEN)
        rows = functional.rms_norm(hidden, (HIDDEN,)).index_select(0, self.order)
        gate, up = functional.grouped_mm(rows, inner.view(EXPERTS, HIDDEN, 2 * WIDTH), offs=self.ends).chunk(2, dim=-1)
        down = functional.grouped_mm(functional.silu(gate) * up, outer.view(EXPERTS, WIDTH, HIDDEN), offs=self.ends)
        return hidden + 0.1 * down.view(TOKENS, TOPK, HIDDEN).sum(1)


def main() -> None:
    """Measure all forms."""
    fields = "--query-gpu=power.draw.instant,clocks.sm"
    command = ["nvidia-smi", fields, "--format=csv,noheader,nounits", "-lms", "50"]
    samples: list[tuple[float, list[float]]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:

        def read() -> None:
            for line in process.stdout or ():
                samples.append((time.time(), [float(value) for value in line.split(",")]))

        threading.Thread(target=read, daemon=True).start()
        step = Step()

        def measure(name: str, **form: int) -> None:
            for _ in range(2):
                step.run(**form)
            torch.cuda.synchronize()
            began, begin, end = time.time(), *(torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(REPEATS):
                step.run(**form)
            end.record()
            torch.cuda.synchronize()
            seen = [values for moment, values in list(samples) if moment > began + 0.2] or [[0.0, 0.0]]
            watts, clock = (sum(column) / len(seen) for column in zip(*seen, strict=True))
            milliseconds = begin.elapsed_time(end) / REPEATS
            print(f"{name:50s} {milliseconds:8.2f} ms {watts:6.0f} W {clock:6.0f} MHz", flush=True)

        with torch.no_grad():
            measure("Adam alone", forward=False)
            measure("the forward pass alone", adam=False)
            measure("one after the other")
            for programs in (16, 32, 64, 128):
                measure(f"Adam alone, {programs} programs", programs=programs, forward=False)
            measure("at the same time, one program a block", beside=True)
            for programs, left in ((16, 8), (32, 16), (64, 16), (64, 32), (96, 24), (128, 32), (264, 0), (264, 66)):
                measure(
                    f"at the same time, {programs} programs, {left} left", programs=programs, beside=True, left=left
                )
        process.kill()


if __name__ == "__main__":
    main()

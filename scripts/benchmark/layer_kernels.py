"""Kernels of one GPU compared with their alternatives; prints a RESULT line for each, in milliseconds.

    python3 scripts/benchmark/layer_kernels.py [swiglu rotary latent-rotary normalized-rotary norm liger
        weight-gradient expert-products squares embedding adam attention attention-shapes]

Times are medians of device events over fresh buffers; the bandwidth counts each input and output once.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_wrap.nn.kernels import rms_norm, rotary
from megatron_wrap.nn.kernels.attention.latent_rotary import latent_rotary
from megatron_wrap.nn.kernels.attention.normalized_rotary import HeadNorms, split_normalized_rotary
from megatron_wrap.nn.kernels.expert_products import expert_products
from megatron_wrap.nn.kernels.square_sums import square_sum
from megatron_wrap.nn.kernels.weight_gradients import WeightGradients

DEVICE = torch.device("cuda")
TOKENS, HIDDEN, FFN = 16384, 2048, 8192


def median_ms(function: Callable[[], Any], repeats: int = 15) -> float:
    """Median device time of a call."""
    return medians_in_turn({"": function}, repeats)[""]


def medians_in_turn(
    ways: dict[str, Callable[[], Any]], repeats: int = 15, between: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """Median device time of a call of each way, one after the other in each repeat.

    Args:
        between: other work of the device before each call. Large products one after the other take as much power as
            the GPU may, and its clock falls; in a step other kernels run between them.
    """
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats + 3):
        for way, function in ways.items():
            between()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            function()
            end.record()
            end.synchronize()
            times[way].append(start.elapsed_time(end))
    return {way: sorted(measured[3:])[repeats // 2] for way, measured in times.items()}


def result(name: str, way: str, milliseconds: float, gigabytes: float | None = None, **more: Any) -> None:
    """Print one RESULT line."""
    entry = {"kernel": name, "way": way, "ms": round(milliseconds, 3), **more}
    if gigabytes is not None:
        entry["TB_per_s"] = round(gigabytes / milliseconds, 2)
    print("RESULT", json.dumps(entry), flush=True)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A normal tensor on the device that requires a gradient."""
    return torch.randn(*shape, dtype=dtype, device=DEVICE, requires_grad=True)


def both_passes(name: str, way: str, function: Callable[..., torch.Tensor], *inputs: torch.Tensor, gb: float) -> None:
    """Forward and forward + backward."""
    out = function(*inputs)
    grad = torch.randn_like(out)
    result(name, f"{way}, forward", median_ms(lambda: function(*inputs)))
    result(name, f"{way}, both", median_ms(lambda: torch.autograd.grad(function(*inputs), inputs, grad)), gb)


def parts_of_attention(
    name: str,
    ways: dict[str, Callable[..., tuple[torch.Tensor, ...]]],
    inputs: tuple[torch.Tensor, ...],
    grads: tuple[torch.Tensor, ...],
    gb: float,
) -> None:
    """Forward and forward + backward of functions that return queries, keys and values."""
    for way, function in ways.items():

        def train(function: Callable[..., Any] = function) -> None:
            torch.autograd.grad(function(*inputs), inputs, grads)

        result(name, f"{way}, forward", median_ms(lambda function=function: function(*inputs)))
        result(name, f"{way}, both", median_ms(train), gb)


def measure_swiglu() -> None:
    """SwiGLU of one micro-batch of 16,384 tokens."""
    from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl

    from megatron_wrap.nn.kernels import swiglu

    gates = random(TOKENS, 2 * FFN)
    gb = TOKENS * FFN * 2 * (2 + 1 + 2 + 1 + 2) / 1e9
    both_passes("swiglu", "megatron", lambda x: bias_swiglu_impl(x, None), gates, gb=gb)
    both_passes("swiglu", "liger", swiglu.swiglu, gates, gb=gb)


def measure_rotary() -> None:
    """Rotary embedding of the queries, from a strided view as in the layer."""
    from megatron.core.models.common.embeddings import rope_utils

    mixed = torch.randn(4096, 4, 8, 6 * 64, dtype=torch.bfloat16, device=DEVICE)
    query = mixed[..., : 4 * 64].reshape(4096, 4, 32, 64).detach().requires_grad_()
    angles = torch.outer(torch.arange(4096.0), 1.0 / 500000 ** (torch.arange(0, 64, 2) / 64)).to(DEVICE)
    angles = torch.cat((angles, angles), dim=-1)[:, None, None]
    gb = query.numel() * 2 * 4 / 1e9
    plain = rope_utils._apply_rotary_pos_emb_bshd
    both_passes("rotary", "megatron", lambda x: plain(x, angles), query, gb=gb)
    both_passes("rotary", "triton", lambda x: rotary.apply_rotary(x, angles), query, gb=gb)
    te = rope_utils.fused_apply_rotary_pos_emb
    if te is not None:
        both_passes("rotary", "transformer engine", lambda x: te(x, angles), query, gb=gb)
    mixed = random(4096, 4, 8, 6 * 64)
    gb = mixed.numel() * 2 * 4 / 1e9

    def split_then_rotate(x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.split((256, 64, 64), dim=-1)
        q = q.reshape(4096, 4, 32, 64)
        return torch.cat((plain(q, angles), plain(k, angles), v), dim=2)

    def in_one(x: torch.Tensor) -> torch.Tensor:
        return torch.cat(rotary.split_rotary(x, angles, 4, 64), dim=2)

    both_passes("split and rotary, and a concatenation", "megatron", split_then_rotate, mixed, gb=gb)
    both_passes("split and rotary, and a concatenation", "triton", in_one, mixed, gb=gb)


def measure_latent_rotary() -> None:
    """Queries, keys and values of latent attention with DeepSeek-V3's head sizes and 32 heads, from the projections."""
    from megatron.core.models.common.embeddings import rope_utils

    angles = torch.outer(torch.arange(4096.0), 1.0 / 10000 ** (torch.arange(0, 64, 2) / 64)).to(DEVICE)
    angles = torch.cat((angles, angles), dim=-1)[:, None, None]
    inputs = random(4096, 4, 32, 192), random(4096, 4, 32, 256), random(4096, 4, 64)
    grads = tuple(torch.randn(4096, 4, 32, width, dtype=torch.bfloat16, device=DEVICE) for width in (192, 192, 128))

    def plain(tensor: torch.Tensor) -> torch.Tensor:
        tensor = torch.cat((tensor[..., ::2], tensor[..., 1::2]), dim=-1)  # as Megatron-Core for latent attention
        return rope_utils._apply_rotary_pos_emb_bshd(tensor, angles)

    def megatron(query: torch.Tensor, mixed: torch.Tensor, shared: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, to_rotate = query.split((128, 64), dim=-1)
        of_key, value = mixed.split((128, 128), dim=-1)
        of_all = plain(shared[:, :, None]).expand(-1, -1, 32, -1)
        whole = torch.cat((query, plain(to_rotate)), dim=-1), torch.cat((of_key, of_all), dim=-1)
        return *whole, value.contiguous()

    def in_one(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return latent_rotary(*tensors, angles, 128)

    # the queries' rotary parts, 64 of their 192 entries, and of keys and values the projection and the result
    gb = 2 * 2 * (TOKENS * 32 * (2 * 64 + 256 + 192 + 128) + TOKENS * 64) / 1e9
    parts_of_attention("latent rotary", {"megatron": megatron, "triton": in_one}, inputs, grads, gb)


def measure_normalized_rotary() -> None:
    """Queries, keys and values of Qwen3-30B-A3B's 32 and 4 heads of 128, with their norms, from the projection."""
    angles = torch.outer(torch.arange(4096.0), 1.0 / 1000000 ** (torch.arange(0, 128, 2) / 128)).to(DEVICE)
    angles = torch.cat((angles, angles), dim=-1)[:, None, None]
    inputs = random(4096, 4, 4, 10 * 128), random(128), random(128)
    grads = tuple(torch.randn(4096, 4, heads, 128, dtype=torch.bfloat16, device=DEVICE) for heads in (32, 4, 4))

    def separate(mixed: torch.Tensor, *norms: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value = mixed.split((8 * 128, 128, 128), dim=-1)
        heads = query.reshape(4096, 4, 32, 128), key
        normalized = (rms_norm.rms_norm(part, norm, 1e-6) for part, norm in zip(heads, norms, strict=True))
        return *(rotary.apply_rotary(part, angles) for part in normalized), value.contiguous()

    def in_one(mixed: torch.Tensor, *norms: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return split_normalized_rotary(mixed, HeadNorms(*norms, eps=1e-6), angles, 8)

    gb = inputs[0].numel() * 2 * 5 / 1e9
    parts_of_attention("normalized rotary", {"separate kernels": separate, "triton": in_one}, inputs, grads, gb)


def measure_norm() -> None:
    """RMSNorm of one micro-batch."""
    value, gamma = random(TOKENS, HIDDEN), random(HIDDEN)
    gb = TOKENS * HIDDEN * 2 * 5 / 1e9
    both_passes("norm", "torch", lambda x, g: F.rms_norm(x, (HIDDEN,), g, 1e-5), value, gamma, gb=gb)
    compiled = torch.compile(lambda x, g: F.rms_norm(x, (HIDDEN,), g, 1e-5))
    both_passes("norm", "torch.compile", compiled, value, gamma, gb=gb)
    both_passes("norm", "triton", lambda x, g: rms_norm.rms_norm(x, g, 1e-5), value, gamma, gb=gb)
    try:
        import transformer_engine.pytorch as te
    except ImportError:
        return
    module = te.RMSNorm(HIDDEN, params_dtype=torch.bfloat16)
    both_passes("norm", "transformer engine", lambda x, g: module(x), value, module.weight, gb=gb)


def measure_liger() -> None:
    """RMSNorm compared with Liger-Kernel's: error, memory, and times of calls that take turns."""
    from comparison import with_liger
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    def llama_norm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        return LigerRMSNormFunction.apply(x, gamma, 1e-5, 0.0, "llama", False, None)

    norms = {
        "ours": lambda x, gamma: rms_norm.rms_norm(x, gamma, 1e-5),
        "liger": lambda x, gamma: with_liger.rms_norm(x, gamma, 1e-5),
        "liger, llama's casts": llama_norm,
    }

    def exact_norm(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, gamma.shape, gamma, 1e-5)

    for dtype in (torch.bfloat16, torch.float32):
        for width in (128, 2048, 4096):
            gamma = random(width, dtype=dtype)
            errors("norm", norms, exact_norm, random(4096, width, dtype=dtype), gamma)
    for rows in (16384, 32768):
        for width in (2048, 4096):
            in_turns("norm", norms, random(rows, width), random(width))
    in_turns("norm of queries", norms, random(16384 * 32, 128), random(128))


def errors(name: str, ways: dict[str, Any], exact: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> None:
    """Distance of the result and of each gradient from those in float64, over their norm."""
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    result_exact = exact(*wide)
    grad = torch.randn_like(result_exact).to(inputs[0].dtype)
    expected = (result_exact.detach(), *torch.autograd.grad(result_exact, wide, grad.double()))
    for way, function in ways.items():
        out = function(*inputs)
        values = (out.detach(), *torch.autograd.grad(out, inputs, grad))
        distances = [
            f"{float((value.double() - other).norm() / other.norm()):.2e}"
            for value, other in zip(values, expected, strict=True)
        ]
        entry = {"kernel": name, "way": way, "shape": list(inputs[0].shape), "dtype": str(inputs[0].dtype)}
        print("RESULT", json.dumps({**entry, "errors": distances}), flush=True)


def in_turns(name: str, ways: dict[str, Any], *inputs: torch.Tensor, repeats: int = 60) -> None:
    """Median device times of forward and backward, each after the cache was overwritten, the ways taking turns."""
    cache = torch.empty(2**30, dtype=torch.uint8, device=DEVICE)  # its write also hides what the host needs to launch
    grad = torch.randn_like(next(iter(ways.values()))(*inputs))
    times: dict[tuple[str, str], list[float]] = {}
    peaks = {}
    for turn in range(repeats + 5):
        for way in list(ways)[:: -1 if turn % 2 else 1]:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
            cache.zero_()
            events[0].record()
            out = ways[way](*inputs)
            events[1].record()
            cache.zero_()
            events[2].record()
            grads = torch.autograd.grad(out, inputs, grad)
            events[3].record()
            torch.cuda.synchronize()
            peaks[way] = (torch.cuda.max_memory_allocated() - before) / 2**20
            del out, grads
            if turn >= 5:
                times.setdefault((way, "forward"), []).append(events[0].elapsed_time(events[1]))
                times.setdefault((way, "backward"), []).append(events[2].elapsed_time(events[3]))
    for direction in ("forward", "backward"):
        ours = sorted(times["ours", direction])[repeats // 2]
        for way in ways:
            ordered = sorted(times[way, direction])
            median = ordered[repeats // 2]
            result(
                f"{name}, {direction}",
                way,
                median,
                shape=list(inputs[0].shape),
                over_ours=round(median / ours, 3),
                quartiles=[round(ordered[repeats // 4], 4), round(ordered[3 * repeats // 4], 4)],
                peak_MiB=round(peaks[way]),
            )


def measure_weight_gradient() -> None:
    """Weight gradient of the first feed-forward layer, added to the fp32 buffer."""
    inputs, grad = random(TOKENS, HIDDEN).detach(), random(TOKENS, 2 * FFN).detach()
    total = torch.zeros(2 * FFN, HIDDEN, device=DEVICE)
    result("weight-gradient", "product, then add", median_ms(lambda: total.add_(grad.t() @ inputs)))
    result(
        "weight-gradient",
        "in one",
        median_ms(lambda: WeightGradients.wgrad_gemm_accum_fp32(inputs, grad, total)),
    )
    flops = 2 * TOKENS * HIDDEN * 2 * FFN
    milliseconds = median_ms(lambda: grad.t() @ inputs)
    result("weight-gradient", "product alone", milliseconds, tflops=round(flops / milliseconds / 1e9))


def measure_embedding() -> None:
    """Gradient of the word embeddings of a micro-batch in the fp32 buffer, to which Megatron-Core's hook adds torch's.
    Tokens are words by Zipf's law, these with half of them padding, or all different."""
    from megatron_wrap.nn.kernels.embedding.row_gradients import add_row_gradients

    vocabulary = 128256
    total = torch.zeros(vocabulary, HIDDEN, device=DEVICE)
    for tokens in (4096, TOKENS):
        grad = random(4096, tokens // 4096, HIDDEN).detach().transpose(0, 1)
        words = torch.multinomial(1.0 / torch.arange(1, vocabulary + 1, device=DEVICE), tokens, replacement=True)
        kinds = {"words": words, "different": torch.randperm(vocabulary, device=DEVICE)[:tokens]}
        kinds["half padding"] = torch.where(torch.rand(tokens, device=DEVICE) < 0.5, 3, words)
        for kind, tokens_of_kind in kinds.items():
            ids = tokens_of_kind.view(grad.shape[:2])

            def by_torch(ids: torch.Tensor = ids, grad: torch.Tensor = grad) -> None:
                total.add_(torch.ops.aten.embedding_dense_backward(grad, ids, vocabulary, -1, False))

            def by_rows(ids: torch.Tensor = ids, grad: torch.Tensor = grad) -> None:
                add_row_gradients(ids, grad, total)

            rows = int(ids.unique().numel())
            shape: dict[str, Any] = {"tokens": tokens, "ids": kind, "rows": rows}
            result("embedding", "torch, then add", median_ms(by_torch), **shape)
            result("embedding", "triton", median_ms(by_rows), (tokens * 2 + rows * 8) * HIDDEN / 1e9, **shape)


def measure_adam() -> None:
    """One update of 500 million fp32 parameters in 60 tensors."""
    from megatron_wrap.platform.megatron_core.adam import GroupStepAdam

    params = [torch.nn.Parameter(torch.randn(8_333_333, device=DEVICE)) for _ in range(60)]
    for param in params:
        param.grad = torch.randn_like(param)
    gb = sum(param.numel() for param in params) * 28 / 1e9
    ways: dict[str, Any] = {"ours": GroupStepAdam, "torch fused": lambda p, lr: torch.optim.AdamW(p, lr=lr, fused=True)}
    try:
        from transformer_engine.pytorch.optimizers import FusedAdam

        ways["transformer engine"] = FusedAdam
    except ImportError:
        pass
    for way, build in ways.items():
        optimizer = build(params, lr=1e-4)
        result("adam", way, median_ms(optimizer.step), gb)
        started = time.perf_counter()
        optimizer.step()
        host = time.perf_counter() - started
        torch.cuda.synchronize()
        result("adam", f"{way}, on the host", host * 1e3)
        del optimizer


BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def _attention_inputs(
    batch: int, length: int, heads: int, groups: int, width: int, value_width: int
) -> tuple[torch.Tensor, ...]:
    """Views [b, heads, s, d]; the first width is of queries and keys."""
    sizes = ((heads, width), (groups, width), (groups, value_width))
    return tuple(random(length, batch, *size).permute(1, 2, 0, 3) for size in sizes)


def measure_attention() -> None:
    """Causal attention with each backend, over lengths and head sizes, from views of [s, b, heads, d]."""
    latent = ((32, 32, 192, 128), (32, 32, 192, 192))  # and with padded values
    for (heads, groups, width, value_width), (batch, length) in itertools.product(
        ((32, 8, 64, 64), (32, 8, 128, 128), (16, 16, 256, 256), *latent),
        ((16, 512), (8, 2048), (4, 4096), (1, 16384), (1, 32768)),
    ):
        inputs = _attention_inputs(batch, length, heads, groups, width, value_width)
        for way, backend in BACKENDS.items():

            def call(*tensors: torch.Tensor, backend: Any = backend) -> torch.Tensor:
                with sdpa_kernel(backend):
                    return F.scaled_dot_product_attention(*tensors, is_causal=True, enable_gqa=True)

            def train(tensors: tuple[torch.Tensor, ...] = inputs, call: Callable[..., torch.Tensor] = call) -> None:
                out = call(*tensors)
                torch.autograd.grad(out, tensors, out.detach())

            try:
                milliseconds = median_ms(train, 7)
            except RuntimeError as error:
                print("RESULT", way, heads, width, value_width, length, str(error)[:200].replace("\n", " "))
                continue
            flops = 3.5 * 2 * batch * heads * (width + value_width) * length**2 / 2
            shape = f"b{batch} s{length} h{heads}/{groups} d{width}/{value_width}"
            result("attention", way, milliseconds, shape=shape, tflops=round(flops / milliseconds / 1e9))


def measure_attention_shapes() -> None:
    """The first call at each new length, which is where cuDNN builds a plan."""
    for way, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            warm = _attention_inputs(2, 1000, 32, 8, 64, 64)
            torch.autograd.grad(F.scaled_dot_product_attention(*warm, is_causal=True, enable_gqa=True).sum(), warm)
            torch.cuda.synchronize()
            started = time.perf_counter()
            for length in range(1016, 1016 + 16 * 10, 16):
                inputs = _attention_inputs(2, length, 32, 8, 64, 64)
                out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)
                torch.autograd.grad(out.sum(), inputs)
            torch.cuda.synchronize()
            result("attention", f"{way}, first call at a new length", (time.perf_counter() - started) * 100)


def measure_expert_products() -> None:
    """Both products of Qwen3-30B-A3B's 128 experts with 131,072 rows, and the gradients of their rows: torch's and
    Triton's in turn, one after the other and with kernels between that are limited by memory."""
    experts, count = 128, 131072
    chosen = torch.randint(0, experts, (count,), device=DEVICE)
    ends = torch.bincount(chosen, minlength=experts).cumsum(0).int()
    buffer = torch.randn(64 * 2**20, device=DEVICE)

    def scale() -> None:
        for _ in range(6):
            buffer.mul_(1.0)

    for outputs, inputs in ((1536, 2048), (2048, 768)):
        weight = torch.randn(experts, outputs, inputs, dtype=torch.bfloat16, device=DEVICE)
        for name, matrices in (("forward", weight.transpose(1, 2)), ("rows' gradient", weight)):
            rows = torch.randn(count, matrices.shape[1], dtype=torch.bfloat16, device=DEVICE)
            ways = {
                "torch": lambda r=rows, m=matrices: F.grouped_mm(r, m, offs=ends),
                "triton": lambda r=rows, m=matrices: expert_products(r, m, ends),
            }
            shape = f"{matrices.shape[1]} to {matrices.shape[2]}"
            for where, between in (("one after the other", lambda: None), ("with others between", scale)):
                for way, milliseconds in medians_in_turn(ways, between=between).items():
                    tflops = round(2 * count * outputs * inputs / milliseconds / 1e9)
                    result("expert products", f"{way}, {name}, {where}", milliseconds, shape=shape, tflops=tflops)


def measure_squares() -> None:
    """The sum of squares of the gradient of the first weight of 128 experts."""
    gradient = torch.randn(128 * 1536 * 2048, device=DEVICE)
    gb = gradient.numel() * 4 / 1e9
    result("squares", "triton", median_ms(lambda: square_sum([gradient])), gb)
    from transformer_engine.pytorch.optimizers import multi_tensor_applier, multi_tensor_l2norm

    overflow = torch.zeros(1, dtype=torch.int, device=DEVICE)
    norm = median_ms(lambda: multi_tensor_applier(multi_tensor_l2norm, overflow, [[gradient]], False))
    result("squares", "transformer engine", norm, gb)


PARTS = {
    "swiglu": measure_swiglu,
    "rotary": measure_rotary,
    "latent-rotary": measure_latent_rotary,
    "normalized-rotary": measure_normalized_rotary,
    "norm": measure_norm,
    "liger": measure_liger,
    "weight-gradient": measure_weight_gradient,
    "expert-products": measure_expert_products,
    "squares": measure_squares,
    "embedding": measure_embedding,
    "adam": measure_adam,
    "attention": measure_attention,
    "attention-shapes": measure_attention_shapes,
}


def main() -> None:
    """Measure the parts that the arguments name, or all."""
    torch.manual_seed(0)
    for part in sys.argv[1:] or PARTS:
        try:
            PARTS[part]()
        except Exception as error:  # the other parts are still measured
            print("RESULT", part, "failed:", repr(error)[:300], flush=True)


if __name__ == "__main__":
    main()

"""The exchanges of torch's attention on two GPUs: the gradients of the ring are those of one GPU in fp32, and in bf16,
with the kernels of GPUs, as near to them as with gathered keys and values. So is Transformer Engine's attention with
windows and sinks, which exchanges heads. Copy engines send what NCCL sends, also in CUDA graphs. Skipped without two
GPUs."""

from __future__ import annotations

import contextlib
import faulthandler
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import _implementations
import _packing_runs

CONFIG = Path(__file__).parents[1] / "distributed/layouts.yaml"
PARALLEL, ARCH = "megatron_lm.model.parallel.", "megatron_lm.model.arch."
BF16 = "megatron_lm.train.dtype.__select__=bf16"


def settings(length: int, *more: str) -> list[str]:
    return [
        *(f"{ARCH}hidden_size=512", f"{ARCH}num_attention_heads=8", f"{ARCH}num_query_groups=2"),
        *(f"{ARCH}ffn_hidden_size=512", f"{ARCH}max_position_embeddings={length}", f"{ARCH}transformer_impl=torch"),
        *(f"megatron_lm.train.common.seq_length={length}", "megatron_wrap.init.platform=cuda"),
        *more,
    ]


def shared(exchange: str) -> tuple[str, str]:
    return (f"{PARALLEL}context_parallel_size=2", f"{PARALLEL}cp_comm_type={exchange}")


def samples(lengths: list[int]) -> list[dict[str, list[int]]]:
    generator = random.Random(7)
    return [
        {"input_ids": [generator.randrange(500) for _ in range(length)], "loss_mask": [1] * length}
        for length in lengths
    ]


def difference(result: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all gradients, relative to the norm of the exact ones."""
    squares = sum(float((result[name] - exact[name]).double().square().sum()) for name in exact)
    return (squares / sum(float(tensor.double().square().sum()) for tensor in exact.values())) ** 0.5


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    ("lengths", "softmax"),
    [
        pytest.param([2048] * 8, "vanilla", id="cuDNN"),  # a GPU's chunks are multiples of 512
        pytest.param([2048] * 8, "learnable", id="cuDNN, sinks"),
        pytest.param([1000] * 8, "vanilla", id="flash attention"),
        pytest.param([1000] * 8, "learnable", id="flash attention, sinks"),
        pytest.param([700, 5, 130, 1000, 64, 333, 2, 512], "learnable", id="packed rows, sinks"),
    ],
)
def test_a_ring_has_the_gradients_of_one_gpu(lengths, softmax, ranks):
    packing = [f"megatron_wrap.flow.packing={str(len(set(lengths)) > 1).lower()}"]

    def gradients(processes: int, *more: str) -> dict[str, torch.Tensor]:
        overrides = settings(max(lengths), f"{ARCH}softmax_type={softmax}", *more)
        return ranks(processes).run(_packing_runs.gradients, str(CONFIG), overrides, samples(lengths))[0][0]

    exact = gradients(1)
    assert difference(gradients(2, *packing, *shared("p2p")), exact) <= 1e-5
    of_ring, of_gathering = (gradients(2, BF16, *packing, *shared(exchange)) for exchange in ("p2p", "all_gather"))
    ring, gathered = difference(of_ring, exact), difference(of_gathering, exact)
    print(f"{sum(lengths)} tokens, {softmax}: bf16 p2p {ring:.5f}, all_gather {gathered:.5f} from fp32")
    assert ring <= 1.5 * gathered


def gradients_by_any_kernel(*arguments: Any) -> Any:
    """As `_packing_runs.gradients`, also by kernels that are not deterministic."""
    torch.use_deterministic_algorithms(False)
    try:
        return _packing_runs.gradients(*arguments)
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)  # as the pool has them


@pytest.mark.gpus(2)
@pytest.mark.skipif(not _implementations.HAS_TE, reason="Transformer Engine is not installed")
@pytest.mark.parametrize("options", [("window_size=[255,0]",), ("softmax_type=learnable",)], ids=["window", "sinks"])
def test_transformer_engine_exchanges_heads_of_windows_and_sinks(options, ranks):
    """As near to fp32 of one GPU as torch's attention with gathered keys and values, which deterministic kernels of
    sinks require."""
    engine = f"{ARCH}transformer_impl=transformer_engine"

    def gradients(function: Any, processes: int, *more: str) -> list[tuple[dict[str, torch.Tensor], dict[str, int]]]:
        overrides = settings(2048, *(ARCH + option for option in options), *more)
        return ranks(processes).run(function, str(CONFIG), overrides, samples([2048] * 8))

    def of_processes(function: Any, exchange: str, *more: str) -> tuple[float, set[str]]:
        """The difference from fp32 of one GPU, and the kernels that were called."""
        exact = gradients(_packing_runs.gradients, 1, *more)[0][0]
        result, counts = gradients(function, 2, BF16, *shared(exchange), *more)[0]
        return difference(result, exact), set(counts)

    gathered, _ = of_processes(_packing_runs.gradients, "all_gather")
    for function in (gradients_by_any_kernel, _packing_runs.gradients):
        exchanged, kernels = of_processes(function, "a2a", engine)
        print(f"{options}: a2a {exchanged:.5f} ({kernels or 'of torch'}), all_gather of torch {gathered:.5f} from fp32")
        with_fused_attention = function is gradients_by_any_kernel or "softmax_type=learnable" not in options
        assert any(kernel.startswith("fused") for kernel in kernels) == with_fused_attention, kernels
        assert exchanged <= 1.5 * gathered


LAYERS, STEPS = 3, 4


class Layers:
    """The ring of all ranks in layers one after the other, of which each has its own keys and values."""

    def __init__(self, tokens: int, rows: int, causal: bool) -> None:
        self.causal = causal
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        self.grad, *self.inputs = (
            torch.randn(tokens, rows, heads, 64, generator=generator).bfloat16().cuda()
            for heads in (8, 8, *(2, 2) * LAYERS)
        )
        for tensor in self.inputs:
            tensor.requires_grad_()
        self.output = self.grad

    def run(self) -> None:
        """Forward and backward pass."""
        from megatron_wrap.nn.attention.ring import attend_in_ring

        hidden = self.inputs[0]
        for layer in range(LAYERS):
            keys_and_values = self.inputs[2 * layer + 1 : 2 * layer + 3]
            hidden = hidden + attend_in_ring(
                hidden, *keys_and_values, torch.distributed.group.WORLD, causal=self.causal, scale=0.125
            )
        self.output = hidden
        for tensor, gradient in zip(self.inputs, torch.autograd.grad(hidden, self.inputs, self.grad), strict=True):
            tensor.grad = gradient

    def captured(self) -> Callable[[], None]:
        """A function that replays the CUDA graph of a call."""
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            self.run()
        return graph.replay


def results_of_steps(layers: Layers, call: Callable[[], None]) -> list[list[torch.Tensor]]:
    """Outputs and gradients, with other inputs in each step."""
    results = []
    for _ in range(STEPS):
        call()
        results.append([layers.output.detach().clone(), *(tensor.grad.clone() for tensor in layers.inputs)])
        with torch.no_grad():
            for tensor in layers.inputs:
                tensor.mul_(0.9)
    return results


def differences_from_nccl(tokens: int, rows: int, causal: bool) -> dict[str, tuple[float, float]]:
    """Of NCCL in another call, of the copy engines, and of these in CUDA graphs: the largest difference of an output
    and of a gradient in any step, by their norms."""
    from megatron_wrap.parallel import collectives, peer_memory

    faulthandler.dump_traceback_later(40, exit=True)
    results = {}
    for kind in ("nccl", "nccl again", "peers", "peers in graphs"):
        layers, without = Layers(tokens, rows, causal), mock.patch.object(collectives, "peer_memory", return_value=None)
        with without if kind.startswith("nccl") else contextlib.nullcontext():
            call = layers.captured() if kind == "peers in graphs" else layers.run
            results[kind] = results_of_steps(layers, call)
    memories = list(peer_memory._memories.values())
    torch.cuda.synchronize()
    peer_memory.release()
    assert memories
    assert None not in memories, "the GPUs do not reach each other's memory"
    expected, largest = results.pop("nccl"), {}
    for kind, steps in results.items():
        differences = [
            [float((ours - theirs).float().norm() / theirs.float().norm()) for ours, theirs in zip(*step, strict=True)]
            for step in zip(steps, expected, strict=True)
        ]
        largest[kind] = max(step[0] for step in differences), max(max(step[1:]) for step in differences)
    faulthandler.cancel_dump_traceback_later()
    return largest


@pytest.mark.parametrize(
    ("tokens", "rows", "causal"),
    [
        pytest.param(2048, 1, True, id="cuDNN"),
        pytest.param(1024, 2, True, id="cuDNN, two rows"),
        pytest.param(1024, 1, False, id="cuDNN, not causal"),
        pytest.param(500, 2, True, id="flash attention"),
    ],
)
@pytest.mark.parametrize("size", [pytest.param(size, marks=pytest.mark.gpus(size)) for size in (2, 4)])
def test_copy_engines_send_what_nccl_sends(size, tokens, rows, causal, ranks):
    """Outputs bit for bit; cuDNN adds up the gradients of queries in any order."""
    for differences in ranks(size).run(differences_from_nccl, tokens, rows, causal):
        print(differences)
        assert all(output == 0 and gradient < 1e-2 for output, gradient in differences.values()), differences

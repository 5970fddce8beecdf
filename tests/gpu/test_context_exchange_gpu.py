"""The exchanges of torch's attention on two GPUs: the gradients of the ring are those of one GPU in fp32, and in bf16,
with the kernels of GPUs, as near to them as with gathered keys and values. Skipped without two GPUs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("needs 2 GPUs", allow_module_level=True)

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

"""Packed rows on GPUs: equal to unpacked sequences in fp32 with both implementations; in bf16 with the kernels for
packed rows, and no further from fp32 than unpacked sequences are. Skipped without a GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import _packing_runs
from _implementations import IMPLEMENTATIONS

from megatron_wrap.testing import check_parity

CONFIG = Path(__file__).parents[1] / "distributed/layouts.yaml"
ONE_GPU, TWO_GPUS = (
    ("packed", "token-budget"),
    ("packed-tp2-sp", "packed-cp2", "packed-pp2", "packed-pp2-vpp2", "packed-dp2"),
)
PARALLEL = "megatron_lm.model.parallel"


def sft_samples(longest: int, count: int = 16, seed: int = 3) -> list[dict[str, list[int]]]:
    generator = random.Random(seed)
    lengths = [generator.randint(longest // 8, longest) for _ in range(count)]
    return [
        {
            "input_ids": [generator.randrange(500) for _ in range(length)],
            "loss_mask": [int(generator.random() < 0.6) for _ in range(length)],
        }
        for length in lengths
    ]


def pairs(count: int = 16) -> list[dict[str, list[int]]]:
    generator = random.Random(5)
    lengths = {"prompt_ids": 8, "chosen_ids": 24, "rejected_ids": 24}
    return [
        {key: [generator.randrange(500) for _ in range(generator.randint(1, most))] for key, most in lengths.items()}
        for _ in range(count)
    ]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("flow", ["gpt_sft", "gpt_dpo"])
@pytest.mark.parametrize(
    "layouts", [ONE_GPU, pytest.param(TWO_GPUS, marks=pytest.mark.gpus(2))], ids=["one-gpu", "two-gpus"]
)
def test_packed_equals_unpacked_in_fp32(layouts, flow, implementation, ranks):
    report = check_parity(
        CONFIG,
        [
            f"megatron_wrap.flow.__select__={flow}",
            f"megatron_lm.model.arch.transformer_impl={implementation}",
            *([] if flow == "gpt_sft" else ["megatron_wrap.models.reference=copy"]),
        ],
        samples=sft_samples(48) if flow == "gpt_sft" else pairs(),
        layouts=layouts,
        steps=1,
        platform="cuda",
        ranks=ranks,
    )
    assert [row.layout for row in report.rows if row.agrees is not True] == [], report.table()
    assert max(row.objective_difference for row in report.rows) <= 1e-6, report.table()
    assert max(row.gradient_difference for row in report.rows) <= 1e-5, report.table()


def errors(result: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Norm of the difference of all gradients, relative to the norm of the exact ones."""
    difference = sum(float((result[name] - exact[name]).double().square().sum()) for name in exact)
    return (difference / sum(float(tensor.double().square().sum()) for tensor in exact.values())) ** 0.5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param((), id="one"),
        pytest.param((f"{PARALLEL}.context_parallel_size=2",), id="cp2", marks=pytest.mark.gpus(2)),
    ],
)
def test_bf16_kernels_run_and_are_as_exact_as_unpacked(layout, implementation, ranks):
    samples = sft_samples(512, count=8)
    size = (
        "megatron_lm.model.arch.hidden_size=256",
        "megatron_lm.model.arch.num_attention_heads=4",
        "megatron_lm.model.arch.ffn_hidden_size=512",
        "megatron_lm.train.common.seq_length=512",
        "megatron_wrap.init.platform=cuda",
        f"megatron_lm.model.arch.transformer_impl={implementation}",
    )
    bf16 = "megatron_lm.train.dtype.__select__=bf16"
    packing = "megatron_wrap.flow.packing=true"
    pool = ranks(2 if layout else 1)
    exact, _ = ranks(1).run(_packing_runs.gradients, str(CONFIG), [*size], samples)[0]
    unpacked, _ = pool.run(_packing_runs.gradients, str(CONFIG), [*size, *layout, bf16], samples)[0]
    results = pool.run(_packing_runs.gradients, str(CONFIG), [*size, *layout, bf16, packing], samples)
    packed = results[0][0]
    ours = "ring" if layout else "varlen_attn"
    kernel = ours if implementation == "torch" else "fused thd_thd_thd"
    for _, counts in results:
        assert counts.get(kernel, 0) > 0, counts
        assert set(counts) == {kernel}, counts
    print(f"{implementation} {layout}: packed {errors(packed, exact):.5f}, unpacked {errors(unpacked, exact):.5f}")
    assert errors(packed, exact) <= 1.5 * errors(unpacked, exact)

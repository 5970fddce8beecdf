"""Whose attention the layers of Transformer Engine use, by what its `get_attention_backend` documents."""

from pathlib import Path

import pytest

from megatron_wrap.config import load_run_config
from megatron_wrap.model.gpt_provider import can_use_attention_of_transformer_engine

RUN = Path(__file__).parents[3] / "configs/tiny-llama-mock.yaml"
BF16, FP32 = (f"megatron_lm.train.dtype.__select__={kind}" for kind in ("bf16", "fp32"))
CP2, PACKED = "megatron_lm.model.parallel.context_parallel_size=2", "megatron_wrap.flow.packing=true"
ARCH = "megatron_lm.model.arch."
BY_HEADS, WINDOW, SINKS = (
    f"{ARCH}{text}" for text in ("cp_comm_type=a2a", "window_size=[7,0]", "softmax_type=learnable")
)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((FP32, WINDOW, SINKS), True),
        ((BF16, PACKED, WINDOW), True),
        ((BF16, PACKED, SINKS), False),
        ((BF16, CP2), True),
        ((FP32, CP2), False),
        ((BF16, CP2, WINDOW), False),
        ((BF16, CP2, SINKS), False),
        ((BF16, CP2, WINDOW, SINKS, BY_HEADS), True),
        ((BF16, CP2, WINDOW, PACKED, BY_HEADS), False),
    ],
)
def test_windows_and_sinks_with_context_parallelism_and_packed_rows(overrides: tuple[str, ...], expected: bool) -> None:
    assert can_use_attention_of_transformer_engine(load_run_config(RUN, overrides)) == expected

"""Which of Ray's workers become ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_wrap.bridge.loading.hub import read_run
from megatron_wrap.errors import LayoutError
from megatron_wrap.launch.ray_workers import largest_layout, workers_of_run

CONFIG = Path(__file__).parents[3] / "configs" / "tiny-llama-mock.yaml"
TP2 = ["megatron_lm.model.parallel.tensor_model_parallel_size=2"]


@pytest.mark.parametrize(
    ("overrides", "nodes", "workers"),
    [
        ([], "aabb", [0, 1, 2, 3]),
        ([], "aab", [0, 1]),  # 8 samples in micro-batches of 2
        (TP2, "aabb", [0, 1, 2, 3]),
        (TP2, "aaab", [0, 1]),
        (TP2, "aaabbb", [0, 1, 3, 4]),
        (TP2, "abb", [0, 1]),  # Ray's first worker takes part
    ],
)
def test_whole_tensor_parallel_groups_of_a_node_and_a_legal_number_take_part(overrides, nodes, workers):
    assert workers_of_run(read_run(CONFIG, overrides), nodes) == workers


def test_too_few_workers_are_refused_with_their_number():
    with pytest.raises(LayoutError, match="TP 2"):
        largest_layout(read_run(CONFIG, TP2), 1)

"""The state of Transformer Engine's Adam before its first step, and whether a checkpoint has fp32 weights."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_wrap.checkpoint.saved_tensors import keeps_remainders
from megatron_wrap.errors import CheckpointError


@pytest.mark.parametrize(
    ("optimizer", "dtype", "expected"),
    [
        ({"use_precision_aware_optimizer": True}, {"bf16": True}, True),
        ({"use_precision_aware_optimizer": True, "main_params_dtype": "fp16"}, {"bf16": True}, False),
        ({"use_precision_aware_optimizer": True}, {"bf16": False}, False),
        ({}, {"bf16": True}, False),
    ],
)
def test_which_runs_keep_remainders(optimizer: dict[str, Any], dtype: dict[str, Any], expected: bool) -> None:
    assert keeps_remainders(optimizer, dtype) is expected


def test_state_is_allocated_as_in_the_first_step() -> None:
    from megatron_wrap.checkpoint.saved_tensors import _allocate_state

    half, full = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), torch.nn.Parameter(torch.zeros(2))
    done, calls = torch.nn.Parameter(torch.zeros(2)), []
    adam = SimpleNamespace(
        param_groups=[{"params": [half, full, done]}],
        state=defaultdict(dict, {done: {"exp_avg": torch.zeros(2)}}),
        store_param_remainders=True,
        exp_avg_dtype=torch.bfloat16,
        initialize_state=lambda parameter, remainders: calls.append((parameter is half, remainders)),
    )
    _allocate_state(SimpleNamespace(optimizer=adam, config=SimpleNamespace(use_precision_aware_optimizer=True)))
    assert calls == [(True, True), (False, False)]


@pytest.mark.parametrize("saved", [True, None, False])
def test_remainders_of_weights_are_not_read_as_weights(saved: bool | None) -> None:
    from megatron_wrap.checkpoint.load import _check_optimizer

    checkpoint: Any = SimpleNamespace(
        path="saved/iter_0000002", remainders=saved, has_optimizer=True, shapes={}, frozen=None
    )
    optimizer = SimpleNamespace(use_precision_aware_optimizer=False, use_distributed_optimizer=True, optimizer="adam")
    sections = {"optimizer": optimizer, "dtype": SimpleNamespace(bf16=True), "train": SimpleNamespace(freeze=())}
    config: Any = SimpleNamespace(**sections)
    if not saved:
        _check_optimizer(checkpoint, config)
        return
    with pytest.raises(CheckpointError, match=r"saved/iter_0000002 .*16 bits.*use_precision_aware_optimizer"):
        _check_optimizer(checkpoint, config)

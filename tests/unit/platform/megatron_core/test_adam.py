"""GroupStepAdam against torch's own Adam and AdamW."""

import copy

import pytest
import torch

from megatron_wrap.errors import PlatformError
from megatron_wrap.platform.base.platform import Replacements
from megatron_wrap.platform.megatron_core import adam
from megatron_wrap.platform.megatron_core.adam import GroupStepAdam

SETTINGS = {"lr": 0.02, "betas": (0.9, 0.97), "eps": 1e-7}


def two_groups(seed=0):
    """Groups with and without weight decay, as in Megatron-Core, and one without parameters on this rank."""
    torch.manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((7, 5), (11,), (3, 2, 2))]
    return params, [{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0, "lr": 0.05}, {"params": []}]


def train(optimizer, params, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    trajectory = []
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()
        trajectory.append([param.detach().clone() for param in params])
    return trajectory


def non_empty(groups):
    return [group for group in groups if group["params"]]


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("decoupled", [True, False])
def test_every_step_equals_torch(weight_decay, decoupled):
    params, groups = two_groups()
    ours = GroupStepAdam(groups, weight_decay=weight_decay, adam_w_mode=decoupled, capturable=False, **SETTINGS)
    same_params, same_groups = two_groups()
    theirs_class = torch.optim.AdamW if decoupled else torch.optim.Adam
    theirs = theirs_class(non_empty(same_groups), weight_decay=weight_decay, foreach=True, **SETTINGS)
    for mine, other in zip(train(ours, params, 12), train(theirs, same_params, 12), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def test_chunk_size_does_not_change_the_result(monkeypatch):
    params, groups = two_groups()
    whole = train(GroupStepAdam(groups, weight_decay=0.1, **SETTINGS), params, 3)
    monkeypatch.setattr(adam, "_MAX_CHUNK_ELEMENTS", 12)
    params, groups = two_groups()
    torch.testing.assert_close(
        train(GroupStepAdam(groups, weight_decay=0.1, **SETTINGS), params, 3), whole, rtol=0, atol=0
    )
    assert [[param.numel() for param in chunk] for chunk in adam._chunks(params)] == [[35], [11], [12]]


def test_an_update_without_bias_correction_is_refused():
    with pytest.raises(PlatformError, match="bias_correction"):
        GroupStepAdam([torch.nn.Parameter(torch.zeros(1))], bias_correction=False)


def test_parameter_without_gradient_is_unchanged_and_the_step_counts():
    params, groups = two_groups()
    optimizer = GroupStepAdam(groups, weight_decay=0.1, **SETTINGS)
    train(optimizer, params, 1)
    before = params[2].detach().clone()
    for param in params:
        param.grad = None
    params[1].grad = torch.ones(11)
    assert optimizer.step(lambda: 4.5) == 4.5
    torch.testing.assert_close(params[2].detach(), before, rtol=0, atol=0)
    assert [group.get("step") for group in optimizer.param_groups] == [2, 2, None]


def test_state_has_the_layout_of_fused_adam_and_can_be_reloaded():
    params, groups = two_groups()
    optimizer = GroupStepAdam(groups, weight_decay=0.1, **SETTINGS)
    uninterrupted = train(optimizer, params, 3)
    state = copy.deepcopy(optimizer.state_dict())
    assert [group.get("step") for group in state["param_groups"]] == [3, 3, None]
    assert all(set(value) == {"exp_avg", "exp_avg_sq"} for value in state["state"].values())
    continued = train(optimizer, params, 4, seed=2)

    resumed_params, resumed_groups = two_groups(seed=5)
    for param, value in zip(resumed_params, uninterrupted[-1], strict=True):
        param.data.copy_(value)
    resumed = GroupStepAdam(resumed_groups, weight_decay=0.1, **SETTINGS)
    resumed.load_state_dict(state)
    torch.testing.assert_close(train(resumed, resumed_params, 4, seed=2), continued, rtol=0, atol=0)


def test_precision_aware_arguments_are_refused():
    with pytest.raises(PlatformError, match=r"use_precision_aware_optimizer \(exp_avg_dtype\).*megatron-wrap\[gpu\]"):
        GroupStepAdam([torch.nn.Parameter(torch.zeros(1))], exp_avg_dtype=torch.bfloat16)


def test_megatron_uses_it_until_uninstall():
    from megatron_wrap.platform import choose_platform

    choose_platform("cpu").install()
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer

    assert optimizers.Adam is distrib_optimizer.Adam is GroupStepAdam
    assert not optimizers.USING_PYTORCH_OPTIMIZER
    assert distrib_optimizer.HAVE_APEX_OR_TE
    assert not adam.use_in_megatron(Replacements())  # already replaced
    choose_platform("cpu").uninstall()
    try:
        assert (optimizers.Adam, distrib_optimizer.Adam) == (torch.optim.AdamW, torch.optim.Adam)
        assert optimizers.USING_PYTORCH_OPTIMIZER
        assert not distrib_optimizer.HAVE_APEX_OR_TE
    finally:
        choose_platform("cpu").install()

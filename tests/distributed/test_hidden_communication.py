"""`tp_comm_overlap` with torch's layers: the products are those of Megatron-Core's layers, and runs agree."""

from __future__ import annotations

import _hidden_runs as runs
import pytest
from _agreement import assert_layouts_agree
from _covering import quick
from layout_runs import token_samples

HIDDEN = "megatron_lm.model.parallel.tp_comm_overlap=true"
ARCH = "megatron_lm.model.arch."
EXPERTS = (f"{ARCH}num_experts=4", f"{ARCH}moe_ffn_hidden_size=32", f"{ARCH}moe_shared_expert_intermediate_size=32")


@pytest.mark.parametrize(
    ("processes", "dtype", "accumulates", "outputs", "limit"),
    [
        (2, "float32", False, 16, 1e-6),
        (2, "float32", True, 16, 1e-6),
        (2, "float32", True, 24, 1e-6),
        (2, "bfloat16", False, 16, 1e-2),
        (4, "float32", True, 16, 1e-6),
    ],
)
def test_layers_compute_what_those_of_megatron_core_compute(processes, dtype, accumulates, outputs, limit, ranks):
    """With four ranks a share has an odd number of tokens; with 24 outputs the shares of the input are multiplied with
    their gradients at once, with 16 one after the other."""
    for differences in ranks(processes).run(runs.compare_layers, "cpu", dtype, accumulates, outputs):
        assert max(differences.values()) <= limit, differences


AGREEING: dict[str, tuple[tuple[str, ...], str]] = {
    "dense": ((), "tp2-sp packed-tp2-sp-cp2"),
    "others": ((), "tp2 tp2-sp-pp2 tp2-sp-dp2"),
    "experts": (EXPERTS, "tp2-sp-ep2"),
}


@pytest.mark.parametrize("name", quick(AGREEING, ["dense"]))
def test_gradients_are_those_of_one_rank(name, ranks):
    overrides, layouts = AGREEING[name]
    assert_layouts_agree(ranks, layouts.split(), [HIDDEN, *overrides], token_samples(16, 48), steps=2)


def test_a_run_in_bf16_has_the_losses_of_one_without_it(ranks):
    hidden, plain = (ranks(2).run(runs.train, "torch", overlap, 2, "cpu")[0] for overlap in (True, False))
    assert hidden == pytest.approx(plain, rel=1e-3)

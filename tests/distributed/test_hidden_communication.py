"""`tp_comm_overlap` with torch's layers: the products are those of Megatron-Core's layers, and runs agree."""

from __future__ import annotations

import _hidden_runs as runs
import pytest
from layout_runs import CONFIG, token_samples

from megatron_wrap.testing import check_parity

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


@pytest.mark.parametrize(
    ("overrides", "layouts"),
    [
        pytest.param((), ["tp2-sp", "packed-tp2-sp-cp2"], id="dense"),
        pytest.param((), ["tp2", "tp2-sp-pp2", "tp2-sp-dp2"], id="others", marks=pytest.mark.matrix),
        pytest.param(EXPERTS, ["tp2-sp-ep2"], id="experts", marks=pytest.mark.matrix),
    ],
)
def test_gradients_are_those_of_one_rank(overrides, layouts, ranks):
    samples = token_samples(16, 48)
    report = check_parity(CONFIG, [HIDDEN, *overrides], samples=samples, layouts=layouts, steps=2, ranks=ranks)
    assert [row.agrees for row in report.rows] == [True] * len(layouts), report.table()


def test_a_run_in_bf16_has_the_losses_of_one_without_it(ranks):
    hidden, plain = (ranks(2).run(runs.train, "torch", overlap, 2, "cpu")[0] for overlap in (True, False))
    assert hidden == pytest.approx(plain, rel=1e-3)

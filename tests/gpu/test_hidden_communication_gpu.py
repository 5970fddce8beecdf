"""`tp_comm_overlap` on two GPUs: torch's layers, and Transformer Engine's with user buffers."""

import importlib.util

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import _hidden_runs as runs

pytestmark = pytest.mark.gpus(2)


@pytest.mark.parametrize(
    ("dtype", "accumulates", "limit"), [("float32", False, 1e-5), ("bfloat16", False, 1e-2), ("bfloat16", True, 1e-2)]
)
def test_layers_compute_what_those_of_megatron_core_compute(dtype, accumulates, limit, ranks):
    for differences in ranks(2).run(runs.compare_layers, "cuda", dtype, accumulates):
        assert max(differences.values()) <= limit, differences


@pytest.mark.parametrize("implementation", ["torch", "transformer_engine"])
def test_losses_are_those_of_a_run_without_it(implementation, ranks):
    if importlib.util.find_spec("transformer_engine") is None and implementation == "transformer_engine":
        pytest.skip("Transformer Engine is not installed")
    hidden, plain = (ranks(2).run(runs.train, implementation, overlap, 3)[0] for overlap in (True, False))
    assert hidden == pytest.approx(plain, rel=2e-3)

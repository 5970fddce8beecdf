"""wrap.generate on one GPU with both implementations, in fp32; skipped where there is no GPU."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))
import _bridge_runs
import _generate_runs as runs

HAS_TE = importlib.util.find_spec("transformer_engine") is not None
IMPLEMENTATIONS = ["torch", pytest.param("transformer_engine", marks=pytest.mark.skipif(not HAS_TE, reason="not here"))]
NEW_TOKENS = 12


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral-window", "mixtral", "deepseek-v2"])
def test_greedy_is_that_of_transformers_token_for_token(family, implementation, tmp_path):
    folder = _bridge_runs.make_folder(family, tmp_path / "model")
    overrides = ("megatron_wrap.init.platform=cuda", f"megatron_lm.model.arch.transformer_impl={implementation}")
    calls = [{"prompts": runs.prompts(), "max_new_tokens": NEW_TOKENS, "batch_size": size} for size in (8, 2)]
    at_once, in_batches = runs.generate(str(folder), overrides, str(tmp_path), calls)
    assert [completion["token_ids"] for completion in at_once] == runs.expected(folder, NEW_TOKENS)
    assert in_batches == at_once


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["llama", "mistral-window", "deepseek-v2"])
def test_logits_of_each_step_are_those_of_the_whole_sequence_at_once(family, implementation, tmp_path):
    folder = _bridge_runs.make_folder(family, tmp_path / "model")
    overrides = ("megatron_wrap.init.platform=cuda", f"megatron_lm.model.arch.transformer_impl={implementation}")
    differences = runs.cached_and_recomputed(str(folder), overrides, str(tmp_path))
    assert len(differences) == 18
    assert max(differences) <= 1e-4

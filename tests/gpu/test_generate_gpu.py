"""wrap.generate on GPUs with both implementations in fp32: the cases of tests/distributed/test_generate.py for which
there are enough GPUs; skipped without a GPU."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

import _bridge_runs
import _generate_runs as runs
from _implementations import IMPLEMENTATIONS, by_gpus, on_gpu

STEPS = [
    (family, layout) for family in ("llama-four-layers", "mistral-window", "deepseek-v2") for layout in ("one", "cp2")
]


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """original(family) -> its folder and transformers' greedy completions on the CPU."""
    return _bridge_runs.made_once(tmp_path_factory, runs.expected_greedy)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("family", "layout"), by_gpus(runs.CASES, runs.LAYOUTS))
def test_greedy_tokens_equal_transformers(family, layout, implementation, ranks, original, tmp_path):
    world_size, overrides = runs.LAYOUTS[layout]
    pool = ranks(world_size)
    folder, expected = original(family)
    calls = [{"prompts": runs.prompts(), "max_new_tokens": runs.NEW_TOKENS, "batch_size": size} for size in (8, 2)]
    actual = pool.run(runs.generate, str(folder), on_gpu(overrides, implementation), str(tmp_path), calls)
    for at_once, in_batches in actual:
        assert [completion["token_ids"] for completion in at_once] == expected
        assert in_batches == at_once


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("family", "layout"), by_gpus(STEPS, runs.LAYOUTS))
@pytest.mark.parametrize("padding", [[0, 0], [5, 0]], ids=["equal", "padded"])
def test_logits_with_kv_cache_equal_those_of_the_whole_sequence(
    family, layout, padding, implementation, ranks, original, tmp_path
):
    world_size, overrides = runs.LAYOUTS[layout]
    pool = ranks(world_size)
    folder, _ = original(family)
    overrides = on_gpu(overrides, implementation)
    actual = pool.run(runs.cached_and_recomputed, str(folder), overrides, str(tmp_path), padding)
    for differences in actual:
        assert len(differences) == 18
        assert max(differences) <= 1e-4

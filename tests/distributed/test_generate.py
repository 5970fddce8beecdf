"""wrap.generate: greedy completions are those of transformers, token for token, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _bridge_runs
import _generate_runs as runs
import pytest

PARALLEL = "megatron_lm.model.parallel."
TP2 = f"{PARALLEL}tensor_model_parallel_size=2"
PP2 = f"{PARALLEL}pipeline_model_parallel_size=2"
EP2 = f"{PARALLEL}expert_model_parallel_size=2"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "tp2-sp": (2, (TP2,)),
    "tp2": (2, (TP2, f"{PARALLEL}sequence_parallel=false")),
    "pp2": (2, (PP2,)),
    "pp2-vpp2": (2, (PP2, f"{PARALLEL}num_layers_per_virtual_pipeline_stage=1")),
    "dp2": (2, ()),
    "tp2-pp2": (4, (TP2, PP2)),
    "ep2": (2, (EP2,)),
    "ep2-tp2": (4, (EP2, TP2, f"{PARALLEL}expert_tensor_parallel_size=1")),
    "ep2-pp2": (4, (EP2, PP2)),
}
DENSE = ("one", "tp2-sp", "pp2", "dp2", "tp2-pp2")
SPARSE = ("one", "tp2-sp", "ep2", "ep2-tp2", "ep2-pp2")
CASES = [
    *(("llama", layout) for layout in (*DENSE, "tp2")),
    ("llama-four-layers", "pp2-vpp2"),
    *(("gpt2", layout) for layout in DENSE),
    *(("qwen3", layout) for layout in DENSE),
    *(("mixtral", layout) for layout in SPARSE),
    *(("deepseek-v2", layout) for layout in SPARSE),
    ("mistral-window", "one"),
    ("mistral-window", "tp2-pp2"),
    ("llama3.2-tied", "tp2-pp2"),
]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """original(family) -> its folder and transformers' greedy completions; each is made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = _bridge_runs.make_folder(name, tmp_path_factory.mktemp(name))
            made[name] = folder, runs.expected(folder, NEW_TOKENS)
        return made[name]

    return make


@pytest.mark.parametrize(("family", "layout"), CASES, ids=["-".join(case) for case in CASES])
def test_greedy_is_that_of_transformers_token_for_token(family, layout, ranks, original, tmp_path):
    folder, expected = original(family)
    world_size, overrides = LAYOUTS[layout]
    calls = [{"prompts": runs.prompts(), "max_new_tokens": NEW_TOKENS, "batch_size": size} for size in (8, 2)]
    for at_once, in_batches in ranks(world_size).run(runs.generate, str(folder), overrides, str(tmp_path), calls):
        assert [completion["token_ids"] for completion in at_once] == expected
        assert in_batches == at_once
        assert {completion["finish_reason"] for completion in at_once} == {"length"}

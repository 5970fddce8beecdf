"""Hugging Face in and out: a random transformers model of each family in each layout has transformers' logits, and the
exported folder is the model, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _bridge_runs as runs
import numpy
import pytest

PARALLEL = "megatron_lm.model.parallel."
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one": (1, ()),
    "tp2": (2, (f"{PARALLEL}tensor_model_parallel_size=2",)),
    "pp2": (2, (f"{PARALLEL}pipeline_model_parallel_size=2",)),
    "tp2-pp2": (4, (f"{PARALLEL}tensor_model_parallel_size=2", f"{PARALLEL}pipeline_model_parallel_size=2")),
    "cp2": (2, (f"{PARALLEL}context_parallel_size=2",)),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """original(family) -> its folder and transformers' logits; each is made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def make(name: str) -> tuple[Path, Any]:
        if name not in made:
            folder = runs.make_folder(name, tmp_path_factory.mktemp(name), max_shard_size="100KB")
            made[name] = folder, runs.expected_logits(folder)
        return made[name]

    return make


def load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    return model


VARIANTS = ("llama-biases", "llama3.1", "llama-linear-rope", "qwen2-tied")
"""What layouts cannot tell from another case: on one rank, and on all splits at once."""
CASES = [
    (family, layout) for family in runs.FAMILIES for layout in (("one", "tp2-pp2") if family in VARIANTS else LAYOUTS)
]


@pytest.mark.parametrize(("family", "layout"), CASES, ids="-".join)
def test_logits_are_those_of_transformers_and_the_export_is_the_original(family, layout, ranks, original, tmp_path):
    import torch

    folder, expected = original(family)
    world_size, overrides = LAYOUTS[layout]
    found = ranks(world_size).run(runs.logits_and_export, str(folder), overrides, str(tmp_path / "out"), "60KB")[0]
    assert expected.std() > 0.3
    assert numpy.abs(found - expected).max() <= 1e-4

    before, after = load(folder), load(tmp_path / "out")
    assert after.config.to_dict() == {**before.config.to_dict(), "_name_or_path": after.config.name_or_path}
    weights = after.state_dict()
    assert weights.keys() == before.state_dict().keys()
    for name, tensor in before.state_dict().items():
        assert torch.equal(weights[name], tensor), name

"""Disables TF32 before the first use of cuBLAS, which reads the variable once. Provides pools of NCCL ranks with one
GPU each, started once per world size; a test that needs more GPUs than available is skipped."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """ranks(world_size) -> a pool of `world_size` ranks."""
    import torch
    from _pools import pools

    with pools(tmp_path_factory.mktemp("ranks"), "cuda") as of_size:

        def pool(world_size):
            if world_size > torch.cuda.device_count():
                pytest.skip(f"needs {world_size} GPUs")
            return of_size(world_size)

        yield pool

"""fp32 means fp32 in these tests, whichever of them uses cuBLAS first: it reads the variable once. And NCCL ranks with
a GPU each, started once per world size; a test that takes more GPUs than are here is skipped."""

import os
import sys
from pathlib import Path

import pytest

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """ranks(world_size) -> a pool of that many ranks."""
    import torch
    from _pools import pools

    with pools(tmp_path_factory.mktemp("ranks"), "cuda") as of_size:

        def here(world_size):
            if world_size > torch.cuda.device_count():
                pytest.skip(f"takes {world_size} GPUs")
            return of_size(world_size)

        yield here

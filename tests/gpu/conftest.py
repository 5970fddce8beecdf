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
    """ranks(world_size) -> a pool of that many ranks; a new one after a failure has closed the last."""
    import torch

    from megatron_wrap.testing.ranks import RankPool

    pools = {}
    folder, here = tmp_path_factory.mktemp("ranks"), os.getcwd()

    def of_size(world_size):
        if world_size > torch.cuda.device_count():
            pytest.skip(f"takes {world_size} GPUs")
        pool = pools.get(world_size)
        if pool is None or pool._connections[0].closed:
            os.chdir(folder)
            try:
                pool = pools[world_size] = RankPool(world_size, platform="cuda")
            finally:
                os.chdir(here)
        return pool

    yield of_size
    for pool in pools.values():
        pool.close()

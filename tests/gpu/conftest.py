"""Disables TF32 before the first use of cuBLAS, which reads the variable once. Provides pools of NCCL ranks with one
GPU each, started once per world size; a test marked `gpus(n)` is skipped on a machine with fewer. The longest tests
begin first, so that processes of pytest-xdist end together."""

import gc
import json
import os
import sys
import time
from pathlib import Path

import pytest

os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
sys.path.insert(0, str(Path(__file__).parents[1] / "distributed"))

DURATIONS = Path(__file__).with_name("durations.json")
"""Seconds of each test that takes longer than others, from the last run of scripts/gpu_check.sh."""


def gpus_of(item):
    """The number of GPUs that a test needs."""
    marker = item.get_closest_marker("gpus")
    return marker.args[0] if marker else 1


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    import torch

    seconds, devices = json.loads(DURATIONS.read_text()), torch.cuda.device_count()
    items.sort(key=lambda item: -seconds.get(item.nodeid, 0))
    for item in items:
        if devices and gpus_of(item) > devices:
            item.add_marker(pytest.mark.skip(reason=f"needs {gpus_of(item)} GPUs"))


@pytest.fixture(autouse=True)
def _memory_is_returned():
    """Other processes of scripts/gpu_check.sh share the GPU."""
    yield
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
        gc.collect()
        sys.modules["torch"].cuda.empty_cache()


def pytest_runtest_setup():
    deadline = os.environ.get("GPU_CHECK_DEADLINE")
    if deadline is not None and time.time() > float(deadline):
        pytest.fail("not run: the time of scripts/gpu_check.sh was over", pytrace=False)


@pytest.fixture(scope="session")
def _pool_of_size(tmp_path_factory):
    from _pools import pools

    with pools(tmp_path_factory.mktemp("ranks"), "cuda") as of_size:
        yield of_size


@pytest.fixture
def ranks(request, _pool_of_size):
    """ranks(world_size) -> a pool of `world_size` ranks."""

    def pool(world_size):
        assert world_size <= gpus_of(request.node), f"mark this test gpus({world_size})"
        return _pool_of_size(world_size)

    return pool

"""Ray Train's workers as the ranks of a run."""

from __future__ import annotations

import json
from pathlib import Path

import _ray_runs as runs
import pytest

from megatron_wrap.checkpoint.files.run_folder import CheckpointStore
from megatron_wrap.errors import DataError, LayoutError


@pytest.fixture(scope="module")
def cluster():
    """A cluster in this process's machine."""
    import ray

    ray.init("local", num_cpus=4, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def unbroken(ranks, tmp_path_factory) -> dict[int, list]:
    """The run on two ranks of a pool."""
    folder = tmp_path_factory.mktemp("unbroken")
    ranks(2).run(runs.without_ray, folder)
    return runs.steps_of(folder / "journal")


@pytest.mark.matrix
def test_workers_take_the_steps_of_ranks_and_register_the_checkpoints(cluster, unbroken, tmp_path):
    from megatron_wrap.launch.ray import trainer

    # three replicas do not divide the batch of 8 samples: two take part
    result = trainer(runs.CONFIG, runs.overrides(tmp_path), num_workers=(2, 3)).fit()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    losses = {line["iteration"]: float(line["loss"]).hex() for line in lines if "loss" in line}
    assert losses == {iteration: step[1] for iteration, step in unbroken.items()}
    store = CheckpointStore(tmp_path / "checkpoints")
    assert Path(result.checkpoint.path) == store.find(runs.STEPS)
    assert result.metrics["iteration"] == runs.STEPS


@pytest.mark.matrix
def test_the_run_of_a_killed_worker_resumes(cluster, unbroken, tmp_path):
    from megatron_wrap.launch.ray import trainer

    loop = runs.RayLoop(tmp_path / "journal", rank=1, iteration=5)
    result = trainer(runs.CONFIG, runs.overrides(tmp_path), loop=loop, num_workers=2).fit()
    assert result.return_value == runs.STEPS
    assert (tmp_path / "journal.died").exists()
    assert len((tmp_path / "journal").read_text().splitlines()) > runs.STEPS
    assert runs.steps_of(tmp_path / "journal") == unbroken


def refuse(wrap):
    raise DataError("rows.jsonl:3: no")


@pytest.mark.matrix
def test_a_users_error_is_raised_in_the_driver_and_not_repeated(cluster, tmp_path):
    from megatron_wrap.launch.ray import trainer

    with pytest.raises(LayoutError, match="16"):
        trainer(runs.CONFIG, runs.overrides(tmp_path), num_workers=16)
    with pytest.raises(DataError, match=r"rows\.jsonl:3: no"):
        trainer(runs.CONFIG, runs.overrides(tmp_path), loop=refuse, num_workers=1, max_failures=-1).fit()

"""Elastic data parallelism: nodes of a Ray cluster are removed and added, and a run goes 4 -> 2 -> 4 replicas.

python scripts/drill/ray_elastic.py --count 1

Each trial is a run of 2 to 4 gloo workers on two nodes of `ray.cluster_utils.Cluster`, which saves every third of 18
steps. After step 7 one node is removed, after step 13 one is added. Exits with 1 unless

- the replicas were 4, 2 and 4, and the samples of every step are those of an unbroken run on four ranks;
- `resumed`: after each change all steps equal those of ranks without Ray from the same checkpoint, bit for bit;
- `same_state`: the step after each checkpoint, taken on the other number of replicas from the same state, has the same
  loss and norm of the gradient within 1e-6 (relative);
- `drift`: all steps are within 1e-6 of the unbroken run.

Sums over other replicas are rounded differently. With a learning rate of 1e-3 instead of 1e-4 these roundings grow to
2e-5 in the later steps, as those of weights that differ by one rounding do.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "distributed"))
import _checkpoint_runs
import _ray_runs as runs
import _trials

STEPS, REMOVED, ADDED = 18, 7, 13
LIMIT = 1e-6
FURTHER = ["megatron_lm.train.learning-rate.lr=1e-4"]
Steps = dict[int, list[Any]]
"""Steps of a run, the result of `_ray_runs.steps_of`."""
NODE = {"num_cpus": 2, "object_store_memory": 80 * 2**20}


@contextlib.contextmanager
def worker(folder: Path, seed: int) -> Iterator[object]:
    """Start a cluster for this job, and train the unbroken run."""
    _checkpoint_runs.in_new_processes(4, runs.without_ray, folder / "unbroken", STEPS, FURTHER)
    unbroken = runs.steps_of(folder / "unbroken" / "journal")
    warnings.simplefilter("ignore")
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    ray.init(address=cluster.address, log_to_driver=False)

    def trial(name: str) -> _trials.Result:
        home = folder / name
        home.mkdir()
        nodes = [cluster.add_node(**NODE), cluster.add_node(**NODE)]
        cluster.wait_for_nodes()
        try:
            _elastic(home, cluster, nodes)
        finally:
            for node in nodes:
                cluster.remove_node(node)
        return _judged(home, unbroken)

    try:
        yield trial
    finally:
        ray.shutdown()
        cluster.shutdown()


def _elastic(home: Path, cluster: Any, nodes: list[Any]) -> None:
    """Train the elastic run; `nodes` are the nodes that the cluster has at its end."""
    import ray.train

    from megatron_wrap.launch.ray import trainer

    loop = runs.WaitingLoop(home / "journal", {REMOVED: 4, ADDED: 2})
    scaling = ray.train.ScalingConfig(num_workers=(2, 4), elastic_resize_monitor_interval_s=2.0)
    elastic = trainer(runs.CONFIG, [*runs.overrides(home, STEPS), *FURTHER], loop=loop, scaling_config=scaling)

    with ThreadPoolExecutor(1) as runner:  # Ray starts nodes in the main thread only
        run = runner.submit(elastic.fit)
        _wait_for(home / "journal", REMOVED, 4, run)
        cluster.remove_node(nodes.pop())
        _wait_for(home / "journal", ADDED, 2, run)
        nodes.append(cluster.add_node(**NODE))
        run.result()


def _wait_for(journal: Path, iteration: int, replicas: int, run: Future[Any]) -> None:
    while not run.done() and (not journal.exists() or runs.steps_of(journal).get(iteration, [0])[-1] != replicas):
        time.sleep(0.2)


def _judged(home: Path, unbroken: Steps) -> _trials.Result:
    taken = runs.steps_of(home / "journal")
    replicas = [step[-1] for _, step in sorted(taken.items())]
    starts = [number for number in range(1, len(replicas)) if replicas[number] != replicas[number - 1]]
    checkpoint = "checkpoints/iter_{:07d}"
    result = {"kind": "4 -> 2 -> 4", "replicas": replicas}
    if [replicas[number] for number in [0, *starts]] != [4, 2, 4]:
        return {**result, "outcome": _trials.WRONG, "detail": f"replicas {replicas}"}
    if taken.keys() != unbroken.keys() or any(taken[key][0] != unbroken[key][0] for key in unbroken):
        return {**result, "outcome": _trials.WRONG, "detail": "other samples than those of the unbroken run"}
    resumed, other = {}, {}
    for size, begin, end in zip((2, 4), starts, [*starts[1:], STEPS], strict=True):
        begins = [(home / checkpoint.format(begin), end)]
        resumed |= _without_ray(size, home / f"resumed{size}", begins)
    for size in (2, 4):
        saved = [each for each in range(runs.INTERVAL, STEPS, runs.INTERVAL) if replicas[each] != size]
        other |= _without_ray(
            size, home / f"other{size}", [(home / checkpoint.format(each), each + 1) for each in saved]
        )
    same_state = max(_difference(other[key], taken[key]) for key in other)
    drift = max(_difference(taken[key], unbroken[key]) for key in unbroken)
    equal = all(resumed[key] == taken[key] for key in range(starts[0] + 1, STEPS + 1))
    result |= {"resumed": equal, "states": len(other), "same_state": same_state, "drift": drift}
    return {**result, "outcome": "equal" if equal and max(same_state, drift) <= LIMIT else _trials.WRONG}


def _without_ray(size: int, folder: Path, begins: list[tuple[Path, int]]) -> Steps:
    """Steps of this number of ranks from checkpoints; see `_ray_runs.from_checkpoints`."""
    _checkpoint_runs.in_new_processes(size, runs.from_checkpoints, folder, begins, STEPS, FURTHER)
    return runs.steps_of(folder / "journal")


def _difference(step: list[Any], other: list[Any]) -> float:
    pairs = [(float.fromhex(step[index]), float.fromhex(other[index])) for index in (1, 2)]
    return max(abs(mine - theirs) / max(abs(theirs), 1e-12) for mine, theirs in pairs)


if __name__ == "__main__":
    sys.exit(_trials.main(__doc__ or "", "elastic runs", worker, ["equal"], count=1))

"""Which of Ray's workers are the ranks of a run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Hashable, Sequence

from megatron_wrap.config import RunConfig
from megatron_wrap.config.checks.process_count import check_layout
from megatron_wrap.errors import LayoutError


def largest_layout(config: RunConfig, workers: int) -> int:
    """The largest number of processes, at most `workers`, that can run the configuration.

    Raises:
        LayoutError: there is none; the error is that of all workers.
    """
    for number in range(workers, 0, -1):
        with contextlib.suppress(LayoutError):
            check_layout(config, number)
            return number
    check_layout(config, workers)
    raise AssertionError("unreachable: the layout was refused above")


def workers_of_run(config: RunConfig, nodes: Sequence[Hashable]) -> list[int]:
    """Workers that become the ranks 0, 1, ... of the run; the others take no part.

    A tensor-parallel group does not span nodes, where the nodes have room for whole groups.

    Args:
        nodes: of each worker; the workers of a node follow each other.

    Raises:
        LayoutError: no number of these workers can run the configuration.
    """
    group = config.parallel.tensor_model_parallel_size
    of_node, seen, inside = Counter(nodes), Counter[Hashable](), []
    for worker, node in enumerate(nodes):
        if seen[node] < of_node[node] // group * group:
            inside.append(worker)
        seen[node] += 1
    # Ray attaches the reports of its first worker, which therefore takes part
    candidates = inside if inside[:1] == [0] else list(range(len(nodes)))
    return candidates[: largest_layout(config, len(candidates))]

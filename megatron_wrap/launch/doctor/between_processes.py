"""Checks that the processes of a run make together: a shared folder, clocks, links between nodes, an all-reduce."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_wrap.config import RunConfig
from megatron_wrap.core.validation.validations import Item
from megatron_wrap.launch.doctor.checks import Answer, NodeAnswers, Subject, answers, merged
from megatron_wrap.launch.doctor.node import CHECKS, PROBE, existing, short
from megatron_wrap.metrics.number_format import counted, with_prefix
from megatron_wrap.parallel.launch import rendezvous
from megatron_wrap.parallel.nodes import Node
from megatron_wrap.platform import choose_platform

WAIT = timedelta(seconds=60)
"""Time limit for the answers of other processes."""
_FOLDER_SECONDS = 5.0
"""Seconds after which a file of another node counts as missing: network file systems keep listings for some seconds."""
_CLOCK_SECONDS, _WRONG_CLOCK_SECONDS, _CLOCK_ROUNDS = 1.0, 60.0, 3
"""Differences of clocks in seconds that are a warning and an error (munge and Kerberos refuse messages that are minutes
old), and the number of comparisons."""
_FIRST_BYTES, _MOST_BYTES, _ROUND_SECONDS, _ROUNDS = 2**20, {"cpu": 2**26, "cuda": 2**28}, 0.1, 3
_SLOW_BYTES = {"gloo": 5 * 10**6, "nccl": 5 * 10**8}
"""Backend -> bytes per second and process of an all-reduce below which it is slow, less than any link that runs use."""
_SLOW_LINK_BYTES = 30 * 10**6
"""Bytes per second between nodes below which a link is slow: a quarter of Gigabit Ethernet."""
_INTERFACES = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that connects the nodes"


def report_of_all(config: RunConfig | None) -> list[Item] | None:
    """The report about all nodes, on the first process of each; None on the others. Called in every process of a run
    before they are connected."""
    store, rank, world_size = rendezvous(WAIT)
    store.set_timeout(WAIT)
    node = _this_node(store, rank, world_size)
    results: list[Answer] = []
    if node.local_rank == 0:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
        subject = Subject(config, processes, world_size, node.count)
        results = [*answers(CHECKS, subject), *_between_nodes(store, node, subject.save)]
    results += _communication(store, rank, world_size, node, config)
    of_ranks = _exchanged(store, "answers", rank, world_size, [node.name, results])
    store.set(f"read/{rank}", "")
    for other in range(world_size if rank == 0 else 0):  # the store may end with the first process
        store.get(f"read/{other}")
    if node.local_rank != 0:
        return None
    of_nodes: dict[str, list[Answer]] = {}
    for name, of_rank in of_ranks:
        of_nodes.setdefault(name, []).extend(Answer(*answer) for answer in of_rank)
    return merged([NodeAnswers(*each) for each in of_nodes.items()])


def _exchanged(store: dist.Store, key: str, index: int, count: int, value: object) -> list[Any]:
    """The values of all processes or nodes, by their index."""
    store.set(f"{key}/{index}", json.dumps(value))
    return [json.loads(store.get(f"{key}/{other}")) for other in range(count)]


def _this_node(store: dist.Store, rank: int, world_size: int) -> Node:
    """The node of this process by the variables of torchrun, or those of Ray's workers."""
    index = int(os.environ.get("GROUP_RANK") or os.environ.get("NODE_RANK", "0"))
    count = 1 + max(_exchanged(store, "nodes", rank, world_size, index))
    return Node(index, count, int(os.environ.get("LOCAL_RANK", "0")))


# ---- between nodes, before the processes are connected ----


def _between_nodes(store: dist.Store, node: Node, save: Path | None) -> list[Answer]:
    """The answers about this node and the others. Called in the first process of each node."""
    if node.count == 1:
        return []
    results = _clock(store, node)
    if save is not None:
        probe = existing(save) / PROBE.format(secrets.token_hex(8))
        if node.index == 0:
            with contextlib.suppress(OSError):  # the check of free space reports the error
                probe.touch()
        first = _exchanged(store, "probe", node.index, node.count, [node.name, probe.name])[0]
        results.append(_shared_folder(existing(save), *first))
        _exchanged(store, "seen", node.index, node.count, None)
        probe.unlink(missing_ok=True)
    return results


def _shared_folder(folder: Path, first: str, probe: str) -> Answer:
    """Check whether a file of node 0 is visible in the folder of checkpoints."""
    end = time.monotonic() + _FOLDER_SECONDS
    while not os.path.exists(folder / probe):
        if time.monotonic() > end:
            text = f"a file that {first} wrote is not seen in {folder}"
            return Answer("shared folder", f"{text}; choose a folder for `save` that all nodes mount", "error")
        with contextlib.suppress(OSError):
            os.listdir(folder)  # lets NFS read the folder again
        time.sleep(0.2)
    return Answer("shared folder", f"a file of node 0 is seen in {folder}", "ok")


def _clock(store: dist.Store, node: Node) -> list[Answer]:
    """Compare the clock of this node with that of node 0, which writes its time once all nodes wait for it. The time is
    read late, never early."""
    differences = []
    for number in range(_CLOCK_ROUNDS):
        _exchanged(store, f"clock of {number}", node.index, node.count, None)
        if node.index == 0:
            store.set(f"time {number}", str(time.time()))
        written = float(store.get(f"time {number}"))
        differences.append(time.time() - written)
    ahead = min(differences)
    if node.index == 0:
        return []
    if abs(ahead) < _CLOCK_SECONDS:
        return [Answer("clock", f"within {_CLOCK_SECONDS:g} s of node 0", "ok")]
    text = f"{abs(ahead):,.1f} s {'ahead of' if ahead > 0 else 'behind'} node 0; synchronize the clocks (chrony, NTP)"
    return [Answer("clock", text, "error" if abs(ahead) > _WRONG_CLOCK_SECONDS else "warning")]


# ---- between all processes ----


def _communication(
    store: dist.Store, rank: int, world_size: int, node: Node, config: RunConfig | None
) -> Iterator[Answer]:
    """Check an all-reduce over all processes, and the links between nodes. Collective over all ranks."""
    if world_size == 1:
        yield Answer("all-reduce", "one process, which communicates with no other", "ok")
        return
    platform = choose_platform("auto" if config is None else config.init.platform)
    backend = platform.backend
    failed = (
        f"{backend} does not connect the processes; open all TCP ports between the nodes, correct an address of the "
        f"loopback interface in /etc/hosts, or {_INTERFACES}"
    )
    try:
        device = platform.device
        device_id = device if device.type == "cuda" else None
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=WAIT, device_id=device_id
        )
        failed = f"an all-reduce over {backend} fails"
        yield _all_reduce(backend, device, world_size)
        if node.count > 1:
            yield from _link(device, rank, world_size, node)
    except Exception as error:
        yield Answer("all-reduce", f"{failed}: {short(error)}", "error")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _all_reduce(backend: str, device: torch.device, world_size: int) -> Answer:
    """Check the sums over all processes, and their speed."""

    def work(values: torch.Tensor) -> None:
        dist.all_reduce(values)
        if not bool((values == world_size).all()):  # waits for a GPU
            raise RuntimeError(f"the sum of {world_size} ones is between {values.min():g} and {values.max():g}")

    size, seconds, _ = _measured(work, device)
    # each process sends and receives this many bytes in a ring: the "bus bandwidth" of nccl-tests (PERFORMANCE.md)
    speed = 2 * (world_size - 1) / world_size * size / seconds
    text = (
        f"{counted(world_size, 'process')} over {backend}: {with_prefix(size)}B in {1000 * seconds:.3g} ms, "
        f"{with_prefix(speed)}B/s per process"
    )
    if speed < _SLOW_BYTES[backend]:
        advice = "see the lines of the links, and NCCL_DEBUG=INFO for what NCCL uses"
        return Answer("all-reduce", f"{text}; {advice}", "warning")
    return Answer("all-reduce", text, "ok")


def _link(device: torch.device, rank: int, world_size: int, node: Node) -> Iterator[Answer]:
    """Measure the speed at which the first process of a node receives from the last process of the previous node."""
    before = (rank - 1) % world_size

    def work(values: torch.Tensor) -> None:
        received = torch.empty_like(values)
        operations = [
            dist.P2POp(dist.isend, values, (rank + 1) % world_size),
            dist.P2POp(dist.irecv, received, before),
        ]
        for each in dist.batch_isend_irecv(operations):
            each.wait()
        received[-1].item()  # waits for a GPU

    size, _, seconds = _measured(work, device)
    if node.local_rank == 0:
        text = f"{with_prefix(size / seconds)}B/s from node {(node.index - 1) % node.count}"
        slow = size / seconds < _SLOW_LINK_BYTES
        yield Answer("link", f"{text}; {_INTERFACES}" if slow else text, "warning" if slow else "ok")


def _measured(work: Callable[[torch.Tensor], None], device: torch.device) -> tuple[int, float, float]:
    """Bytes of a tensor of ones, and the seconds of `work` on it in the fastest of some rounds: of the slowest rank and
    of this rank. Collective over all ranks."""

    def seconds() -> tuple[float, float]:
        values = torch.ones(size // 4, device=device)
        dist.barrier()
        start = time.perf_counter()
        work(values)
        here = time.perf_counter() - start
        slowest = torch.tensor(here, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest), here

    size = _FIRST_BYTES
    seconds()  # connects
    shortest = seconds()
    while shortest[0] < _ROUND_SECONDS and size < _MOST_BYTES[device.type]:
        size *= 4
        shortest = seconds()
    return size, *min([shortest, *(seconds() for _ in range(_ROUNDS - 1) if shortest[0] < 1)])

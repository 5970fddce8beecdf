"""What the processes of a run find out together: a shared folder, clocks, links between nodes, an all-reduce."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_wrap.config import RunConfig
from megatron_wrap.core.validation.validations import Item
from megatron_wrap.launch.doctor import links
from megatron_wrap.launch.doctor.catalogue import CHECKS
from megatron_wrap.launch.doctor.checks import Answer, Subject, answers
from megatron_wrap.launch.doctor.folders import PROBE, save_folder
from megatron_wrap.launch.doctor.nodes import NodeAnswers, merged
from megatron_wrap.launch.doctor.ports import own_address
from megatron_wrap.metrics.number_format import counted, with_prefix
from megatron_wrap.parallel.launch import rendezvous
from megatron_wrap.parallel.nodes import Node, this_node
from megatron_wrap.platform import choose_platform

WAIT = timedelta(seconds=60)
"""For the answers of other processes."""
_REPORT, _READ = "report", "read"
"""Keys of the store."""
_FOLDER_SECONDS = 5.0
"""After which a file of another node is missing: network file systems keep listings for some seconds."""
_FIRST_BYTES, _MOST_BYTES, _ROUND_SECONDS, _ROUNDS = 2**20, {"cpu": 2**26, "cuda": 2**28}, 0.1, 3
_SLOW_BYTES = {"gloo": 5 * 10**6, "nccl": 5 * 10**8}
"""Per second and process, below any link that a run is used with."""


def report_of_all(config: RunConfig | None, here: Sequence[Answer] | None = None) -> list[Item] | None:
    """The report about all nodes, on the first process of each; None on the others. Called in every process that
    torchrun's agent has started, before they are connected, or that Ray has connected already.

    Args:
        here: what the checks have found on this node; None: they run now.
    """
    store: dist.Store
    if dist.is_initialized():
        node, rank, world_size = _node_of_ray(), dist.get_rank(), dist.get_world_size()
        store = dist.PrefixStore("doctor", dist.distributed_c10d._get_default_store())
    else:
        node = this_node()
        store, rank, world_size = rendezvous(WAIT)
    store.set_timeout(WAIT)
    if node.local_rank == 0:
        if here is None:
            here = answers(CHECKS, _subject(config, node, world_size))
        store.set(f"answers/{node.index}", json.dumps([node.name, [*here, *_between_nodes(store, node, config)]]))
    store.set(f"rank/{rank}", json.dumps(_all_reduce(store, rank, world_size, node, config)))
    if rank == 0:
        items = merged([_answers_of(store, index) for index in range(node.count)])
        of_ranks = [tuple(json.loads(store.get(f"rank/{other}"))) for other in range(world_size)]
        items += [Item(status, "all-reduce", text) for status, text in dict.fromkeys(of_ranks)]
        store.set(_REPORT, json.dumps(items))
    elif node.local_rank == 0:
        items = [Item(*item) for item in json.loads(store.get(_REPORT))]
    store.add(_READ, 1)
    end = time.monotonic() + WAIT.total_seconds()
    while rank == 0 and store.add(_READ, 0) < world_size and time.monotonic() < end:  # the store may end with it
        time.sleep(0.05)
    return items if node.local_rank == 0 else None


def _node_of_ray() -> Node:
    """The node of this worker of Ray Train. Collective over all ranks."""
    index = int(os.environ.get("NODE_RANK", "0"))
    indices: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(indices, index)
    return Node(index, max(indices) + 1, int(os.environ.get("LOCAL_RANK", "0")))


def _subject(config: RunConfig | None, node: Node, world_size: int) -> Subject:
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    return Subject(config, processes, world_size, node.count, node.index, have_met=True)


def _answers_of(store: dist.Store, index: int) -> NodeAnswers:
    name, results = json.loads(store.get(f"answers/{index}"))
    return NodeAnswers(name, [Answer(*answer) for answer in results])


def _between_nodes(store: dist.Store, node: Node, config: RunConfig | None) -> list[Answer]:
    if node.count == 1:
        return []
    folder = None if config is None or config.train.save is None else save_folder(config)
    probe = PROBE.format(secrets.token_hex(8))
    try:
        address = own_address(several_nodes=True)
        listener = links.Listener(address)
    except OSError as error:
        return [Answer("link", f"no port can be opened ({error.strerror or error})", "error")]
    with contextlib.ExitStack() as undo:
        undo.callback(listener.close)
        if node.index == 0 and folder is not None:
            with contextlib.suppress(OSError):  # an error of the free space
                (folder / probe).touch()
                undo.callback((folder / probe).unlink, missing_ok=True)
        facts = {"name": node.name, "address": address, "port": listener.port, "probe": probe, "host": _host()}
        store.set(f"node/{node.index}", json.dumps(facts))
        others = [json.loads(store.get(f"node/{index}")) for index in range(node.count)]
        results: list[Answer] = []
        if folder is not None:
            results += _shared_folder(folder, others[0])
        if node.index > 0:
            results += links.clock(others[0]["address"], others[0]["port"])
        results += _loopback(facts, others)
        neighbor = others[(node.index + 1) % node.count]
        results += links.link(neighbor["name"], neighbor["address"], neighbor["port"])
        # the listener and the file have to stay until all have used them
        store.set(f"done/{node.index}", "")
        for index in range(node.count):
            store.get(f"done/{index}")
    return results


def _host() -> str:
    """What is the same for two nodes of one machine, as in a test, and for no others."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return secrets.token_hex(8)


def _loopback(facts: dict[str, Any], others: Sequence[dict[str, Any]]) -> list[Answer]:
    """The address of a node that only itself can reach, as Debian's /etc/hosts gives for the name of the host."""
    if not facts["address"].startswith("127.") or {other["host"] for other in others} == {facts["host"]}:
        return []
    text = f"the name of this host is {facts['address']}, which other nodes cannot reach; correct /etc/hosts, or "
    return [Answer("address", f"{text}set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME", "error")]


def _shared_folder(folder: Path, first: dict[str, Any]) -> list[Answer]:
    """Whether a file of node 0 is seen in the folder of checkpoints."""
    end = time.monotonic() + _FOLDER_SECONDS
    while not os.path.exists(folder / first["probe"]):
        if time.monotonic() > end:
            text = f"a file that {first['name']} wrote is not seen in {folder}"
            return [Answer("shared folder", f"{text}; choose a folder for `save` that all nodes mount", "error")]
        with contextlib.suppress(OSError):
            os.listdir(folder)  # lets NFS read the folder again
        time.sleep(0.2)
    return [Answer("shared folder", f"a file of node 0 is seen in {folder}", "ok")]


# ---- all-reduce ----


def _all_reduce(store: dist.Store, rank: int, world_size: int, node: Node, config: RunConfig | None) -> tuple[str, str]:
    """Status and text: sums over all processes, and their speed. Collective over all ranks."""
    if world_size == 1:
        return "ok", "one process, which communicates with no other"
    platform = choose_platform("auto" if config is None else config.init.platform)
    try:
        device = platform.device
        connects = not dist.is_initialized()
        if connects:
            device_id = device if device.type == "cuda" else None
            dist.init_process_group(
                platform.backend, store=store, rank=rank, world_size=world_size, timeout=WAIT, device_id=device_id
            )
    except Exception as error:
        return "error", f"{node.name}: {platform.backend} does not connect the processes ({_short(error)})"
    try:
        return _measured(platform.backend, device, world_size)
    except Exception as error:
        return "error", f"{node.name}: an all-reduce over {platform.backend} fails ({_short(error)})"
    finally:
        if connects:
            dist.destroy_process_group()


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _measured(backend: str, device: torch.device, world_size: int) -> tuple[str, str]:
    size = _FIRST_BYTES
    _seconds(size, device, world_size)  # connects
    seconds = _seconds(size, device, world_size)
    while seconds < _ROUND_SECONDS and size < _MOST_BYTES[device.type]:
        size *= 4
        seconds = _seconds(size, device, world_size)
    seconds = min([seconds, *(_seconds(size, device, world_size) for _ in range(_ROUNDS - 1) if seconds < 1)])
    # each process sends and receives this many bytes in a ring: the "bus bandwidth" of nccl-tests (PERFORMANCE.md)
    speed = 2 * (world_size - 1) / world_size * size / seconds
    text = (
        f"{counted(world_size, 'process')} over {backend}: {with_prefix(size)}B in {1000 * seconds:.3g} ms, "
        f"{with_prefix(speed)}B/s per process"
    )
    if speed < _SLOW_BYTES[backend]:
        return "warning", f"{text}; see the lines of the links, and NCCL_DEBUG=INFO for what NCCL uses"
    return "ok", text


def _seconds(size: int, device: torch.device, world_size: int) -> float:
    """Of an all-reduce of `size` bytes, the longest of all ranks."""
    values = torch.ones(size // 4, device=device)
    dist.barrier()
    start = time.perf_counter()
    dist.all_reduce(values)
    values[0].item()  # waits for a GPU
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=device)
    if not bool((values == world_size).all()):
        raise RuntimeError(f"the sum of {world_size} ones is between {values.min():g} and {values.max():g}")
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)

"""Exchanges through the memory of other GPUs, on simulated GPUs: the ranks queue their work one after the other, and a
random scheduler executes it in an order that respects streams, their waits and the signals, and nothing else."""

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import _symmetric_memory as symmetric

from megatron_wrap.parallel import collectives, peer_memory
from megatron_wrap.parallel.peer_memory import _ARRIVED, _READY, PeerExchange, PeerMemory

SEEDS = range(8)

# ---- simulated GPUs ----


class Stream:
    def __init__(self, gpus: "GPUs") -> None:
        self.gpus = gpus
        self.queue = gpus.default.queue if gpus.one_queue and gpus.default else gpus.new_queue()

    def add(self, work: Callable[[], object], ready: Callable[[], bool] = lambda: True) -> None:
        self.queue.append((work, ready))

    def wait_stream(self, other: "Stream") -> None:
        event: set[str] = set()
        other.add(lambda: event.add("recorded"))
        self.add(lambda: None, lambda: bool(event))

    def synchronize(self) -> None:
        """Queueing does not wait; what counts is that torch has cleared the signals of the memory it allocated."""
        self.gpus.signals_are_clear = True


class Peers:
    """A rank's handle: memory and signals (receiver, sender, channel) of all ranks; shared by their handles."""

    def __init__(self, gpus: "GPUs", rank: int, memory: torch.Tensor, signals: set[tuple[int, int, int]]) -> None:
        self.gpus, self.rank, self.memory, self.signals = gpus, rank, memory, signals

    def get_buffer(self, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        return self.memory[rank][:nbytes].view(dtype).view(shape).as_subclass(Buffer)

    def put_signal(self, target: int, channel: int, timeout_ms: int) -> None:
        signal = target, self.rank, channel
        self.gpus.current.add(lambda: self.signals.add(signal), lambda: signal not in self.signals)

    def wait_signal(self, source: int, channel: int, timeout_ms: int) -> None:
        signal = self.rank, source, channel
        self.gpus.current.add(lambda: self.signals.remove(signal), lambda: signal in self.signals)


class Buffer(torch.Tensor):
    def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> None:
        for target, part in zip(halves(self), halves(source), strict=True):
            torch.cuda.current_stream().add(lambda target=target, part=part: target.copy_(part))

    def clone(self) -> torch.Tensor:
        target = torch.full(self.shape, -1).as_subclass(Buffer)
        target.copy_(self)
        return target


def halves(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Of its memory, which they do not keep from being used again."""
    alias = torch.empty(0, dtype=tensor.dtype).set_(
        tensor.untyped_storage(), tensor.storage_offset(), (tensor.numel(),)
    )
    return alias.chunk(2)


class GPUs:
    """One for each of `size` ranks; `default` and `current` are streams of the rank that queues its work."""

    def __init__(self, size: int, one_queue: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.size, self.one_queue, self.queues = size, one_queue, []
        self.default: Stream | None = None
        self.regions: list[tuple[torch.Tensor, set[tuple[int, int, int]]]] = []
        self.memories: list[PeerMemory] = []
        self.allocated: list[weakref.ref[torch.Tensor]] = []
        for name, fake in {
            "Stream": lambda *_, **__: Stream(self),
            "current_stream": lambda: self.current,
            "default_stream": lambda device: self.default,
            "stream": self.on_stream,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        monkeypatch.setattr(symmetric, "empty", self.empty)
        monkeypatch.setattr(symmetric, "rendezvous", self.rendezvous)
        monkeypatch.setattr(peer_memory, "_MIB", 8)  # so that the regions of small tensors grow
        monkeypatch.setattr(collectives, "peer_memory", lambda group, tensor: self.memory)

    def new_queue(self) -> deque:
        self.queues.append(deque())
        return self.queues[-1]

    def queue_all(self, program: Callable[["Rank"], None]) -> None:
        for rank in range(self.size):
            self.default, self.regions_used = None, 0
            self.default = self.current = Stream(self)
            group = SimpleNamespace(size=lambda: self.size, rank=lambda rank=rank: rank)
            self.memory = PeerMemory(group, torch.device("cuda", rank))
            self.memories.append(self.memory)
            program(Rank(self, group))

    def fault(self, program: Callable[["Rank"], None], seed: int) -> str | None:
        """Of one execution: the first wrong value, or a deadlock."""
        self.queue_all(program)
        assert all(memory() is not None for memory in self.allocated), "memory in use is freed"
        generator = random.Random(seed)
        speeds = {id(queue): 10 ** generator.uniform(-2, 2) for queue in self.queues}
        while queues := [queue for queue in self.queues if queue]:
            if not (ready := [queue for queue in queues if queue[0][1]()]):
                return "deadlock"
            work, _ = generator.choices(ready, [speeds[id(queue)] for queue in ready])[0].popleft()
            if work() == "wrong value":
                return "wrong value"
        return None

    @contextmanager
    def on_stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def empty(self, nbytes: int, **_: object) -> torch.Tensor:
        self.signals_are_clear = False
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self.allocated.append(weakref.ref(memory))
        return memory

    def rendezvous(self, memory: torch.Tensor, group: SimpleNamespace) -> Peers:
        if self.regions_used == len(self.regions):
            self.regions.append((memory.new_full((self.size, len(memory)), 255), set()))
        self.regions_used += 1
        shared, signals = self.regions[self.regions_used - 1]
        if not self.signals_are_clear:
            mine = {(group.rank(), source, channel) for source in range(self.size) for channel in (_READY, _ARRIVED)}
            self.default.add(lambda: signals.difference_update(mine))
        return Peers(self, group.rank(), shared, signals)


# ---- programs ----


class Rank:
    """Begins exchanges; each returns a function that waits for it, which returns a function that checks the values."""

    def __init__(self, gpus: GPUs, group: SimpleNamespace) -> None:
        self.gpus, self.group, self.rank, self.exchanges = gpus, group, group.rank(), 0
        self.others = [rank for rank in range(gpus.size) if rank != self.rank]

    def computed(self, length: int, value: int) -> torch.Tensor:
        """Memory that work on the default stream fills, and uses for something else when it is freed."""
        tensor, stream = torch.full((length,), -1), self.gpus.default
        parts = halves(tensor)
        for part in parts:
            stream.add(lambda part=part: part.fill_(value))
        weakref.finalize(tensor, stream.add, lambda: [part.fill_(-2) for part in parts])
        return tensor

    def check(self, received: torch.Tensor | dict[int, torch.Tensor], values: dict[int, int]) -> None:
        for sender, value in values.items():
            for part in halves(received[sender]):
                self.gpus.default.add(lambda part=part, value=value: None if part.eq(value).all() else "wrong value")

    def gather(self, length: int, includes_self: bool = True) -> Callable[[], Callable[[], None]]:
        self.exchanges += 1
        number = 100 * self.exchanges
        wait = collectives.gathering(self.computed(length, number + self.rank), self.group, includes_self=includes_self)
        values = {sender: number + sender for sender in ([*self.others, self.rank] if includes_self else self.others)}

        def finish() -> Callable[[], None]:
            shares = wait().view(self.gpus.size, length)
            return lambda: self.check(shares, values)

        return finish

    def pass_on(self, offset: int, length: int, purpose: str, owned: bool = False) -> Callable[[], Callable[[], None]]:
        """Two tensors to the rank that comes `offset` after this one; those of even ranks are shorter."""
        self.exchanges += 1
        number, size = 100 * self.exchanges, self.gpus.size
        source = (self.rank - offset) % size
        lengths = [(length - 1 + rank % 2, length + 1) for rank in (self.rank, source)]
        finish = collectives.start_ring_transfer(
            [self.computed(count, number + 10 * half + self.rank) for half, count in enumerate(lengths[0])],
            [(count,) for count in lengths[1]],
            self.group,
            offset=offset,
            purpose=purpose,
            elements=2 * length + 1,
            owned=owned,
        )

        def wait() -> Callable[[], None]:
            received = finish()
            assert [len(tensor) for tensor in received] == list(lengths[1])
            return lambda: [
                self.check({0: part}, {0: number + 10 * half + source}) for half, part in enumerate(received)
            ]

        return wait

    def exchange(self, length: int) -> Callable[[], Callable[[], None]]:
        self.exchanges += 1
        number, size = 100 * self.exchanges, self.gpus.size
        shares = collectives.ExchangeOfShares((length,), torch.empty(0, dtype=torch.int64), self.group)
        for offset in range(1, size):
            target = (self.rank + offset) % size
            shares.send(self.computed(length, number + 10 * target + self.rank), offset)

        values = {sender: number + 10 * self.rank + sender for sender in self.others}

        def finish() -> Callable[[], None]:
            received = dict(zip(self.others, shares.finish(), strict=True))
            return lambda: self.check(received, values)

        return finish


def layers(rank: Rank) -> None:
    """The order of `nn.layers.overlapped_communication`; the second sequences are longer."""
    for gathered, scattered in ((2, 3), (9, 3), (4, 12)):
        rank.gather(gathered, includes_self=False)()()  # a column-parallel layer
        rank.exchange(scattered)()()  # a row-parallel one
        rank.exchange(scattered)()()
        rank.gather(scattered)()()  # its backward pass
        inputs, gradient = rank.gather(gathered), rank.exchange(gathered)  # that of the column-parallel layer
        check_inputs = inputs()
        check_inputs()
        gradient()()
        check_inputs()  # valid until the next gathering


def rings(rank: Rank) -> None:
    """The order of `nn.attention.ring` in layers; then longer sequences."""
    size = rank.gpus.size
    for length in (3, 2, 9):
        kept = []
        for _ in range(2):
            arrived = []
            for step in range(1, size):
                wait = rank.pass_on(step, length, "keys", owned=step == size - 1)
                for check in arrived:
                    check()
                arrived.append(wait())
            kept.append(arrived[-1])
        for check in reversed(kept):  # the backward pass
            check()
            returned, arrived, sums = None, [], []
            for step in range(size - 1, 0, -1):
                wait = rank.pass_on(step - 1, length, "keys") if step > 1 else None
                for check_block in arrived:
                    check_block()
                sums += [returned()] if returned is not None else []
                returned = rank.pass_on(-step, length, "gradients")
                arrived += [wait()] if wait is not None else []
            for check_sum in (*sums, returned()):
                check_sum()


@pytest.mark.parametrize("one_queue", [False, True], ids=["parallel_streams", "one_hardware_queue"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("program", [layers, rings])
def test_each_rank_receives_what_the_others_sent(program, size, one_queue, monkeypatch):
    for seed in SEEDS:
        gpus = GPUs(size, one_queue, monkeypatch)
        assert gpus.fault(program, seed) is None, seed
        assert len(gpus.regions) > 2, "no region has grown"


# ---- broken protocols are found ----


def without_ready(monkeypatch):
    for name in ("put_signal", "wait_signal"):
        signal = getattr(Peers, name)
        monkeypatch.setattr(Peers, name, lambda *args, signal=signal: None if args[2] == _READY else signal(*args))


def arrived_before_the_copy(monkeypatch):
    put_signal, wait_signal = Peers.put_signal, Peers.wait_signal

    def wait_and_put(self, rank, channel, timeout_ms):
        wait_signal(self, rank, channel, timeout_ms)
        if channel == _READY:
            put_signal(self, rank, _ARRIVED, timeout_ms)

    monkeypatch.setattr(Peers, "wait_signal", wait_and_put)
    monkeypatch.setattr(Peers, "put_signal", lambda *args: None if args[2] == _ARRIVED else put_signal(*args))


def streams_that_do_not_wait(monkeypatch):
    monkeypatch.setattr(Stream, "wait_stream", lambda *_: None)


def sent_tensors_that_are_freed(monkeypatch):
    send = PeerExchange.send
    monkeypatch.setattr(PeerExchange, "send", lambda self, *args, **kw: (send(self, *args, **kw), self._sent.clear()))


def signals_cleared_after_the_rendezvous(monkeypatch):
    monkeypatch.setattr(Stream, "synchronize", lambda _: None)


@pytest.mark.parametrize("program", [layers, rings])
@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (without_ready, "wrong value"),
        (arrived_before_the_copy, "wrong value"),
        (streams_that_do_not_wait, "wrong value"),
        (sent_tensors_that_are_freed, "wrong value"),
        (signals_cleared_after_the_rendezvous, "deadlock"),
    ],
)
def test_a_broken_protocol_is_found(broken, fault, program, monkeypatch):
    broken(monkeypatch)
    assert fault in {GPUs(2, False, monkeypatch).fault(program, seed) for seed in SEEDS}


def test_blocks_of_a_ring_that_are_not_kept_are_found(monkeypatch):
    monkeypatch.setattr(Buffer, "clone", lambda self: self)
    assert "wrong value" in {GPUs(2, False, monkeypatch).fault(rings, seed) for seed in SEEDS}


# ---- which groups ----

HOST = [("host", 0, 0), ("host", 0, 1)]


def test_tensors_on_the_cpu_use_no_peer_memory():
    assert peer_memory.peer_memory(None, torch.zeros(1)) is None


@pytest.mark.parametrize(
    ("addresses", "visible", "access", "others_reach", "expected"),
    [
        (HOST, 2, True, True, True),
        ([("host", 0, 0), ("other", 0, 1)], 2, True, True, False),
        ([("host", 0, 0), ("host", 1, 1)], 2, True, True, False),
        ([("host", 0, 0), ("host", 0, 0)], 2, True, True, False),
        (HOST, 1, True, True, False),
        (HOST, 2, False, True, False),
        (HOST, 2, True, False, False),
    ],
    ids=["one_host", "two_hosts", "two_nodes_of_one_name", "one_gpu", "not_visible", "no_access", "another_has_none"],
)
def test_groups_that_reach_each_other_use_peer_memory(addresses, visible, access, others_reach, expected, monkeypatch):
    gathered = []

    def all_gather_object(values, value, group):
        gathered.append(value)
        values[:] = (
            addresses if isinstance(value, tuple) else [value, value if isinstance(value, str) else others_reach]
        )

    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: access)
    monkeypatch.setattr(peer_memory, "_memories", {})
    monkeypatch.setattr(peer_memory, "_Region", lambda *_: None)
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0, group_name="group")
    tensor = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    memory = peer_memory.peer_memory(group, tensor)
    assert isinstance(memory, PeerMemory) is expected
    assert peer_memory.peer_memory(group, tensor) is memory
    assert len(gathered) == (3 if expected else 2), "what is asked is gathered once, on each rank"
    assert gathered[0][2] == 0


@pytest.mark.parametrize(
    "problems", [["pidfd_getfd: Operation not permitted", ""], ["", "no memory on the other rank"]]
)
def test_where_memory_cannot_be_shared_nccl_sends(problems, monkeypatch):
    """As in containers without the permission; also if another rank alone fails."""
    warnings = []

    def region(*_):
        if problems[0]:
            raise RuntimeError(f"{problems[0]}\nException raised from ...")

    def all_gather_object(values, value, group):
        values[:] = HOST if isinstance(value, tuple) else [value, True] if isinstance(value, bool) else problems
        assert isinstance(value, tuple | bool) or value == problems[0]

    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather_object)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, other: True)
    monkeypatch.setattr(peer_memory, "_memories", {})
    monkeypatch.setattr(peer_memory, "_Region", region)
    monkeypatch.setattr(peer_memory.logger, "warning_rank_0", warnings.append)
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0, group_name="group")
    assert peer_memory.peer_memory(group, SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))) is None
    [warning] = warnings
    assert next(filter(None, problems)) in warning
    assert "\n" not in warning

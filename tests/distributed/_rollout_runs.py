"""Functions that the tests of weights for rollout engines run on each rank, and engines that follow the documented
protocols: vLLM's weight transfer (training/weight_transfer, NCCL) and SGLang's endpoints (SGLang for RL systems)."""

from __future__ import annotations

import json
import math
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from _bridge_runs import token_ids
from _started import from_folder
from torch import Tensor


def started(folder: str, overrides: Sequence[str], outputs: str) -> AbstractContextManager[Any]:
    """A run that trains the model of a folder."""
    return from_folder(folder, [*overrides, "megatron_lm.train.learning-rate.lr=0.1"], outputs)


def batch() -> list[dict[str, list[int]]]:
    """Four samples."""
    return [{"input_ids": ids, "loss_mask": [1] * len(ids)} for ids in token_ids(4, 40)]


def in_file_order(folder: Path) -> dict[str, Tensor]:
    """Name -> tensor of a folder, in the order of its files."""
    from safetensors.torch import load_file

    from megatron_wrap.bridge.loading.weight_folder import file_tensors

    files = sorted(folder.glob("*.safetensors"))
    loaded = {name: tensor for file in files for name, tensor in load_file(file).items()}
    names = [name for file in files for name in file_tensors(file)]
    assert sorted(names) == sorted(loaded)
    return {name: loaded[name] for name in names}


def same(received: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether names, order, dtypes and bytes are the same."""
    return list(received) == list(expected) and all(
        received[name].dtype == tensor.dtype and torch.equal(received[name].cpu(), tensor)
        for name, tensor in expected.items()
    )


def passes(folder: str, overrides: Sequence[str], outputs: str, dtype: str | None) -> dict[str, Any]:
    """One source over two passes with a step in between, each compared with an export of that time, and the buckets."""
    with started(folder, overrides, outputs) as wrap:
        weights = wrap.weight_source(dtype=dtype)
        metadata = weights.metadata()
        equal, tensors = [], []
        for number in range(2):
            tensors.append(dict(weights))
            exported = wrap.save_pretrained(f"{outputs}/{number}", max_shard_size="60KB", dtype=dtype)
            equal.append(same(tensors[-1], in_file_order(exported)))
            wrap.train(batch())
        buckets = [[(name, tensor.nbytes) for name, tensor in bucket] for bucket in weights.buckets(50_000)]
        last = tensors[1]
        return {
            "metadata": [(entry.name, entry.dtype_name, entry.shape) for entry in metadata],
            "iterated": [(name, str(tensor.dtype).split(".")[1], tuple(tensor.shape)) for name, tensor in last.items()],
            "equal": equal,
            "changed": not same(tensors[0], tensors[1]),
            "buckets": buckets,
            "nbytes": weights.nbytes,
        }


class Group:
    """A process group of the sender and one worker: a queue."""

    def __init__(self) -> None:
        self.messages: queue.Queue[Tensor] = queue.Queue(maxsize=1)

    def broadcast(self, tensor: Tensor) -> None:
        """Rank 0's end."""
        assert tensor.dtype == torch.uint8
        assert tensor.dim() == 1
        self.messages.put(tensor.clone(), timeout=30)

    def receive(self, nbytes: int) -> Tensor:
        """The worker's end; its buffer has a fixed size."""
        received = self.messages.get(timeout=30)
        assert received.numel() == nbytes, (received.numel(), nbytes)
        return received


def unpacked(received: Tensor, rows: Sequence[tuple[str, str, list[int]]]) -> dict[str, Tensor]:
    """Named views of received bytes."""
    tensors, start = {}, 0
    for name, dtype, shape in rows:
        size = math.prod(shape) * getattr(torch, dtype).itemsize
        tensors[name] = received[start : start + size].clone().view(getattr(torch, dtype)).view(shape)
        start += size
    return tensors


class FakeVllm:
    """A vLLM engine with one worker: the four calls, in their order, and packed receiving by `update_info`."""

    def __init__(self, group: Group, fail_in: str = "") -> None:
        self.group, self.fail_in = group, fail_in
        self.joined = threading.Event()
        self.calls: list[str] = []
        self.loaded: dict[str, Tensor] = {}
        self.version: str | None = None

    def _called(self, name: str, after: str) -> None:
        assert (self.calls[-1] if self.calls else "") in after.split("|"), (self.calls, name)
        self.calls.append(name)
        if name == self.fail_in:
            raise RuntimeError(f"the engine fails in {name}")

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._called("init", "")
        self.init_info = json.loads(json.dumps(init_info))
        assert self.joined.wait(30)  # both ends meet in the group's rendezvous

    def start_weight_update(self) -> None:
        self._called("start", "init|finish")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._called("update", "start")
        info = json.loads(json.dumps(update_info))  # over HTTP
        limit = self.init_info["packed_buffer_size_bytes"]
        rows, size = [], 0
        for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
            rows.append((name, dtype, shape))
            size += math.prod(shape) * getattr(torch, dtype).itemsize
            if size > limit:
                self.loaded |= unpacked(self.group.receive(size), rows)
                rows, size = [], 0
        if rows:
            self.loaded |= unpacked(self.group.receive(size), rows)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._called("finish", "update")
        self.version = weight_version


def to_vllm(folder: str, overrides: Sequence[str], outputs: str, fail_in: str = "") -> dict[str, Any]:
    """Two updates of an engine with a step in between; the calls, and whether each left it with the exported bytes. Or
    the error of an engine that fails, and of a step after it."""
    from megatron_wrap.bridge.engines.vllm import VllmTransfer
    from megatron_wrap.errors import CheckpointError

    with started(folder, overrides, outputs) as wrap:
        weights, group = wrap.weight_source(dtype="bfloat16"), Group()
        engine = FakeVllm(group, fail_in)

        def join() -> Any:
            engine.joined.set()
            return group.broadcast

        transfer = VllmTransfer(weights, engine, buffer_bytes=50_000)
        error, equal = "", []
        try:
            transfer.connect("127.0.0.1", 29501, 2, join)
            for version in ("step 0", "step 1"):
                transfer.send_weights(version)
                exported = wrap.save_pretrained(f"{outputs}/{version}", dtype="bfloat16")
                equal.append(same(engine.loaded, in_file_order(exported)) or not weights.is_sender)
                wrap.train(batch())
        except CheckpointError as failure:
            error = str(failure)
            wrap.train(batch())  # all ranks continue
        return {"equal": equal, "error": error, "calls": engine.calls, "version": engine.version}


class FakeSglang:
    """A server with SGLang's endpoints, one process; receives flattened buckets, or loads a folder."""

    def __init__(self, fail_in: str = "") -> None:
        self.group, self.fail_in = Group(), fail_in
        self.joined = threading.Event()
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.loaded: dict[str, Tensor] = {}
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    answer = engine.handle(self.path.strip("/"), body)
                except Exception as error:
                    answer = {"success": False, "message": repr(error)}
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def handle(self, endpoint: str, body: dict[str, Any]) -> dict[str, Any]:
        self.requests.append((endpoint, body))
        if endpoint == self.fail_in:
            return {"success": False, "message": f"the server fails in {endpoint}"}
        if endpoint == "init_weights_update_group":
            assert self.joined.wait(30)
        if endpoint == "update_weights_from_distributed":
            assert body["load_format"] == "flattened_bucket"
            assert len(set(body["dtypes"])) == 1
            rows = list(zip(body["names"], body["dtypes"], body["shapes"], strict=True))
            size = sum(math.prod(shape) * getattr(torch, dtype).itemsize for _, dtype, shape in rows)
            self.loaded |= unpacked(self.group.receive(size), rows)
        if endpoint == "update_weights_from_disk":
            self.loaded = in_file_order(Path(body["model_path"]))
        return {"success": True, "message": ""}


def to_sglang(folder: str, overrides: Sequence[str], outputs: str, fail_in: str = "") -> dict[str, Any]:
    """An update of two servers by broadcast, then by a folder after a step; the requests to the second one, and
    whether each left both with the exported bytes. Or the error of servers that fail."""
    from megatron_wrap.bridge.engines.sglang import SglangServer, SglangTransfer, update_from_folder
    from megatron_wrap.errors import CheckpointError

    with started(folder, overrides, outputs) as wrap:
        weights = wrap.weight_source()
        engines = [FakeSglang(fail_in), FakeSglang(fail_in)] if weights.is_sender else []
        servers = [SglangServer(engine.url, num_ranks=index + 1) for index, engine in enumerate(engines)]

        def join(size: int) -> Any:
            assert size == 4
            for engine in engines:
                engine.joined.set()
            return lambda tensor: [engine.group.broadcast(tensor) for engine in engines]

        def equal() -> bool:
            expected = in_file_order(exported)
            return all(same(engine.loaded, expected) for engine in engines)

        transfer = SglangTransfer(weights, servers, bucket_bytes=50_000)
        error, equals = "", []
        try:
            exported = wrap.save_pretrained(f"{outputs}/0")
            transfer.connect("127.0.0.1", 29501, join)
            transfer.send_weights("step 0")
            equals.append(equal())
            wrap.train(batch())
            exported = wrap.save_pretrained(f"{outputs}/1")
            update_from_folder(servers, exported, "step 1")
            equals.append(equal())
        except CheckpointError as failure:
            error = str(failure)
            wrap.train(batch())
        for engine in engines:
            engine.server.shutdown()
        return {"equal": equals, "error": error, "requests": engines[1].requests if engines else []}


def vllm_source_and_sender(folder: str, overrides: Sequence[str], outputs: str) -> dict[str, Any]:
    """vLLM's own sender, as its documentation describes it: it sends metadata first, and refuses a tensor that differs
    from it."""
    import abc
    import dataclasses
    import sys
    import types

    from megatron_wrap.bridge.engines.vllm import vllm_source

    @dataclasses.dataclass(frozen=True)
    class ParamMeta:
        name: str
        dtype: torch.dtype
        shape: tuple[int, ...]

    class WeightSource(abc.ABC):
        @abc.abstractmethod
        def metadata(self) -> list[ParamMeta]: ...

        @abc.abstractmethod
        def __iter__(self) -> Iterator[tuple[str, Tensor]]: ...

    module = types.ModuleType("vllm.distributed.weight_transfer")
    module.ParamMeta, module.WeightSource = ParamMeta, WeightSource  # type: ignore[attr-defined]
    names = ("vllm", "vllm.distributed", module.__name__)
    with started(folder, overrides, outputs) as wrap:
        sys.modules.update({name: module if name == module.__name__ else types.ModuleType(name) for name in names})
        try:
            source = vllm_source(wrap.weight_source())
        finally:
            for name in names:
                del sys.modules[name]
        assert isinstance(source, WeightSource)
        rounds = []
        for _ in range(2):
            pairs = list(zip(source.metadata(), source, strict=True))
            rounds.append(
                all(meta == ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for meta, (name, tensor) in pairs)
            )
    return {"agree": rounds, "names": [meta.name for meta, _ in pairs]}

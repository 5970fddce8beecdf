"""Sends weights to SGLang's servers (docs.sglang.io, SGLang for RL systems): broadcast in flattened buckets, or from a
folder."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from megatron_wrap.bridge.engines.rollout_weights import BUCKET_BYTES, FAILED, Broadcast, Chunk, Transfer, during
from megatron_wrap.bridge.export.weight_stream import dtype_name
from megatron_wrap.parallel.agreement import on_rank_0


@dataclass
class SglangServer:
    """An SGLang server, over HTTP.

    Args:
        url: such as "http://localhost:30000".
        num_ranks: tp_size * dp_size of the server.
        timeout: seconds of a request.
    """

    url: str
    num_ranks: int = 1
    timeout: float = 600.0

    def post(self, endpoint: str, body: dict[str, Any]) -> None:
        """POST the body as JSON to an endpoint, such as "pause_generation"; returns when the server is done.

        Raises:
            OSError: the server cannot be reached, answers with an HTTP error, or with `success` false.
        """
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/{endpoint}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            reason = " ".join(error.read().decode(errors="replace").split())[:300]
            raise OSError(f"{request.full_url} answers {error.code}: {reason}") from error
        except OSError as error:
            raise OSError(f"{request.full_url} cannot be reached: {error}") from error
        answer = json.loads(text) if text.startswith("{") else {}
        if answer.get("success") is False:
            raise OSError(f"{request.full_url} fails: {answer.get('message', text)}")


@dataclass
class SglangTransfer(Transfer):
    """Broadcasts buckets of weights to SGLang's servers, over a group that the caller opens.

    Args:
        weights: from `wrap.weight_source()`.
        servers: used by the sending rank alone; none on others.
        bucket_bytes: largest bucket, in bytes; a larger tensor is a bucket of its own.
        group_name: of the process group.
        pause_mode: of `pause_generation`; SGLang can flush its cache only if "abort" has ended all requests.
        flush_cache: with the last bucket, remove cached prefixes, which were computed with the old weights.
    """

    engine: ClassVar[str] = "SGLang"
    servers: Sequence[SglangServer]
    bucket_bytes: int = BUCKET_BYTES
    group_name: str = "weight_update_group"
    pause_mode: str = "abort"
    flush_cache: bool = True

    def connect(
        self, master_address: str, master_port: int, join: Callable[[int], Broadcast], backend: str = "nccl"
    ) -> None:
        """Set up the transfer once, before the first update. Collective over the trainer's ranks.

        Args:
            master_address, master_port: where the group meets.
            join: opens the sender's end of the group while the servers join; it gets the group's size: the sender,
                which is rank 0, and the processes of all servers.
            backend: of the group.

        Raises:
            CheckpointError: on every rank, if a server or `join` fails.
        """
        size, offset, requests = 1 + sum(server.num_ranks for server in self.servers), 1, []
        for server in self.servers:
            body = {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": offset,
                "world_size": size,
                "group_name": self.group_name,
                "backend": backend,
            }
            requests.append(partial(server.post, "init_weights_update_group", body))
            offset += server.num_ranks
        self.set_up(requests, lambda: join(size))

    def chunks(self) -> Generator[Chunk]:
        """The weights in buckets of one dtype each, which servers without support for several dtypes can read."""
        yield from self.weights.buckets(self.bucket_bytes, one_dtype=True)

    def update(self, chunks: Generator[Chunk], weight_version: str | None) -> None:
        """Send a request for each chunk, while generation is paused."""
        version = {} if weight_version is None else {"weight_version": weight_version}
        remaining = len(self.weights.metadata())
        with paused(self.servers, self.pause_mode):
            for chunk in chunks:
                remaining -= len(chunk)
                body = {
                    "names": [name for name, _ in chunk],
                    "dtypes": [dtype_name(tensor.dtype) for _, tensor in chunk],
                    "shapes": [list(tensor.shape) for _, tensor in chunk],
                    "group_name": self.group_name,
                    "load_format": "flattened_bucket",
                    "flush_cache": self.flush_cache and remaining == 0,
                    **version,
                }
                with during(partial(each.post, "update_weights_from_distributed", body) for each in self.servers):
                    self.broadcast(chunk)


def update_from_folder(
    servers: Sequence[SglangServer], folder: str | Path, weight_version: str | None = None, pause_mode: str = "abort"
) -> None:
    """Let SGLang's servers load a folder that `wrap.save_pretrained` has written. Collective over the trainer's ranks.

    Args:
        servers: used by global rank 0 alone.
        folder: path on the servers, on a file system that they share.
        weight_version, pause_mode: as for `SglangTransfer`.

    Raises:
        CheckpointError: on every rank, if a server fails.
    """
    body: dict[str, Any] = {"model_path": str(folder), "flush_cache": True}
    if weight_version is not None:
        body["weight_version"] = weight_version

    def update() -> None:
        requests = (partial(server.post, "update_weights_from_disk", body) for server in servers)
        with paused(servers, pause_mode), during(requests):
            pass

    on_rank_0(update, FAILED.format("SGLang"), (Exception,))


@contextmanager
def paused(servers: Sequence[SglangServer], mode: str) -> Iterator[None]:
    """Pause generation on all servers, and continue it unless the block raises: half-updated servers stay paused."""
    for server in servers:
        server.post("pause_generation", {"mode": mode})
    yield
    for server in servers:
        server.post("continue_generation", {})

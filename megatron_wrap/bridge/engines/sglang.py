"""Weights to SGLang's servers (docs.sglang.io, SGLang for RL systems): broadcast in flattened buckets, or a folder."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatron_wrap.bridge.engines.broadcast import BackgroundCall, Broadcast, finished, packed
from megatron_wrap.bridge.engines.rollout_weights import BUCKET_BYTES, RolloutWeights
from megatron_wrap.bridge.export.weight_stream import dtype_name
from megatron_wrap.parallel.agreement import agreed, on_rank_0

_FAILED = "SGLang was not updated: {}; its servers may have part of the weights, so update them again before a rollout"


class SglangClient(Protocol):
    """One SGLang server; `SglangServer` implements it over HTTP."""

    num_ranks: int
    """Processes of the server: tp_size * dp_size."""

    def post(self, endpoint: str, body: dict[str, Any]) -> None:
        """Send a request, such as "pause_generation"; returns when the server is done, raises on failure."""


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
        """POST the body as JSON.

        Raises:
            OSError: the server cannot be reached, answers with an HTTP error, or with `success` false.
        """
        request = urllib.request.Request(
            f"{self.url.rstrip('/')}/{endpoint}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method="POST",
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
class SglangTransfer:
    """Broadcasts buckets of weights to SGLang's servers, over a group that the caller opens.

    Args:
        weights: from `wrap.weight_source()`.
        servers: used by the sending rank alone.
        bucket_bytes: largest bucket, in bytes; a larger tensor is a bucket of its own.
        group_name: of the process group.
        pause_mode: of `pause_generation`; SGLang can flush its cache only if "abort" has ended all requests.
        flush_cache: with the last bucket, remove cached prefixes, which were computed with the old weights.
    """

    weights: RolloutWeights
    servers: Sequence[SglangClient]
    bucket_bytes: int = BUCKET_BYTES
    group_name: str = "weight_update_group"
    pause_mode: str = "abort"
    flush_cache: bool = True
    _broadcast: Broadcast | None = field(default=None, init=False)

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
        with agreed("SGLang's weight transfer was not set up: {}", (Exception,)):
            if not self.weights.is_sender:
                return
            size = 1 + sum(server.num_ranks for server in self.servers)
            calls, offset = [], 1
            for server in self.servers:
                body = {
                    "master_address": master_address,
                    "master_port": master_port,
                    "rank_offset": offset,
                    "world_size": size,
                    "group_name": self.group_name,
                    "backend": backend,
                }
                calls.append(_request(server, "init_weights_update_group", body))
                offset += server.num_ranks
            self._broadcast = join(size)
            for call in calls:
                call.result()

    def send_weights(self, weight_version: str | None = None) -> None:
        """Update all servers with the current weights. Collective over the trainer's ranks.

        Args:
            weight_version: name of these weights in the servers' responses; None: unchanged.

        Raises:
            CheckpointError: on every rank, if a server or the broadcast fails, or `connect` was not called.
        """
        with agreed(_FAILED, (Exception,)):
            buckets = self.weights.buckets(self.bucket_bytes, one_dtype=True)
            with finished(buckets):
                if self.weights.is_sender:
                    self._send(buckets, weight_version)

    def _send(self, buckets: Iterator[list[tuple[str, Tensor]]], weight_version: str | None) -> None:
        if self._broadcast is None:
            raise RuntimeError("call connect first")
        version = {} if weight_version is None else {"weight_version": weight_version}
        remaining = len(self.weights.metadata())
        with paused(self.servers, self.pause_mode):
            for bucket in buckets:
                remaining -= len(bucket)
                body = {
                    "names": [name for name, _ in bucket],
                    "dtypes": [dtype_name(tensor.dtype) for _, tensor in bucket],
                    "shapes": [list(tensor.shape) for _, tensor in bucket],
                    "group_name": self.group_name,
                    "load_format": "flattened_bucket",
                    "flush_cache": self.flush_cache and remaining == 0,
                    **version,
                }
                calls = [_request(server, "update_weights_from_distributed", body) for server in self.servers]
                self._broadcast(packed([tensor for _, tensor in bucket]))
                for call in calls:
                    call.result()


def update_from_folder(
    servers: Sequence[SglangClient], folder: str | Path, weight_version: str | None = None, pause_mode: str = "abort"
) -> None:
    """Let SGLang's servers load a folder that `wrap.save_pretrained` has written. Collective over the trainer's ranks.

    Args:
        servers: used by global rank 0 alone.
        folder: as the servers see it, on a file system that they share.
        weight_version, pause_mode: as for `SglangTransfer`.

    Raises:
        CheckpointError: on every rank, if a server fails.
    """
    body = {"model_path": str(folder), "flush_cache": True}
    if weight_version is not None:
        body["weight_version"] = weight_version

    def update() -> None:
        with paused(servers, pause_mode):
            for call in [_request(server, "update_weights_from_disk", body) for server in servers]:
                call.result()

    on_rank_0(update, _FAILED, (Exception,))


@contextmanager
def paused(servers: Sequence[SglangClient], mode: str) -> Iterator[None]:
    """Pause generation on all servers, and continue it unless the block raises: half-updated servers stay paused."""
    for server in servers:
        server.post("pause_generation", {"mode": mode})
    yield
    for server in servers:
        server.post("continue_generation", {})


def _request(server: SglangClient, endpoint: str, body: dict[str, Any]) -> BackgroundCall:
    return BackgroundCall(lambda: server.post(endpoint, body))

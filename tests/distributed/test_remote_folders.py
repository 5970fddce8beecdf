"""Runs whose checkpoints and data are in an object store: moto's server in a process of its own, behind a proxy that
drops connections."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import _checkpoint_runs as runs
import pytest
from _checkpoint_runs import TP2, TRAIN
from _object_store import SECRET, Proxy, object_store

from megatron_wrap.checkpoint.files.downloads import RemoteStore
from megatron_wrap.checkpoint.files.run_folder import CheckpointStore

CHECKPOINT = "megatron_wrap.checkpoint"
STEPS = 4


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with object_store() as proxy:
        yield proxy


def _environment(folder: Path) -> dict[str, str]:
    names = ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION")
    return {**{name: os.environ[name] for name in names}, "MEGATRON_WRAP_CACHE": str(folder / "cache")}


def _run(folder: Path, environment: dict[str, str], until: int, *overrides: str) -> tuple[int, str, float]:
    """Iteration where the run begins, digest of its state where it ends, and the longest step in seconds."""
    os.environ.update(environment)
    longest = 0.0
    with runs.started(folder, (*TP2, f"{TRAIN}.save_interval=1", *overrides)) as wrap:
        begins = wrap.iteration
        while wrap.iteration < until:
            start, at = time.monotonic(), wrap.iteration * runs.BATCH
            wrap.train(runs.samples()[at : at + runs.BATCH])
            longest = max(longest, time.monotonic() - start)
        return begins, runs.state_digest(wrap), longest


@pytest.mark.matrix
def test_a_run_resumes_from_an_object_store_that_dropped_its_connections(server, ranks, tmp_path):
    url, environment = "s3://runs/resumed", _environment(tmp_path)
    remote = (f"{TRAIN}.save={url}", f"{CHECKPOINT}.keep=2")
    expected = ranks(2).run(_run, tmp_path / "unbroken", environment, STEPS)[0]
    server.drop_after = 60_000  # less than a tensor file
    nowait = f"{CHECKPOINT}.upload_wait_minutes=0.02"
    begins, _, longest = ranks(2).run(_run, tmp_path / "first", environment, 2, *remote, nowait)[0]
    staged = CheckpointStore(tmp_path / "first/records/checkpoints")
    assert begins == 0
    assert longest < 30
    assert server.dropped
    assert RemoteStore(url).newest_first() == []
    assert staged.latest() == 2

    server.drop_after = None  # what was staged is sent by the next start
    assert ranks(2).run(_run, tmp_path / "first", environment, 3, *remote)[0][0] == 2
    assert RemoteStore(url).newest_first() == [3, 2]
    shutil.rmtree(tmp_path / "first")  # another machine

    begins, digest, _ = ranks(2).run(_run, tmp_path / "second", environment, STEPS, *remote)[0]
    assert (begins, digest) == (3, expected[1])
    loaded = ranks(2).run(_run, tmp_path / "third", environment, 0, f"{TRAIN}.load={url}")[0]
    assert loaded[:2] == (STEPS, expected[1])
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path

"""Checkpoints in remote folders: moto's S3 server in a process of its own behind a proxy that drops connections, and
local stand-ins for gs:// and hf://."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import huggingface_hub
import pytest
from _object_store import SECRET, Proxy, object_store
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.registry import _registry

from megatron_wrap.checkpoint.files import uploads as uploads_module
from megatron_wrap.checkpoint.files.downloads import RemoteStore, fetch_newest, fetch_one
from megatron_wrap.checkpoint.files.run_folder import BEST, FORMAT_FILES, MANIFEST, RESOLVED, TRACKER, CheckpointStore
from megatron_wrap.checkpoint.files.uploads import Uploads
from megatron_wrap.cli.main import main
from megatron_wrap.errors import CheckpointError, ConfigError
from megatron_wrap.remote.files import RemoteFolder, fetch_file

SIZE = 400_000
"""Of a tensor file, in bytes."""


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with object_store() as proxy:
        yield proxy


@pytest.fixture
def url(server: Proxy, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(uploads_module, "_MAX_PAUSE_SECONDS", 0.2)
    yield f"s3://runs/{request.node.name}/checkpoints"
    server.drop_after, server.is_down = None, False


def save(store: CheckpointStore, iteration: int) -> Path:
    partial = store.begin(iteration)
    for name in FORMAT_FILES:
        (partial / name).write_text('{"sharded_backend": "torch_dist"}')
    (partial / RESOLVED).write_text("a: 1\n")
    for number in range(2):
        (partial / f"__{number}_0.distcp").write_bytes(bytes([iteration, number]) * (SIZE // 2))
    return store.commit(partial, iteration, {"layout": {"tp": 1, "pp": 1, "cp": 1, "dp": 1}})


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.05)


def test_uploaded_checkpoints_are_what_was_saved_and_older_ones_are_removed(url, tmp_path, capsys):
    store = CheckpointStore(tmp_path / "staging")
    uploads = Uploads(store.folder, url, keep=2, limit_bytes=None)
    saved = {}
    for iteration in (1, 2, 3, 4):
        saved[iteration] = content(save(store, iteration))
        if iteration == 1:
            store.record_best(1)
        uploads.check()
        until(lambda: not uploads.waiting())
    uploads.finish(1)
    assert store.iterations() == [4]
    remote = RemoteStore(url)
    assert (remote.sent(), remote.number(TRACKER), remote.number(BEST)) == ([1, 3, 4], 4, 1)
    assert fetch_newest(url, tmp_path / "copy", strict=False) == 4
    assert content(tmp_path / "copy" / "iter_0000004") == saved[4]
    assert content(fetch_one(f"{url}/iter_0000001", tmp_path / "one")) == saved[1]
    assert main(["checkpoints", url, "--verify"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["checkpoint", "iter_0000001", "iter_0000003", "iter_0000004"]
    assert [line.endswith(end) for line, end in zip(lines[1:], ("verified, best", "verified", "newest"), strict=True)]


@pytest.mark.matrix
def test_dropped_connections_delay_an_upload_and_the_last_good_checkpoint_stays(url, server, tmp_path):
    store = CheckpointStore(tmp_path / "staging")
    save(store, 1)
    uploads = Uploads(store.folder, url, keep=1, limit_bytes=None)
    until(lambda: not uploads.waiting())
    server.drop_after = SIZE // 2  # the small files pass
    save(store, 2)
    start = time.monotonic()
    uploads.check()
    assert uploads.make_room("drop_oldest")
    assert time.monotonic() - start < 1
    dropped = server.dropped
    until(lambda: server.dropped > dropped + 2)
    assert fetch_newest(url, tmp_path / "during", strict=True) == 1
    assert RemoteStore(url).missing_part(2) is not None
    uploads.close()
    assert store.iterations() == [1, 2] or store.iterations() == [2]
    server.drop_after = None
    kept = {name for name in RemoteStore(url).sizes if name.startswith("iter_0000002")}
    assert kept
    before = RemoteStore(url).folder._files.info(f"{url}/{min(kept)}")["LastModified"]
    time.sleep(1.1)  # the resolution of S3's times
    again = Uploads(store.folder, url, keep=1, limit_bytes=None)
    again.finish(1)
    assert RemoteStore(url).newest_first() == [2]
    assert RemoteStore(url).folder._files.info(f"{url}/{min(kept)}")["LastModified"] == before
    assert fetch_newest(url, tmp_path / "after", strict=True) == 2


def test_a_store_that_is_down_stops_no_save_and_the_limit_has_its_policy(url, server, tmp_path):
    store = CheckpointStore(tmp_path / "staging")
    server.is_down = True
    uploads = Uploads(store.folder, url, keep=None, limit_bytes=3.5 * 2 * SIZE)
    for iteration in (1, 2, 3):
        assert uploads.make_room("stop")
        save(store, iteration)
        uploads.check()
    assert not uploads.make_room("wait")
    with pytest.raises(CheckpointError, match=r"3 checkpoints .* wait for their upload .*on_upload_limit"):
        uploads.make_room("stop")
    assert uploads.make_room("drop_oldest")
    assert store.iterations()[-1] == 3
    assert len(store.iterations()) == 2
    start = time.monotonic()
    uploads.finish(0.02)
    assert time.monotonic() - start < 5
    left = store.iterations()
    server.is_down = False
    again = Uploads(store.folder, url, keep=None, limit_bytes=None)
    again.finish(1)
    assert RemoteStore(url).sent() == left


@pytest.mark.matrix
def test_a_damaged_remote_checkpoint_is_replaced_by_the_one_before_it(url, tmp_path):
    store = CheckpointStore(tmp_path / "staging")
    uploads = Uploads(store.folder, url, keep=None, limit_bytes=None)
    for iteration in (1, 2, 3):
        save(store, iteration)
        uploads.check()
        until(lambda: not uploads.waiting())
    uploads.finish(1)
    folder = RemoteFolder(url)
    folder.write("iter_0000003/__0_0.distcp", b"\x07" * SIZE)  # the same size
    folder.remove(["iter_0000002/__1_0.distcp"])
    with pytest.raises(CheckpointError, match=r"iter_0000003 is damaged: __0_0.distcp differs from its SHA-256"):
        fetch_newest(url, tmp_path / "strict", strict=True)
    assert fetch_newest(url, tmp_path / "copy", strict=False) == 1
    assert CheckpointStore(tmp_path / "copy").latest() == 1
    assert main(["checkpoints", url, "--verify"]) == 1
    folder.remove(["iter_0000001/.metadata"])
    with pytest.raises(CheckpointError, match="no other is complete"):
        fetch_newest(url, tmp_path / "none", strict=False)


class LocalFiles(DirFileSystem):
    """A stand-in for an object store in a local folder."""

    root = ""
    protocol = "gs"

    def __init__(self, **options: Any) -> None:
        super().__init__(path=type(self).root, fs=fsspec.filesystem("file"), skip_instance_cache=True)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path.split("://", 1)[-1].rstrip("/") if isinstance(path, str) else [cls._strip_protocol(p) for p in path]


class HubFiles(LocalFiles):
    protocol = "hf"


@pytest.fixture
def stand_ins(tmp_path: Path) -> Iterator[Path]:
    """A folder that is gs://, and one with the repositories of hf://."""
    known = dict(_registry)
    LocalFiles.root = HubFiles.root = str(tmp_path / "remote")
    Path(LocalFiles.root).mkdir()
    for name, kind in (("gs", LocalFiles), ("hf", HubFiles)):
        fsspec.register_implementation(name, kind, clobber=True)
    yield tmp_path / "remote"
    _registry.clear()
    _registry.update(known)


def test_gs_folders_are_used_in_the_same_way(stand_ins, tmp_path):
    store = CheckpointStore(tmp_path / "staging")
    saved = content(save(store, 1))
    Uploads(store.folder, "gs://bucket/run", keep=None, limit_bytes=None).finish(1)
    assert content(stand_ins / "bucket/run/iter_0000001") == saved
    assert fetch_newest("gs://bucket/run", tmp_path / "copy", strict=True) == 1


def test_a_hugging_face_repository_gets_one_commit_for_each_checkpoint(stand_ins, tmp_path, monkeypatch):
    commits = []

    class Api:
        def create_repo(self, repo_id: str, *, repo_type: str, private: bool, exist_ok: bool) -> None:
            assert (repo_id, repo_type, private, exist_ok) == ("org/name", "model", True, True)

        def create_commit(self, repo_id: str, operations: Any, *, commit_message: str, **others: Any) -> None:
            added = {}
            for operation in operations:
                target = stand_ins / repo_id / operation.path_in_repo
                if isinstance(operation, huggingface_hub.CommitOperationDelete):
                    target.unlink()
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with operation.as_file() as stream:
                    target.write_bytes(stream.read())
                added[operation.path_in_repo] = target
            commits.append((commit_message, sorted({name.split("/")[1] for name in added})))

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    store = CheckpointStore(tmp_path / "staging")
    uploads = Uploads(store.folder, "hf://org/name/run", keep=1, limit_bytes=None)
    for iteration in (1, 2):
        saved = content(save(store, iteration))
        uploads.check()
        until(lambda: not uploads.waiting())
    uploads.finish(1)
    assert commits == [(f"Checkpoint of iteration {number}", [f"iter_000000{number}", TRACKER]) for number in (1, 2)]
    assert RemoteStore("hf://org/name/run").sent() == [2]
    assert fetch_newest("hf://org/name/run", tmp_path / "copy", strict=True) == 2
    assert content(tmp_path / "copy/iter_0000002") == saved


def test_a_data_file_is_downloaded_once_and_again_after_a_change(url, server, tmp_path, monkeypatch):
    monkeypatch.setenv("MEGATRON_WRAP_CACHE", str(tmp_path / "cache"))
    folder = RemoteFolder(url)
    folder.write("train.jsonl", b'{"text": "a"}\n')
    first = fetch_file(f"{url}/train.jsonl")
    assert (first.name, first.read_bytes()) == ("train.jsonl", b'{"text": "a"}\n')
    time_of_first = first.stat().st_mtime_ns
    assert fetch_file(f"{url}/train.jsonl") == first
    assert first.stat().st_mtime_ns == time_of_first
    folder.write("train.jsonl", b'{"text": "b"}\n')
    second = fetch_file(f"{url}/train.jsonl")
    assert second != first
    assert second.read_bytes() == b'{"text": "b"}\n'
    with pytest.raises(ConfigError, match="FileNotFoundError"):
        fetch_file(f"{url}/other.jsonl")


def test_urls_that_cannot_be_used_are_one_error(monkeypatch):
    with pytest.raises(ConfigError, match=r"s3://, gs:// or hf://"):
        RemoteFolder("ftp://bucket/run")
    with pytest.raises(ConfigError, match="contains credentials") as error:
        RemoteFolder(f"s3://key:{SECRET}@bucket/run")
    assert SECRET not in str(error.value)
    with pytest.raises(ConfigError, match=r"needs the package gcsfs, .*pip install 'megatron-wrap\[remote\]'"):
        RemoteFolder("gs://bucket/run")


def test_the_record_of_uploads_belongs_to_one_url(url, tmp_path):
    store = CheckpointStore(tmp_path / "staging")
    save(store, 1)
    for target in (url, f"{url}-other"):
        Uploads(store.folder, target, keep=None, limit_bytes=None).finish(1)
        assert RemoteStore(target).sent() == [1]
        assert json.loads((store.folder / uploads_module.RECORD).read_text())["url"] == target
    assert f"iter_0000001/{MANIFEST}" in RemoteStore(url).sizes

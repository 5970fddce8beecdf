"""The copy in host memory, and the process that writes it: what is written, and how either ends."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _interpreters import forked_interpreters

from megatron_wrap.checkpoint.files import hashed_files, writer_process
from megatron_wrap.checkpoint.files.hashed_files import FileToWrite, hash_files, write_files
from megatron_wrap.checkpoint.files.writer_process import HostCopy, WriteJob, Writer
from megatron_wrap.errors import CheckpointError

TENSORS = (
    torch.arange(12.0).view(3, 4).t(),
    torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    torch.empty(0, 7),
    torch.tensor(3),
    torch.tensor([True, False, True]),
    torch.arange(4.0, dtype=torch.float32).to(torch.float8_e4m3fn),
)


@pytest.fixture
def copy() -> Iterator[HostCopy]:
    copy = HostCopy(torch.device("cpu"), processes=1)
    yield copy
    copy.close()


@pytest.fixture(scope="module")
def started() -> Iterator[tuple[HostCopy, Writer]]:
    """A copy and its writer, whose process two tests use: it imports torch."""
    copy = HostCopy(torch.device("cpu"), processes=1)
    writer = Writer(copy.descriptor)
    yield copy, writer
    writer.close()
    copy.close()


def job(folder: Path, copy: HostCopy, tensors: tuple[torch.Tensor, ...]) -> WriteJob:
    parts = [(("tensor", None, number), copied) for number, copied in enumerate(copy.take(tensors))]
    first = FileToWrite("a.distcp", (*parts[:2], (("object", (0, 1), None), b"bytes")))
    return WriteJob(folder, "record", (first, FileToWrite("b", (*parts[2:],))), copy.num_bytes)


def test_a_process_writes_the_values_of_the_copy(tmp_path: Path, started: tuple[HostCopy, Writer]) -> None:
    copy, writer = started
    larger = tuple(tensor.repeat(2, *[1] * max(tensor.dim() - 1, 0)) for tensor in TENSORS[:5])
    for number, tensors in enumerate((TENSORS, larger)):  # the buffer grows
        folder = tmp_path / str(number)
        folder.mkdir()
        live = [tensor.clone() for tensor in tensors]
        planned = job(folder, copy, tuple(live))
        for tensor in live:
            tensor.zero_()  # as the next step would
        writer.start(planned)
        assert writer.finished(timeout=60) == ""
        record = json.loads((folder / "record").read_text())
        assert record["hashes"] == hash_files(folder, ["a.distcp", "b"])
        read = []
        for part in record["parts"]:
            with (folder / part["file"]).open("rb") as stream:
                stream.seek(part["offset"])
                content = stream.read(part["length"])
            if part["index"][0] == "object":
                assert part["index"] == ["object", [0, 1], None]
                assert content == b"bytes"
                continue
            (folder / "part").write_bytes(content)
            read.append(torch.load(folder / "part", weights_only=True))
            assert len(content) < 4000  # not the whole buffer
        assert len(read) == len(tensors)
        for value, tensor in zip(read, tensors, strict=True):
            assert (value.dtype, value.shape) == (tensor.dtype, tensor.shape)
            assert torch.equal(value.float(), tensor.float())


def test_errors_and_the_end_of_the_process_are_results(tmp_path: Path, started: tuple[HostCopy, Writer]) -> None:
    copy, writer = started
    assert writer.finished(timeout=0) == ""
    writer.start(job(tmp_path / "missing", copy, TENSORS))
    assert "No such file" in str(writer.finished(timeout=60))
    assert writer.process_id is not None
    os.kill(writer.process_id, signal.SIGSTOP)
    writer.start(job(tmp_path, copy, TENSORS))
    assert writer.finished(timeout=0) is None
    os.kill(writer.process_id, signal.SIGKILL)
    assert "SIGKILL" in str(writer.finished(timeout=60))
    with forked_interpreters():
        writer.start(job(tmp_path, copy, TENSORS))  # another process
    assert writer.finished(timeout=60) == ""
    writer.close()
    assert writer.process_id is None


@pytest.mark.matrix
def test_the_process_ends_with_its_rank(tmp_path: Path) -> None:
    program = """
import os, signal, sys, torch
from pathlib import Path
from megatron_wrap.checkpoint.files.writer_process import HostCopy
from megatron_wrap.checkpoint.files.writer_process import WriteJob, Writer
copy = HostCopy(torch.device("cpu"), 1)
writer = Writer(copy.descriptor)
writer.start(WriteJob(Path(sys.argv[1]), "record", (), 0))
writer.finished(60)
print(writer.process_id, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, check=False)
    assert ended.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while Path(f"/proc/{int(ended.stdout)}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_too_little_memory_is_refused_before_it_is_used(copy: HostCopy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_process, "available_memory", lambda: 1000)
    with pytest.raises(CheckpointError, match=r"async_save: false"):
        copy.take([torch.zeros(1000)])
    assert copy.num_bytes == 0


def test_files_are_hashed_block_by_block_while_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashed_files, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(hashed_files, "PIECE_BYTES", 300)
    tensors = [torch.arange(float(size)) for size in (5, 900, 2000)]
    files = [
        FileToWrite(name, tuple((("tensor", None, number), tensor) for number, tensor in enumerate(tensors)))
        for name in ("a", "b")
    ]
    record = write_files(tmp_path, files, lambda tensor: tensor)
    for name in ("a", "b"):
        content = (tmp_path / name).read_bytes()
        blocks = [hashlib.sha256(content[at : at + 1000]).hexdigest() for at in range(0, len(content), 1000)]
        whole = hashlib.sha256("".join(blocks).encode()).hexdigest()
        assert record["hashes"][name] == {"blocks": blocks, "list": whole}
    assert write_files(tmp_path, files, lambda tensor: tensor, hashed=False)["hashes"] == {}


def test_a_failed_write_ends_the_threads_that_wait_for_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashed_files, "PIECE_BYTES", 300)
    checksums = torch.serialization.get_crc32_options()
    (tmp_path / "full").symlink_to("/dev/full")
    parts = tuple((("tensor", None, number), torch.arange(1000.0)) for number in range(3))

    def fail_at_the_last(tensor: torch.Tensor) -> torch.Tensor:
        if tensor is parts[2][1]:
            raise RuntimeError("a tensor cannot be copied")
        return tensor

    with pytest.raises(RuntimeError, match="a tensor cannot be copied"):
        write_files(tmp_path, [FileToWrite(name, parts) for name in "abc"], fail_at_the_last)
    with pytest.raises(OSError, match="No space left on device"):
        write_files(tmp_path, [FileToWrite("full", parts), FileToWrite("d", parts)], lambda tensor: tensor)
    assert torch.serialization.get_crc32_options() is checksums

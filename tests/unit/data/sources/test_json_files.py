"""JsonLines against json.loads of the whole file; errors; use in several processes and threads."""

import json
import multiprocessing
import os
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_wrap.data.sources.json_files import JsonLines
from megatron_wrap.errors import DataError

SAMPLES = [{"id": i, "text": "naïve 🦙 " * (i % 7)} for i in range(50)]


@pytest.fixture
def path(tmp_path):
    """A file with a byte order mark, empty lines, a Windows line ending and no line feed at the end."""
    lines = [json.dumps(sample, ensure_ascii=False) for sample in SAMPLES]
    lines[3] += "\r"
    text = "\ufeff" + "\n".join(lines[:10]) + "\n\n  \n" + "\n".join(lines[10:49]) + "\n\n" + lines[49]
    file = tmp_path / "train.jsonl"
    file.write_bytes(text.encode())
    return file


def test_json_lines_is_a_sequence_of_the_objects(path):
    data = JsonLines(path)
    assert len(data) == 50
    assert list(data) == SAMPLES
    assert [data[i] for i in range(50)] == SAMPLES
    assert data[-1] == SAMPLES[-1]
    with pytest.raises(IndexError):
        data[50]


def test_where_returns_file_and_line(path):
    data = JsonLines(path)
    lines = path.read_text(encoding="utf-8-sig").split("\n")
    for index in (0, 9, 10, 48, 49):
        file, line = data.where(index).rsplit(":", 1)
        assert file == str(path)
        assert json.loads(lines[int(line) - 1]) == SAMPLES[index]


def test_where_supports_files_of_several_blocks(tmp_path):
    file = tmp_path / "big.jsonl"
    file.write_text("".join(json.dumps({"id": i, "text": "x" * 1000}) + "\n" for i in range(3000)))
    data = JsonLines(file)
    assert [data.where(index) for index in (2999, 7, 8, 2998)] == [f"{file}:{line}" for line in (3000, 8, 9, 2999)]
    assert data[2999]["id"] == 2999


def test_pickled_copy_and_changed_working_directory(path, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    data = JsonLines("train.jsonl")
    monkeypatch.chdir("/")
    assert data[7] == SAMPLES[7]
    copy = pickle.loads(pickle.dumps(data))
    assert list(copy) == SAMPLES
    assert copy.where(0) == "train.jsonl:1"


def _read(data, queue, start):
    queue.put([data[i % 50]["id"] for i in range(start, start + 500)])


def test_forked_processes_and_threads_can_read_concurrently(path):
    data = JsonLines(path)
    assert data[0] == SAMPLES[0]
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    workers = [context.Process(target=_read, args=(data, queue, start)) for start in (0, 17)]
    for worker in workers:
        worker.start()
    in_parent = [data[i % 50]["id"] for i in range(500)]
    in_workers = [queue.get() for _ in workers]
    for worker in workers:
        worker.join()
    assert in_parent == [i % 50 for i in range(500)]
    assert sorted(in_workers) == sorted([[i % 50 for i in range(start, start + 500)] for start in (0, 17)])
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(data.__getitem__, range(50))) == SAMPLES


def test_file_descriptor_is_closed_with_the_object(path):
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    data = JsonLines(path)
    assert data[0] == SAMPLES[0]
    del data
    assert before == (len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": ' + b"9" * 5000 + b"}", r"train.jsonl:4: not JSON: .*4300 digits"),
        (b"[" * 100_000, r"train.jsonl:4: not JSON: nested too deeply"),
        (b'{"a": 1', r"train.jsonl:4: not JSON: .*column 8.*; every line must be one JSON object"),
        (b"[1, 2]", r"train.jsonl:4: must be a JSON object like .*, not a list"),
        (b'{"a": "\xff"}', r"train.jsonl:4: not UTF-8 \(byte 8 of the line\)"),
    ],
)
def test_error_names_the_malformed_line(tmp_path, line, message):
    file = tmp_path / "train.jsonl"
    file.write_bytes(b'{"a": 0}\n\n{"a": 1}\n' + line + b'\n{"a": 3}\n')
    data = JsonLines(file)
    assert data[1] == {"a": 1}
    with pytest.raises(DataError, match=message):
        list(data)
    with pytest.raises(DataError, match=message):
        data[2]
    assert data[3] == {"a": 3}


def test_missing_file_is_reported_with_a_suggestion(path):
    with pytest.raises(DataError, match=r"trian\.jsonl: .*; did you mean .*/train\.jsonl\?"):
        JsonLines(path.parent / "trian.jsonl")
    with pytest.raises(DataError, match=r"quite-another-name: .* contains train\.jsonl"):
        JsonLines(path.parent / "quite-another-name")
    with pytest.raises(DataError, match=f"of its path only {path.parent} exists"):
        JsonLines(path.parent / "data" / "train.jsonl")
    with pytest.raises(DataError, match="is a folder"):
        JsonLines(path.parent)
    with pytest.raises(DataError, match=r"examples/data/build\.py"):
        JsonLines(path.parent / "generated" / "train.jsonl")


@pytest.mark.parametrize("content", [b"", b"\n \n"])
def test_a_file_without_samples_is_empty(tmp_path, content):
    file = tmp_path / "empty.jsonl"
    file.write_bytes(content)
    data = JsonLines(file)
    assert len(data) == 0
    assert list(data) == []

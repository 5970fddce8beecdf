"""Each kind of source against the `datasets` library and the rows it was written from; damaged files; mixtures."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.data.order.sample_sets import (
    check_source,
    first_training_samples,
    open_source,
    stream_of,
    training_stream,
    validation_sets,
)
from megatron_wrap.data.order.stream import EpochSampler
from megatron_wrap.data.sources.files import stream_rows
from megatron_wrap.data.sources.rows import BadSample
from megatron_wrap.data.sources.tables import check_decoded_size
from megatron_wrap.errors import ConfigError, DataError

ROWS = [
    {
        "messages": [{"role": "user", "content": f"naïve {number}"}, {"role": "assistant", "content": "a" * number}],
        "id": number,
    }
    for number in range(25)
]
TEXT = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)
TABLE = pa.Table.from_pylist(ROWS)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


def _lines(path: str) -> None:
    Path(path).write_text("\n" + TEXT)  # an empty line: rows are named by line


def _gzip(path: str) -> None:
    Path(path).write_bytes(gzip.compress(TEXT.encode()))


def _zstd(path: str) -> None:
    with pa.output_stream(path, compression="zstd") as file:
        file.write(TEXT[:400].encode())
    with pa.output_stream("second", compression="zstd") as file:
        file.write(TEXT[400:].encode())
    with open(path, "ab") as file:  # two frames
        file.write(Path("second").read_bytes())


def _array(path: str) -> None:
    Path(path).write_text(json.dumps(ROWS, indent=1))


def _parquet(path: str) -> None:
    pq.write_table(TABLE, path, row_group_size=7)


def _arrow(path: str, new: Callable[..., Any] = pa.ipc.new_stream) -> None:
    with pa.OSFile(path, "wb") as file, new(file, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=6)


def _saved(path: str) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(path)


WRITERS: dict[str, Callable[[str], None]] = {
    "train.jsonl": _lines,
    "train.jsonl.gz": _gzip,
    "train.jsonl.zst": _zstd,
    "train.json": _array,
    "lines.json": lambda path: (Path(path).write_text(TEXT), None)[1],
    "train.parquet": _parquet,
    "stream.arrow": _arrow,
    "file.arrow": lambda path: _arrow(path, pa.ipc.new_file),
    "saved": _saved,
}


def without_source(samples: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in sample.items() if key != "source"} for sample in samples]


@pytest.mark.parametrize("path", WRITERS)
def test_every_kind_of_file_has_the_rows_it_was_written_from(path: str) -> None:
    WRITERS[path](path)
    source = SourceConfig(path=path, name="mine")
    samples = open_source(source)
    assert without_source(samples) == ROWS
    assert without_source(samples[3:9:2]) == ROWS[3:9:2]
    assert samples[-1]["id"] == 24
    assert {sample["source"] for sample in samples} == {"mine"}
    line = 3 if path == "train.jsonl" else 2
    assert samples.where(1) == f"{path}:{line}"
    assert without_source(pickle.loads(pickle.dumps(samples))) == ROWS
    for start in (0, 1, 6, 7, 24, 25, 30):
        stream = stream_rows(source)
        read = list(stream.start_at(start))
        assert [row for _, row in read] == ROWS[start:]
        assert [where for where, _ in read] == [samples.where(position) for position in range(start, 25)]
        assert stream.length == 25
    first = first_training_samples([source], None, 3)
    assert without_source([sample for _, sample in first]) == ROWS[:3]
    assert [where for where, _ in first] == [samples.where(row) for row in range(3)]


@pytest.mark.parametrize("ending", ["jsonl", "json", "parquet", "arrow"])
def test_rows_are_those_of_the_datasets_library(ending: str) -> None:
    {"jsonl": _lines, "json": _array, "parquet": _parquet, "arrow": _arrow}[ending](f"train.{ending}")
    builder = {"jsonl": "json"}.get(ending, ending)
    theirs = datasets.load_dataset(builder, data_files=f"train.{ending}", split="train", cache_dir="theirs")
    assert without_source(open_source(SourceConfig(path=f"train.{ending}"))) == list(theirs)
    streamed = training_stream([SourceConfig(path=f"train.{ending}", streaming=True)], seed=1, shuffle=False)
    assert without_source(streamed.read(position) for position in range(25)) == list(theirs)


def test_a_folder_has_the_splits_of_the_datasets_library() -> None:
    Path("data").mkdir()
    for name, begin in (("train-00000-of-00002", 0), ("train-00001-of-00002", 10), ("test-00000-of-00001", 20)):
        pq.write_table(TABLE.slice(begin, 10), f"data/{name}.parquet")
    (Path("data") / "README.md").write_text("no data")
    for split in ("train", "test", "train[:25%]", "train[-3:]", "train[5:12]"):
        theirs = datasets.load_dataset("parquet", data_dir="data", split=split, cache_dir="theirs")
        ours = open_source(SourceConfig(path="data", split=split))
        assert without_source(ours) == list(theirs)
    assert [sample["id"] for sample in open_source(SourceConfig(path="data"))] == list(range(20))
    assert open_source(SourceConfig(path="data", split="train[5:12]")).where(6) == "data/train-00001-of-00002.parquet:2"
    with pytest.raises(DataError, match=r"splits train, test, .* did you mean test\?"):
        open_source(SourceConfig(path="data", split="tset"))
    with pytest.raises(DataError, match=r"train\[:10\]"):
        training_stream([SourceConfig(path="data", split="train[:10]", streaming=True)], 1)


def test_splits_of_save_to_disk_and_a_glob() -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": dataset, "test": dataset.select(range(5))}).save_to_disk("saved")
    assert len(open_source(SourceConfig(path="saved"))) == 25
    assert len(open_source(SourceConfig(path="saved", split="test"))) == 5
    assert [s["id"] for s in open_source(SourceConfig(path="saved", split="test[1:3]"))] == [1, 2]
    with pytest.raises(DataError, match="tset"):
        open_source(SourceConfig(path="saved", split="tset"))
    Path("b.jsonl").write_text(TEXT)
    Path("a.jsonl").write_text(json.dumps(ROWS[7]) + "\n")
    assert [s["id"] for s in open_source(SourceConfig(path="*.jsonl"))] == [7, *range(25)]
    with pytest.raises(DataError, match=r"no\*"):
        open_source(SourceConfig(path="no*.jsonl"))


def test_nulls_that_arrow_adds_are_left_out() -> None:
    rows = [
        {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "tool_calls": [{"a": {"city": "Rome"}}]},
            ]
        },
        {"messages": [{"role": "assistant", "content": "y", "tool_calls": [{"a": {"time": "noon"}}]}], "note": "n"},
    ]
    pq.write_table(pa.Table.from_pylist([{**rows[0], "note": None}, rows[1]]), "calls.parquet")
    assert without_source(open_source(SourceConfig(path="calls.parquet"))) == rows
    assert [row for _, row in stream_rows(SourceConfig(path="calls.parquet")).start_at(0)] == rows


PYTHON = """
ROWS = [{"text": str(number)} for number in range(4)]
def rows():
    return ROWS
def generated():
    yield from ROWS
NUMBER = 3
"""


def test_a_python_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "my_rows.py").write_text(PYTHON)
    monkeypatch.syspath_prepend(folder)
    for name in ("ROWS", "rows"):
        samples = open_source(SourceConfig(path=f"my_rows:{name}"))
        assert [sample["text"] for sample in samples] == list("0123")
        assert samples.where(2) == f"my_rows:{name}:3"
    stream = training_stream([SourceConfig(path="my_rows:generated", streaming=True)], 1, shuffle=False)
    assert [stream.read(position)["text"] for position in (0, 1, 2, 3, 4, 9, 2)] == list("0123012")
    with pytest.raises(DataError, match="streaming"):
        open_source(SourceConfig(path="my_rows:generated"))
    with pytest.raises(DataError, match="int"):
        open_source(SourceConfig(path="my_rows:NUMBER"))
    with pytest.raises(ConfigError, match="rosw"):
        open_source(SourceConfig(path="my_rows:rosw"))


def test_an_iterable_dataset_of_the_datasets_library_resumes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "their_rows.py").write_text(
        "import datasets\n"
        "def rows():\n"
        "    return datasets.Dataset.from_list([{'text': str(i)} for i in range(10)]).to_iterable_dataset(3)\n"
    )
    monkeypatch.syspath_prepend(folder)
    source = SourceConfig(path="their_rows:rows", streaming=True)
    straight = [training_stream([source], 1, shuffle_buffer=4).read(position)["text"] for position in range(3)]
    stream = training_stream([source], 1, shuffle_buffer=4)
    every = [stream.read(position)["text"] for position in range(30)]
    assert every[:3] == straight
    assert sorted(every[:10]) == sorted(every[10:20]) == [str(number) for number in range(10)]
    assert training_stream([source], 1, shuffle_buffer=4).read(27)["text"] == every[27]


# ---- mixtures from a configuration


def write(name: str, count: int) -> None:
    Path(f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name}{number}"}) + "\n" for number in range(count)))


def counts(stream: Any, samples: int) -> Counter[str]:
    return Counter(stream.read(position)["source"] for position in range(samples))


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        (({}, {}), {"a": 10, "b": 4}),
        (({"epochs": 0.5}, {"epochs": 2.0}), {"a": 5, "b": 8}),
        (({"samples": 3}, {}), {"a": 3, "b": 4}),
        (({"weight": 1.0}, {"weight": 3.0}), {"a": 4, "b": 10}),  # 14 samples: 3.5 and 10.5, rounded to even
    ],
)
def test_shares_of_a_mixture(shares: tuple[dict[str, Any], ...], expected: dict[str, int]) -> None:
    write("a", 10)
    write("b", 4)
    sources = [SourceConfig(path=f"{name}.jsonl", name=name, **share) for name, share in zip("ab", shares, strict=True)]
    stream = training_stream(sources, seed=1)
    assert stream.samples_per_epoch == sum(expected.values())
    assert counts(stream, sum(expected.values())) == expected


def test_one_source_keeps_the_order_of_earlier_versions() -> None:
    write("a", 10)
    stream = training_stream([SourceConfig(path="a.jsonl")], seed=7)
    assert [stream.read(position)["text"] for position in range(25)] == [
        f"a{n}" for n in map(EpochSampler(10, 7).index, range(25))
    ]
    half = training_stream([SourceConfig(path="a.jsonl", epochs=0.5)], seed=7)
    assert half.samples_per_epoch == 5
    assert [half.read(position)["text"] for position in range(25)] == [
        stream.read(position)["text"] for position in range(25)
    ]


def test_a_streaming_mixture_has_its_shares_in_each_block() -> None:
    write("a", 10)
    write("b", 30)
    sources = [
        SourceConfig(path="a.jsonl", name="a", weight=1.0, streaming=True),
        SourceConfig(path="b.jsonl", name="b", weight=2.0),
    ]
    stream = training_stream(sources, seed=1, shuffle_buffer=7)
    assert stream.samples_per_epoch is None
    read = [stream.read(position) for position in range(70)]
    assert all(Counter(s["source"] for s in read[k : k + 7]) == {"a": 2, "b": 5} for k in range(0, 70, 7))
    assert Counter(s["text"] for s in read if s["source"] == "a") == {f"a{number}": 2 for number in range(10)}
    assert training_stream(sources, seed=1, shuffle_buffer=7).read(53) == read[53]
    with pytest.raises(DataError, match=r"a: .* 2 of shuffle_buffer"):
        training_stream([sources[0], SourceConfig(path="b.jsonl", name="b", weight=9.0)], 1, shuffle_buffer=2)


def _send_rest(stream: Any, connection: Any) -> None:
    connection.send([stream.read(position)["id"] for position in range(5, 25)])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("path", WRITERS)
def test_a_forked_process_reads_on_while_its_parent_does(path: str, streaming: bool) -> None:
    WRITERS[path](path)
    stream = training_stream([SourceConfig(path=path, streaming=streaming)], 1, shuffle_buffer=5)
    head = [stream.read(position)["id"] for position in range(5)]
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_send_rest, args=(stream, there))
    child.start()
    rest = [stream.read(position)["id"] for position in range(5, 25)]
    assert here.poll(60)
    assert here.recv() == rest
    child.join()
    assert sorted(head + rest) == list(range(25))


def test_evaluation_sets() -> None:
    write("a", 3)
    write("b", 5)
    sets = validation_sets(
        {
            "one": [SourceConfig(path="a.jsonl", name="a")],
            "two": [SourceConfig(path="a.jsonl", name="a"), SourceConfig(path="b.jsonl", name="b", samples=2)],
            "head": [SourceConfig(path="b.jsonl", name="b", streaming=True, samples=4)],
        }
    )
    assert {name: [sample["text"] for sample in actual] for name, actual in sets.items()} == {
        "one": ["a0", "a1", "a2"],
        "two": ["a0", "a1", "a2", "b0", "b1"],
        "head": ["b0", "b1", "b2", "b3"],
    }
    assert [sets["two"].where(position) for position in (2, 4)] == ["a.jsonl:3", "b.jsonl:2"]
    assert [sample["text"] for sample in sets["two"][2:4]] == ["a2", "b0"]


def test_an_evaluation_set_without_its_bad_rows() -> None:
    Path("a.jsonl").write_text('{"text": "a"}\n{"text": 1}\nno json\n{"text": "b"}\n')
    sources = {"one": [SourceConfig(path="a.jsonl")]}
    actual = validation_sets(sources, skip_bad=True)["one"]
    assert [sample["text"] for sample in actual] == ["a", "b"]
    assert actual.where(1) == "a.jsonl:4"
    with pytest.raises(BadSample, match=r"a\.jsonl:2"):
        list(validation_sets(sources)["one"])


def test_a_dataset_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub itself is not reached: what is asked of the `datasets` library, and what is made of its answer."""
    asked = []

    def load(*arguments: Any, **keys: Any) -> Any:
        asked.append((arguments, keys))
        table = datasets.Dataset.from_list(ROWS)
        return table.to_iterable_dataset() if keys["streaming"] else table

    monkeypatch.setattr(datasets, "load_dataset", load)
    samples = open_source(SourceConfig(path="org/name", subset="en", split="test[:25]"))
    assert without_source(samples) == ROWS
    assert samples.where(3) == "org/name[test[:25]]:4"
    stream = training_stream([SourceConfig(path="org/name", streaming=True)], 1, shuffle=False)
    assert without_source(stream.read(position) for position in range(25)) == ROWS
    assert asked == [
        (("org/name", "en"), {"split": "test[:25]", "streaming": False}),
        (("org/name", None), {"split": "train", "streaming": True}),
    ]

    def fail(*arguments: Any, **keys: Any) -> Any:
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match=r"org/name: .*no network"):
        open_source(SourceConfig(path="org/name"))


def test_the_head_of_a_mixture_has_each_source_and_no_bad_row() -> None:
    write("a", 5)
    Path("b.jsonl").write_text('{"text": 1}\n{"text": "b"}\nno json\n')
    sources = [SourceConfig(path="a.jsonl"), SourceConfig(path="b.jsonl")]
    first = first_training_samples(sources, None, 3, skip_bad=True)
    assert [(where, sample["text"]) for where, sample in first] == [
        ("a.jsonl:1", "a0"),
        ("a.jsonl:2", "a1"),
        ("b.jsonl:2", "b"),
    ]
    with pytest.raises(BadSample, match=r"b\.jsonl:1: "):
        first_training_samples(sources, None, 3)
    assert first_training_samples([], None, 3) == []
    assert first_training_samples([], 9, 2) == [("mock:1", {"index": 0}), ("mock:2", {"index": 1})]


def test_samples_of_the_caller_are_not_changed() -> None:
    objects = [object(), object()]
    stream = stream_of(objects, seed=1)
    assert {id(stream.read(position)) for position in range(2)} == {id(sample) for sample in objects}
    assert stream.where(0) in ("wrap.batches:1", "wrap.batches:2")


# ---- damage


BAD_LINES = {
    "not JSON": (b'{"text": 1', "not JSON"),
    "not UTF-8": (b'{"text": "\xff"}', "not UTF-8"),
    "no object": (b"[1]", "list"),
    "no string": (b'{"text": 3}', "int"),
    "empty messages": (b'{"messages": []}', "empty"),
    "a wrong role": (b'{"messages": [{"role": "asistant", "content": "x"}]}', "assistant"),
    "weight": (b'{"text": "x", "weight": NaN}', "nan"),
    "negative weight": (b'{"text": "x", "weight": -1}', "-1"),
    "infinite weight": (b'{"text": "x", "weight": 1e999}', "inf"),
    "nested": (b'{"text": ' + b"[" * 100_000, "JSON"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("path", ["train.jsonl", "train.jsonl.gz"])
def test_a_bad_row_is_named_by_file_and_row_and_the_others_are_read(kind: str, streaming: bool, path: str) -> None:
    line, word = BAD_LINES[kind]
    content = b'{"text": "a"}\n\n' + line + b'\n{"text": "b"}\n'
    Path(path).write_bytes(gzip.compress(content) if path.endswith(".gz") else content)
    source = SourceConfig(path=path, streaming=streaming)
    stream = training_stream([source], seed=1, shuffle=False)
    with pytest.raises(BadSample, match=rf"^{path}:3: .*{word}"):
        stream.read(1)
    assert stream.where(1) == f"{path}:3"
    assert [stream.read(position)["text"] for position in (0, 2, 3)] == ["a", "b", "a"]
    with pytest.raises(BadSample, match=rf"^{path}:3: "):
        list(first_training_samples([source], None, 2))


def test_check_source_parses_every_row() -> None:
    Path("a.jsonl").write_text('{"text": "a"}\n{"messages": []}\n')
    with pytest.raises(BadSample, match=r"a\.jsonl:2: "):
        check_source(SourceConfig(path="a.jsonl"), every_row=True)
    check_source(SourceConfig(path="a.jsonl"), every_row=False)


def test_a_huge_line_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_wrap.data.sources.json_files.MAX_LINE_BYTES", 100)
    Path("a.jsonl").write_text('{"text": "a"}\n' + json.dumps({"text": "x" * 250}) + '\n{"text": "b"}\n')
    for streaming in (False, True):
        stream = training_stream([SourceConfig(path="a.jsonl", streaming=streaming)], 1, shuffle=False)
        with pytest.raises(BadSample, match=r"a\.jsonl:2: .* 100;"):
            stream.read(1)
        assert [stream.read(position)["text"] for position in (0, 2, 3)] == ["a", "b", "a"]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("path", ["train.jsonl.gz", "train.jsonl.zst", "train.json", "train.parquet", "stream.arrow"])
def test_a_truncated_file_is_one_error_with_its_name(path: str, streaming: bool) -> None:
    WRITERS[path](path)
    content = Path(path).read_bytes()
    Path(path).write_bytes(content[: len(content) * 2 // 3])
    with pytest.raises(DataError, match=path) as raised:
        _read_all(SourceConfig(path=path, streaming=streaming))
    assert not isinstance(raised.value, BadSample)


def _read_all(source: SourceConfig) -> None:
    stream = training_stream([source], 1, shuffle=False)
    for position in range(25):
        stream.read(position)


@pytest.mark.parametrize("path", ["train.jsonl.gz", "train.parquet", "stream.arrow"])
def test_a_file_that_is_something_else(path: str) -> None:
    Path(path).write_text(TEXT)
    for streaming in (False, True):
        with pytest.raises(DataError, match=path):
            training_stream([SourceConfig(path=path, streaming=streaming)], 1).read(0)


def test_a_missing_or_empty_source_is_named() -> None:
    WRITERS["train.jsonl.gz"]("train.jsonl.gz")
    for path in ("trian.jsonl.gz", "train.jsonl", "train.parquet", "no/such/train.arrow"):
        for streaming in (False, True):
            with pytest.raises(DataError, match=path):
                training_stream([SourceConfig(path=path, streaming=streaming)], 1).read(0)
    Path("empty.jsonl").write_text("\n")
    for streaming in (False, True):
        with pytest.raises(DataError, match="no samples"):
            training_stream([SourceConfig(path="empty.jsonl", streaming=streaming)], 1).read(0)
    with pytest.raises(DataError, match="no training data"):
        training_stream([], 1)
    Path("folder").mkdir()
    with pytest.raises(DataError, match="folder"):
        open_source(SourceConfig(path="folder"))


def test_a_changed_compressed_file_is_decompressed_again() -> None:
    _gzip("train.jsonl.gz")
    assert len(open_source(SourceConfig(path="train.jsonl.gz"))) == 25
    Path("train.jsonl.gz").write_bytes(gzip.compress(TEXT.encode() + b'{"text": "more"}\n'))
    assert len(open_source(SourceConfig(path="train.jsonl.gz"))) == 26
    shutil.rmtree("cache")


@pytest.mark.parametrize(
    "path", ["bomb.jsonl.gz", pytest.param("bomb.jsonl.zst", marks=pytest.mark.matrix), "bomb.json.gz"]
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_file_that_expands_without_end_is_refused(
    path: str, streaming: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("megatron_wrap.data.sources.json_files._FREE_EXPANSION", 1 << 22)
    content = b"[" + b" " * (1 << 24) if ".json." in path else b'{"text": ""}\n' * (1 << 19)
    Path(path).write_bytes(gzip.compress(content) if path.endswith(".gz") else _zstd(content))
    with pytest.raises(DataError, match=rf"{path}: .*200 times") as raised:
        _read_every_row(SourceConfig(path=path, streaming=streaming))
    assert not isinstance(raised.value, BadSample)
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("form", ["text", "messages", "after rows without a value", "pages"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_parquet_file_that_expands_without_end_is_refused(
    form: str, streaming: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr("megatron_wrap.data.sources.tables.FREE_BYTES", 1 << 24)
    rows, text = 1000, "a" * (1 << 16)
    if form == "messages":
        columns: dict[str, Any] = {"messages": [[], *([[{"role": "user", "content": text}]] * rows)]}
    elif form == "pages":
        columns = {"text": [text] * rows}
    else:
        columns = {"text": [*([None] * (600 if form.startswith("after") else 0)), *([text] * rows)]}
    table = pyarrow.table(columns)
    pyarrow.parquet.write_table(table, "bomb.parquet", compression="zstd", use_dictionary=form != "pages")
    with pytest.raises(DataError, match=r"bomb\.parquet: .*1,000 times") as raised:
        _read_every_row(SourceConfig(path="bomb.parquet", streaming=streaming))
    assert not isinstance(raised.value, BadSample)
    monkeypatch.setattr("megatron_wrap.data.sources.tables.FREE_BYTES", 1 << 28)
    check_decoded_size("bomb.parquet", "bomb.parquet")


def test_one_long_text_beside_many_short_ones_is_no_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr("megatron_wrap.data.sources.tables.FREE_BYTES", 1 << 18)
    monkeypatch.setattr("megatron_wrap.data.sources.tables.MAX_EXPANSION", 2)
    table = pyarrow.table({"text": ["a" * (1 << 16), *["b"] * 1000, *map(str, range(1000))]})
    pyarrow.parquet.write_table(table, "long.parquet")
    check_decoded_size("long.parquet", "long.parquet")


def _read_every_row(source: SourceConfig) -> None:
    if source.streaming:
        list(stream_rows(source).start_at(0))
    else:
        _read_all(source)


def _zstd(content: bytes) -> bytes:
    import pyarrow

    return bytes(pyarrow.Codec("zstd").compress(content, asbytes=True))


@pytest.mark.parametrize("name", ["pipe.jsonl", "pipe.json", "pipe.jsonl.gz", "pipe.parquet", "pipe.arrow"])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_pipe_is_refused(name: str, streaming: bool) -> None:
    os.mkfifo(name)
    with pytest.raises(DataError, match=rf"{name}: is a pipe"):
        _read_all(SourceConfig(path=name, streaming=streaming))

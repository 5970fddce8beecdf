"""Which samples are inspected: evenly spaced over all sources."""

from __future__ import annotations

import json

import pytest

from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.data.inspect.samples import select_from
from megatron_wrap.errors import DataError


@pytest.mark.parametrize(("limit", "rows"), [(0, range(10)), (20, range(10)), (5, range(0, 10, 2)), (3, (0, 3, 6))])
def test_a_limit_reads_samples_evenly_over_all_sources(tmp_path, limit, rows):
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for path, part in zip(paths, (range(4), range(4, 10)), strict=True):
        path.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in part))
    sources = [SourceConfig(path=str(path), name=path.stem) for path in paths]
    selection = select_from(sources, None, limit)
    read = [(int(sample["text"]), source, where()) for where, source, sample in selection.samples]
    assert selection.total == 10
    assert [number for number, _, _ in read] == list(rows)
    for number, source, where in read:
        assert source == ("a" if number < 4 else "b")
        assert where == f"{paths[number >= 4]}:{number % 4 + 1 if number < 4 else number - 3}"


def test_rows_that_cannot_be_read_and_streams(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "1"}\n{broken\n{"text": "3"}\n')
    sources = [SourceConfig(path=str(path), name="a")]
    samples = [read.sample for read in select_from(sources, None, 0).samples]
    assert [type(sample) is dict for sample in samples] == [True, False, True]
    assert isinstance(samples[1], DataError)
    streamed = select_from([SourceConfig(path=str(path), name="a", streaming=True)], None, 1)
    assert streamed.total is None
    assert [read.sample["text"] for read in streamed.samples] == ["1"]


def test_shares_of_an_epoch_follow_weights_and_epochs(tmp_path):
    for name, rows in (("a", 30), ("b", 10)):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "x"}\n' * rows)

    def shares(**keys):
        sources = [SourceConfig(path=str(tmp_path / f"{name}.jsonl"), name=name, **keys.get(name, {})) for name in "ab"]
        return select_from(sources, None, 0, block=8).epoch_shares

    assert shares() == {"a": 0.75, "b": 0.25}
    assert shares(a={"weight": 1.0}, b={"weight": 3.0}) == {"a": 0.25, "b": 0.75}
    assert shares(b={"epochs": 3}) == {"a": 0.5, "b": 0.5}

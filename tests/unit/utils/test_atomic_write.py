"""A file has its old or its new content, whatever happens while it is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_wrap.utils.atomic_write import atomic_file, write_atomically


def test_a_file_is_replaced_when_its_content_is_complete(tmp_path: Path):
    path = tmp_path / "a.json"
    write_atomically(path, "größer")
    assert path.read_text(encoding="utf-8") == "größer"
    with atomic_file(path) as file:
        file.write(b"new")
        assert path.read_text(encoding="utf-8") == "größer"
    assert path.read_bytes() == b"new"

    def fail_halfway() -> None:
        with atomic_file(path) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert path.read_bytes() == b"new"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]

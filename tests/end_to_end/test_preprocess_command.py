"""`megatron-wrap train-tokenizer`, `preprocess` and its `--merge`, one after the other, and what they refuse."""

from __future__ import annotations

import json

import pytest


def test_text_is_tokenized_once_and_merged(command, tmp_path):
    rows = [{"text": f"Row {n} of the text, which is row {n % 7} again."} for n in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    trained = command(
        "megatron_wrap.cli.main", "train-tokenizer", "--input", "rows.jsonl", "--vocab-size", 300, "--output", "tok"
    )
    assert trained.out == "tok: 300 tokens\n", trained.err
    words = ("megatron_wrap.cli.main", "preprocess", "--tokenizer", "tok", "--append-eod", "--workers", 2)
    written = command(*words, "--input", "rows.jsonl", "--output-prefix", "out/a")
    assert written.code == 0, written.err
    assert written.out.splitlines()[0] == "documents        200"
    assert written.out.splitlines()[-1] == f"{tmp_path}/out/a_text_document.bin, .idx"
    merged = command("megatron_wrap.cli.main", "preprocess", "--merge", "out", "--output-prefix", "all")
    assert merged.code == 0, merged.err
    assert (tmp_path / "all.bin").read_bytes() == (tmp_path / "out/a_text_document.bin").read_bytes()


@pytest.mark.matrix
def test_a_missing_file_is_one_line(command, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    for words, name in [
        (("--tokenizer", "tok", "--input", "raws.jsonl"), "did you mean rows.jsonl?"),
        (("--merge", "no"), "no.bin"),
    ]:
        refused = command("megatron_wrap.cli.main", "preprocess", *words, "--output-prefix", "b")
        assert refused.code == 2
        assert len(refused.err.splitlines()) == 1
        assert refused.err.startswith("error: ")
        assert name in refused.err

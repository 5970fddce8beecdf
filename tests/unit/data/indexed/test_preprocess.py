"""Documents to `.bin` and `.idx`: the tokenizer's tokens from each form of input, the same bytes for any number of
workers and after a stop; and the tokenizer that is trained on them. Megatron-Core reads the files in
tests/unit/data/indexed/test_index_files.py."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from _forked import run_forked

from megatron_wrap.data.chat.tokenizer import load_tokenizer
from megatron_wrap.data.indexed.documents import InputFiles
from megatron_wrap.data.indexed.index_files import read_part
from megatron_wrap.data.indexed.preprocess import Preprocessing, preprocess
from megatron_wrap.data.indexed.preprocess_record import check_vocabulary
from megatron_wrap.data.indexed.tokenizer_training import train_tokenizer
from megatron_wrap.errors import ConfigError, DataError

pytestmark = pytest.mark.transformers
ROOT = Path(__file__).parents[4]
TEXTS = [f"def f{n}(x):\n    return x ** {n} + {n * 7919}  # größer\n" * (1 + n % 5) for n in range(40)]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """A folder with `tok`, a tokenizer, and `code.jsonl`, the texts."""
    folder = tmp_path_factory.mktemp("made")
    lines(folder / "code.jsonl", TEXTS)
    inputs = InputFiles([str(folder / "code.jsonl")], ["text"])
    assert train_tokenizer(inputs, ["text"], folder / "tok", vocab_size=300) == 300
    return folder


def lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n\n" for text in texts))
    return path


def run(made: Path, path: object, output: Path, **options: object) -> Preprocessing:
    settings = Preprocessing(input=[str(path)], tokenizer=str(made / "tok"), output_prefix=str(output), **options)
    written = preprocess(settings)
    assert written.complete
    return settings


def stored(prefix: str) -> list[list[int]]:
    """Tokens of each document."""
    part = read_part(prefix)
    tokens = np.fromfile(part.tokens, part.dtype)
    ends = np.concatenate(([0], np.cumsum(part.lengths)))[part.ends]
    return [document.tolist() for document in np.split(tokens, ends[:-1])]


def expected(made: Path, texts: list[str]) -> list[list[int]]:
    """What transformers returns, with the end of a document."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "tok")
    return [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in texts]


def written_as(form: str, folder: Path) -> tuple[Path, dict[str, object]]:
    """The texts in one form, and the options that it needs."""
    path = folder / f"input.{form}"
    if form == "jsonl.gz":
        path.write_bytes(gzip.compress(lines(folder / "plain", TEXTS).read_bytes()))
    elif form == "jsonl.zst":
        import pyarrow

        with pyarrow.output_stream(str(path), compression="zstd") as file:
            file.write(lines(folder / "plain", TEXTS).read_bytes())
    elif form == "json":
        path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    elif form == "parquet":
        import pyarrow.parquet

        table = pyarrow.table({"n": list(range(40)), "content": TEXTS})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
        return path, {"json_keys": ["content"]}
    elif form == "txt":
        path.write_text("\n".join(TEXTS) + "\n")
        return path, {"text_unit": "paragraph"}
    else:
        (path / "below").mkdir(parents=True)
        for index, text in enumerate(TEXTS):
            (path / ("below" if index % 2 else "") / f"{index:02}.py").write_text(text)
        (path / "notes.md").write_text("not code")
        return path, {"suffixes": [".py"]}
    return path, {}


@pytest.mark.parametrize("form", ["jsonl.gz", "jsonl.zst", "json", "parquet", "txt", "folder"])
def test_each_form_gives_the_tokens_of_the_tokenizer(form, made, tmp_path):
    path, options = written_as(form, tmp_path)
    settings = run(made, path, tmp_path / "out", append_eod=True, **options)
    texts = TEXTS
    if form == "txt":
        texts = [text.rstrip("\n") for text in TEXTS]
    elif form == "folder":
        texts = [*TEXTS[::2], *TEXTS[1::2]]
        assert [os.path.basename(name) for name in InputFiles([str(path)], []).paths][-1] == "notes.md"
    (key,) = settings.json_keys
    actual, wanted = stored(settings.prefix(key)), expected(made, texts)
    assert sorted(actual) == sorted(wanted) if form == "folder" else actual == wanted


def test_any_number_of_workers_gives_the_same_bytes(made, tmp_path):
    """Several batches; and partitions give the documents in the order of Megatron-LM's."""
    path = lines(tmp_path / "many.jsonl", TEXTS * 40)
    files = {}
    for workers in (1, 2, 3):
        prefix = run(made, path, tmp_path / str(workers), append_eod=True, workers=workers).prefix("text")
        files[workers] = [Path(prefix + end).read_bytes() for end in (".bin", ".idx")]
    assert files[1] == files[2] == files[3]
    in_order = stored(run(made, path, tmp_path / "kept", partitions=3, keep_sequential_samples=True).prefix("text"))
    dealt = stored(run(made, path, tmp_path / "dealt", partitions=3, workers=2).prefix("text"))
    assert dealt == [*in_order[::3], *in_order[1::3], *in_order[2::3]]
    assert len(stored(run(made, path, tmp_path / "few", max_documents=700).prefix("text"))) == 700
    assert sorted(entry.suffix for entry in tmp_path.glob("dealt*")) == [".bin", ".idx", ".json"]


PROGRAM = """
import os, signal, sys, time
from megatron_wrap.data.indexed.preprocess import Preprocessing, preprocess
path, tokenizer, output, *signals = sys.argv[1:]
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
options = {"append_eod": True, "workers": 2, "partitions": 2}
settings = Preprocessing(input=[path], tokenizer=tokenizer, output_prefix=output, **options)

def stop(progress):
    if signals and progress.rows and os.path.exists(output + ".preprocess.json"):
        os.kill(os.getpid(), int(signals[0]))
        time.sleep(60)

preprocess(settings, stop, record_seconds=0.0)
"""


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.matrix)])
def test_a_killed_run_continues_and_ends_with_the_same_bytes(made, tmp_path, signal_number):
    path, output = lines(tmp_path / "many.jsonl", TEXTS * 100), tmp_path / "stopped"
    whole = run(made, path, tmp_path / "whole", append_eod=True, partitions=2).prefix("text")
    record = tmp_path / "stopped.preprocess.json"
    ended = run_forked(PROGRAM, path, made / "tok", output, int(signal_number))
    assert ended.returncode != 0
    before = json.loads(record.read_text())["progress"]
    assert 0 < before["rows"] < 4000
    assert not (tmp_path / "stopped_text_document.bin").exists()
    settings = run(made, path, output, append_eod=True, partitions=2)
    for end in (".bin", ".idx"):
        assert Path(settings.prefix("text") + end).read_bytes() == Path(whole + end).read_bytes()


def test_sentences_are_sequences_of_one_document(made, tmp_path):
    path = tmp_path / "sentences.jsonl"
    path.write_text(json.dumps({"text": ["one. ", "", "two."], "note": "n"}) + "\n")
    settings = run(made, path, tmp_path / "out", append_eod=True, json_keys=["text", "note"])
    part = read_part(settings.prefix("text"))
    first, second, note = expected(made, ["one. ", "two.", "n"])
    assert part.lengths.tolist() == [len(first) - 1, len(second)]
    assert stored(settings.prefix("text")) == [[*first[:-1], *second]]
    assert stored(settings.prefix("note")) == [note]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ('{"text": "open', [":3:", "not JSON"]),
        ('{"texts": "a"}', [":3:", "did you mean texts?", "--json-keys"]),
        ('{"text": 5}', [":3:", "'text' is of type int"]),
        ('{"text": ""}', [":3:", "empty document", "--on-bad-document skip"]),
        ('{"text": "\\ud800"}', [":3:", "lone surrogate '\\ud800'"]),
    ],
)
def test_a_bad_row_ends_the_run_or_is_left_out(made, tmp_path, row, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"text": "a"}}\n\n{row}\n{{"text": "b"}}\n')
    with pytest.raises(DataError) as raised:
        run(made, path, tmp_path / "out")
    for word in (str(path), *words):
        assert word in str(raised.value)
    assert not list(tmp_path.glob("out*"))
    settings = run(made, path, tmp_path / "out", on_bad_document="skip")
    assert len(stored(settings.prefix("text"))) == 2


def test_wrong_inputs_and_outputs_are_refused(made, tmp_path):
    def refused(message: str, path: object = made / "code.jsonl", **options: object) -> None:
        with pytest.raises(DataError, match=message):
            run(made, path, tmp_path / "out", **options)

    refused(r"no such input; did you mean .*code.jsonl", made / "kode.jsonl")
    (tmp_path / "truncated.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 99)[:-20])
    refused("truncated or damaged gzip", tmp_path / "truncated.jsonl.gz")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    refused("latin.txt: not UTF-8", tmp_path / "latin.txt")
    (tmp_path / "empty.jsonl").write_text("\n")
    refused("0 rows and no document", tmp_path / "empty.jsonl")
    refused("latin.txt: has no keys", tmp_path / "latin.txt", json_keys=["text", "note"])
    (tmp_path / "array.json").write_text('[{"text": 5}, 7]')
    refused("array.json:1: 'text' is of type int", tmp_path / "array.json")
    (tmp_path / "array.json").write_text('[7, {"text": "a"}]')
    refused("array.json:1: of type int", tmp_path / "array.json")
    refused("contains no file with the ending .c", made, suffixes=[".c"])
    with pytest.raises(ConfigError, match="vocab_size 99 is below"):
        train_tokenizer(InputFiles([str(made / "code.jsonl")], ["text"]), ["text"], tmp_path / "t", vocab_size=99)
    run(made, made / "code.jsonl", tmp_path / "out")
    run(made, made / "code.jsonl", tmp_path / "out")  # complete: nothing to do
    refused("with another append_eod", append_eod=True)
    (tmp_path / "out.preprocess.json").unlink()
    refused("out_text_document.bin: exists already")


def test_a_tokenizer_without_an_end_is_refused(made, tmp_path):
    config = json.loads((made / "tok/tokenizer_config.json").read_text())
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok/tokenizer.json").write_bytes((made / "tok/tokenizer.json").read_bytes())
    del config["eos_token"]
    (tmp_path / "tok/tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match="has no eos_token"):
        run(tmp_path, made / "code.jsonl", tmp_path / "out", append_eod=True)
    run(tmp_path, made / "code.jsonl", tmp_path / "out")


def test_tokens_of_another_vocabulary_are_refused(made, tmp_path):
    inputs = InputFiles([str(made / "code.jsonl")], ["text"])
    train_tokenizer(inputs, ["text"], tmp_path / "smaller", vocab_size=299)
    path = tmp_path / "notes.jsonl"
    path.write_text('{"my_note": "def f(x):"}\n')
    prefix = run(made, path, tmp_path / "my_out", json_keys=["my_note"]).prefix("my_note")
    check_vocabulary([prefix], load_tokenizer(made / "tok"))
    named = r"my_out_my_note_document: was tokenized with .*tok, .* tokenizer .*smaller; set"
    with pytest.raises(DataError, match=named):
        check_vocabulary([prefix], load_tokenizer(tmp_path / "smaller"))
    (tmp_path / "my_out.preprocess.json").unlink()
    check_vocabulary([prefix], load_tokenizer(tmp_path / "smaller"))  # nothing is known


def test_the_same_documents_train_the_same_tokenizer(made, tmp_path):
    from transformers import AutoTokenizer

    inputs = InputFiles([str(made / "code.jsonl")], ["text"])
    train_tokenizer(inputs, ["text"], tmp_path / "again", vocab_size=300)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (made / "tok" / name).read_bytes()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "again")
    text = "any bytes: \x00 größer 語\n\t"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == ("<|endoftext|>", 0, 300)


MEASURED = """
import pathlib, re, resource
print(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


@pytest.mark.matrix
def test_memory_does_not_grow_with_the_input(made, tmp_path):
    """Peak memory of the process that writes and of its workers, in KiB, for 1 and for 6 MB of text.

    The writer's is VmHWM: its ru_maxrss also counts the memory of the process that started it, which is pytest's.
    """
    peaks = []
    for repeats in (150, 900):
        path = lines(tmp_path / f"{repeats}.jsonl", TEXTS * repeats)
        program = PROGRAM + MEASURED
        words = [sys.executable, "-c", program, path, made / "tok", tmp_path / str(repeats)]
        done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=True)
        peaks.append([int(line) for line in done.stdout.split()])
    for small, large in zip(*peaks, strict=True):
        assert large < 1.15 * small
        assert large < 1 << 20

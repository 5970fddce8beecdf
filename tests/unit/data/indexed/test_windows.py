"""Indexed data: the windows of Megatron-Core's own API, the cache, splits, documents, and wrong files."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import re
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
from _indexed_files import EOD, VOCAB, random_documents, write_documents

from megatron_wrap.config.checks.run import check_values
from megatron_wrap.config.decode import load_run_config
from megatron_wrap.data.indexed import index_files
from megatron_wrap.data.indexed.index_files import HEADER, read_index, read_part
from megatron_wrap.data.indexed.windows import check_first_tokens, check_indices, open_indexed
from megatron_wrap.errors import ConfigError, DataError
from megatron_wrap.platform import choose_platform
from megatron_wrap.utils.dist_logger import logger

ROOT = Path(__file__).parents[4]
DATA, TRAIN = "megatron_wrap.data", "megatron_lm.train.common"
LENGTH = 16


@pytest.fixture(scope="module", autouse=True)
def _for_the_cpu():
    platform = choose_platform("cpu")
    platform.install()
    yield
    platform.uninstall()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("indexed")
    for name, count, seed in (("a", 300, 1), ("b", 100, 2), ("held-out", 40, 3)):
        write_documents(folder / name, random_documents(count, seed))
    return folder


def run(*overrides: str, iterations: int = 400):
    """A configuration of 4 samples for each of `iterations` steps."""
    config = load_run_config(
        ROOT / "configs" / "tiny-gpt-pretrain.yaml",
        [
            f"{TRAIN}.global_batch_size=4",
            f"{TRAIN}.seq_length={LENGTH}",
            f"{TRAIN}.train_iters={iterations}",
            f"{TRAIN}.sample_prompts=null",
            f"{TRAIN}.eval_interval=null",
            f"megatron_lm.model.arch.vocab_size={VOCAB}",
            f"{DATA}.tokenizer=null",
            f"{DATA}.eod_token={EOD}",
            *overrides,
        ],
    )
    check_values(config)
    return config


def blend(folder: Path) -> str:
    return f"{DATA}.train=[{{path: {folder}/a, weight: 0.7}}, {{path: {folder}/b, weight: 0.3}}]"


def theirs(folder: Path, sizes: list[int | None], **settings):
    """Megatron-Core's data sets of training, validation and test, straight from its API."""
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        vocab_size, eod, unique_identifiers = VOCAB, EOD, {"name": "theirs"}

    flags = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    config = GPTDatasetConfig(
        **{"random_seed": 1234, "sequence_length": LENGTH, "tokenizer": Tokenizer(), **flags, **settings}
    )
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def assert_same(ours, expected, count: int) -> None:
    for position in range(count):
        sample = ours(position)
        for name, value in expected[position].items():
            if name not in ("attention_mask", "dataset_id"):
                numpy.testing.assert_array_equal(sample[name], value.numpy(), err_msg=f"{name} of window {position}")


@pytest.mark.parametrize(
    ("source", "keys"),
    [
        ("one", ()),
        ("blend", ("eod_mask_loss", "reset_position_ids")),
        pytest.param("blend", (), marks=pytest.mark.matrix),
    ],
)
def test_the_first_thousand_samples_are_those_of_megatron_core(folder, tmp_path, source, keys):
    train = blend(folder) if source == "blend" else f"{DATA}.train={folder}/a"
    overrides = [train, f"{DATA}.split=90,8,2", f"{DATA}.cache_dir={tmp_path}", *(f"{DATA}.{key}=true" for key in keys)]
    prefixes = ([f"{folder}/a", f"{folder}/b"], [0.7, 0.3]) if source == "blend" else ([f"{folder}/a"], None)
    sizes = [1600, 16, 16] if source == "blend" else [1600, None, None]
    expected = theirs(folder, sizes, blend=prefixes, split="90,8,2", **dict.fromkeys(keys, True))
    data = open_indexed(run(*overrides), VOCAB, None)
    assert_same(data.training.read, expected[0], 1000)
    assert_same(data.evaluation["validation"].__getitem__, expected[1], 16)
    again = open_indexed(run(*overrides), VOCAB, None)  # from the cache
    assert_same(again.training.read, expected[0], 50)
    if source == "blend":
        numbers = [data.training.read(position)["source_id"] for position in range(1000)]
        assert numpy.mean(numbers) == pytest.approx(0.3, abs=0.002)
        assert {data.training.read(position)["source"] for position in range(5)} == {"a", "b"}


def test_a_prefix_for_each_split(folder, tmp_path):
    overrides = (
        f"{DATA}.train={folder}/a",
        f"{DATA}.split=null",
        f"{DATA}.validation={{one: {folder}/held-out, two: [{folder}/held-out, {folder}/b]}}",
        f"{DATA}.cache_dir={tmp_path}",
    )
    data = open_indexed(run(*overrides), VOCAB, None)
    per_split = [([f"{folder}/a"], None), ([f"{folder}/held-out"], None), None]
    expected = theirs(folder, [1600, None, 0], blend_per_split=per_split)
    assert_same(data.training.read, expected[0], 100)
    whole = data.evaluation["one"]
    assert len(whole) == len(expected[1]) == (read_index(f"{folder}/held-out").tokens - 1) // LENGTH
    assert_same(whole.__getitem__, expected[1], len(whole))
    both = data.evaluation["two"]
    assert len(both) == len(whole) + (read_index(f"{folder}/b").tokens - 1) // LENGTH
    assert {both[index]["source"] for index in range(len(both))} == {"held-out", "b"}


def test_documents_end_with_their_last_token(folder, tmp_path):
    overrides = (f"{DATA}.reset_attention_mask=true", "megatron_wrap.flow.packing=true")
    data = open_indexed(run(f"{DATA}.train={folder}/a", f"{DATA}.cache_dir={tmp_path}", *overrides), VOCAB, None)
    for position in range(40):
        sample = data.training.read(position)
        assert sum(sample["documents"]) == LENGTH
        ends = numpy.cumsum(sample["documents"]) - 1
        assert (sample["tokens"][ends[:-1]] == EOD).all()
        inside = numpy.delete(sample["tokens"], ends)
        assert not (inside == EOD).any()


def test_the_index_is_built_once_and_again_for_other_files(folder, tmp_path, monkeypatch):
    from megatron_wrap.data.indexed import megatron_datasets

    written: list[Path] = []
    real = megatron_datasets.write_cache

    def counted(made, cache):
        written.append(cache)
        real(made, cache)

    monkeypatch.setattr(megatron_datasets, "write_cache", counted)
    prefix = write_documents(tmp_path / "own", random_documents(50, 4))

    def first_tokens():
        data = open_indexed(run(f"{DATA}.train={prefix}", f"{DATA}.split=100,0,0"), VOCAB, None)
        return numpy.stack([data.training.read(index)["tokens"] for index in range(20)])

    numpy.testing.assert_array_equal(first_tokens(), first_tokens())
    assert [path.parent for path in written] == [tmp_path / "cache"]
    write_documents(tmp_path / "own", random_documents(60, 5))  # the same name with other tokens
    actual = first_tokens()
    assert len(written) == 2
    for document_index in (tmp_path / "cache").glob("*/*document_index.npy"):  # a damaged cache
        document_index.unlink()
    numpy.testing.assert_array_equal(first_tokens(), actual)
    assert len(written) == 3


class Attack:
    """Creates a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


def test_an_index_that_runs_code_is_built_again_and_no_link_is_written_through(folder, tmp_path, monkeypatch):
    warnings: list[str] = []
    monkeypatch.setattr(logger, "warning_all_ranks", warnings.append)
    prefixes = [write_documents(tmp_path / name, random_documents(50, seed)) for seed, name in enumerate("ab")]
    marker, untouched = tmp_path / "marker", tmp_path / "untouched"
    untouched.write_text("mine")

    def first_tokens():
        data = open_indexed(run(f"{DATA}.train=[{','.join(map(str, prefixes))}]", f"{DATA}.split=100,0,0"), VOCAB, None)
        return numpy.stack([data.training.read(index)["tokens"] for index in range(20)])

    expected = first_tokens()
    (cache,) = {path.parent for path in (tmp_path / "cache").glob("*/complete.json")}
    indices = sorted(path.name for path in cache.glob("*.npy"))
    kinds = ("document_index", "sample_index", "shuffle_index", "dataset_index", "dataset_sample_index")
    for kind, of_objects in itertools.product(kinds, (False, True)):
        name = next(name for name in indices if name.endswith(f"-{kind}.npy"))
        attack = numpy.array([Attack(marker)], dtype=object)
        if of_objects:
            numpy.save(cache / name, attack, allow_pickle=True)
        else:
            (cache / name).write_bytes(pickle.dumps(Attack(marker)))
        numpy.testing.assert_array_equal(first_tokens(), expected)
    assert len(warnings) == 2 * len(kinds)
    zeros = numpy.zeros_like(numpy.load(cache / name))
    numpy.save(cache / name, zeros)  # of the same size and type
    numpy.testing.assert_array_equal(first_tokens(), expected)
    assert f"{name} has changed" in warnings[-1]
    (cache / indices[0]).write_bytes(b"")
    numpy.testing.assert_array_equal(first_tokens(), expected)
    (cache / "complete.json").unlink()
    (cache / indices[0]).unlink()
    (cache / indices[0]).symlink_to(untouched)
    numpy.testing.assert_array_equal(first_tokens(), expected)
    assert untouched.read_text() == "mine"
    (cache / "complete.json").write_text("[]")  # of an earlier version, without checksums
    numpy.testing.assert_array_equal(first_tokens(), expected)
    (cache / "complete.json").write_text("{}")
    (cache / indices[0]).write_bytes(pickle.dumps(Attack(marker)))
    with pytest.raises(DataError, match=re.escape(indices[0])):
        first_tokens()
    assert not marker.exists()


def test_mock_data(tmp_path):
    config = run(f"{DATA}.train=null", f"{DATA}.split=null", f"{DATA}.mock_data=true", f"{TRAIN}.seq_length=1024")
    data = open_indexed(config, VOCAB, None)
    assert data.training.read(3)["tokens"].shape == (1024,)
    assert len(data.evaluation["validation"]) >= 16


def test_without_the_compiled_extension_the_indices_are_equal(folder, tmp_path, monkeypatch):
    from megatron.core.datasets import helpers

    expected = theirs(folder, [1600, 100, 16], blend=([f"{folder}/a", f"{folder}/b"], [0.7, 0.3]), split="90,8,2")
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)  # as if it were not compiled
    monkeypatch.delitem(sys.modules, "megatron.core.datasets.helpers")
    monkeypatch.delattr(sys.modules["megatron.core.datasets"], "helpers")
    overrides = (blend(folder), f"{DATA}.split=90,8,2", f"{DATA}.cache_dir={tmp_path}")
    data = open_indexed(run(*overrides), VOCAB, None)
    assert_same(data.training.read, expected[0], 1600)
    monkeypatch.undo()
    assert helpers.build_sample_idx is not None


def test_numpy_instead_of_the_extension():
    from megatron.core.datasets import helpers_cpp

    from megatron_wrap.platform.megatron_core import dataset_helpers

    generator = numpy.random.default_rng(0)
    for length in (2, 7, 40):
        for extra in (1, 0):
            sizes = generator.integers(0, 30, 50).astype(numpy.int32)
            sizes[-1] = 5
            documents = numpy.tile(numpy.arange(50, dtype=numpy.int32), 3)
            arguments = (sizes, documents, length, 3, int(sizes.sum()), True, extra)
            expected = helpers_cpp.build_sample_idx_int32(*arguments)
            numpy.testing.assert_array_equal(dataset_helpers.sample_index(*arguments), expected)
    for ours, name, sizes in (
        (dataset_helpers.blending_indices, "build_blending_indices", [0.2, 0.5, 0.3]),
        (dataset_helpers.exhaustive_blending_indices, "build_exhaustive_blending_indices", [70, 11, 319]),
    ):
        pairs = [(numpy.zeros(400, numpy.int16), numpy.zeros(400, numpy.int64)) for _ in range(2)]
        further = (400, False) if sizes[0] < 1 else ()
        ours(*pairs[0], sizes, 3, *further)
        getattr(helpers_cpp, name)(*pairs[1], sizes, 3, *further)
        numpy.testing.assert_array_equal(pairs[0], pairs[1])


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


WRONG_FILES = {
    "truncated bin": (lambda tokens, index: cut(tokens, 10), "{0}", ["{0}.bin: {2} bytes", "{1} in all", "truncated"]),
    "truncated idx": (lambda tokens, index: cut(index, 4), "{0}", ["{0}.idx", "truncated"]),
    "another dtype": (
        lambda tokens, index: index.write_bytes(index.read_bytes()[:17] + bytes([4]) + index.read_bytes()[18:]),
        "{0}",
        ["{0}.bin: 2 bytes", "int32 of 4"],
    ),
    "no index": (
        lambda tokens, index: index.write_bytes(b"PK\x03\x04" + bytes(40)),
        "{0}",
        ["{0}.idx: not an index"],
    ),
    "missing": (lambda *_: None, "{0}g", ["wrongg.bin", "did you mean {0}.bin"]),
    "ending": (lambda *_: None, "{0}.bin", ["give the prefix {0}, without .bin"]),
    "empty documents": (
        lambda tokens, index: write_documents(tokens.with_suffix(""), [[] for _ in range(20)]),
        "{0}",
        ["all 20 documents are empty"],
    ),
}


@pytest.mark.parametrize("case", WRONG_FILES)
def test_a_wrong_file_is_one_error(tmp_path, case):
    prefix = write_documents(tmp_path / "wrong", random_documents(20, 6))
    tokens, index = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    size = tokens.stat().st_size
    spoil, path, words = WRONG_FILES[case]
    spoil(tokens, index)
    with pytest.raises(DataError) as error:
        check_indices(run(f"{DATA}.train={path.format(prefix)}"))
    for word in words:
        assert word.format(prefix, size, size - 10) in str(error.value)


def columns_of(prefix: str) -> list[numpy.ndarray]:
    """Lengths, offsets and document ends."""
    content = Path(f"{prefix}.idx").read_bytes()
    *_, sequences, ends = HEADER.unpack(content[: HEADER.size])
    columns, offset = [], HEADER.size
    for dtype, count in (("<i4", sequences), ("<i8", sequences), ("<i8", ends)):
        columns.append(numpy.frombuffer(content, dtype, count, offset).copy())
        offset += columns[-1].nbytes
    return columns


def swapped(column: numpy.ndarray, first: int) -> numpy.ndarray:
    column[[first, first + 1]] = column[[first + 1, first]]
    return column


WRONG_CONTENT = {
    "all offsets 0": (lambda lengths, offsets, ends: (lengths, offsets * 0, ends), "sequence 2 begins at byte 0 of"),
    "offsets beyond": (
        lambda lengths, offsets, ends: (lengths, offsets + 2**40, ends),
        "sequence 1 begins at byte 109",
    ),
    "negative offsets": (
        lambda lengths, offsets, ends: (lengths, offsets * 0 - 8, ends),
        "sequence 1 begins at byte -8",
    ),
    "two offsets": (lambda lengths, offsets, ends: (lengths, swapped(offsets, 250), ends), "sequence 251 begins"),
    "last offset": (
        lambda lengths, offsets, ends: (lengths, offsets + 2 * (numpy.arange(300) == 299), ends),
        "sequence 300 begins",
    ),
    "reversed lengths": (lambda lengths, offsets, ends: (lengths[::-1], offsets, ends), "begins at byte"),
    "two lengths": (lambda lengths, offsets, ends: (swapped(lengths, 149), offsets, ends), "sequence 151 begins"),
    "ends beyond": (lambda lengths, offsets, ends: (lengths, offsets, ends + 2**40), "not from 0 to 300"),
    "ends 0": (lambda lengths, offsets, ends: (lengths, offsets, ends * 0), "are from 0 to 0, not from 0 to 300"),
    "two ends": (
        lambda lengths, offsets, ends: (lengths, offsets, swapped(ends, 99)),
        "document 100 ends at sequence 99",
    ),
    "no ends": (lambda lengths, offsets, ends: (lengths, offsets, ends[:0]), "ends are missing"),
}


@pytest.mark.parametrize("case", WRONG_CONTENT)
def test_an_index_whose_columns_contradict_each_other_is_refused(tmp_path, monkeypatch, case):
    monkeypatch.setattr(index_files, "_CHUNK", 50)
    prefix = write_documents(tmp_path / "wrong", random_documents(300, 6))
    change, words = WRONG_CONTENT[case]
    content, config = Path(f"{prefix}.idx").read_bytes(), run(f"{DATA}.train={prefix}")
    check_indices(config)
    columns = change(*columns_of(prefix))
    header = HEADER.pack(*HEADER.unpack(content[: HEADER.size])[:-1], len(columns[2]))
    Path(f"{prefix}.idx").write_bytes(header + b"".join(column.tobytes() for column in columns))
    for refuse in (lambda: check_indices(config), lambda: open_indexed(config, VOCAB, None), lambda: read_part(prefix)):
        with pytest.raises(DataError, match=words):
            refuse()


def test_modes_of_sequences_must_be_those_of_text(tmp_path):
    """Multimodal data has a mode for each sequence after the document ends."""
    prefix = write_documents(tmp_path / "modes", random_documents(20, 6))
    content, config = Path(f"{prefix}.idx").read_bytes(), run(f"{DATA}.train={prefix}", f"{DATA}.split=100,0,0")
    Path(f"{prefix}.idx").write_bytes(content + bytes(20))
    check_indices(config)
    Path(f"{prefix}.idx").write_bytes(content + bytes(11) + b"\x01" + bytes(8))
    with pytest.raises(DataError, match="sequence 12 has the mode 1, so its tokens are not text"):
        check_indices(config)
    Path(f"{prefix}.idx").write_bytes(content + bytes(12))
    with pytest.raises(DataError, match=r"20 documents need .*: it is damaged"):
        check_indices(config)


def test_a_split_without_a_token_is_refused(tmp_path):
    prefix = write_documents(tmp_path / "short", [[5] * 40 for _ in range(10)] + [[]])
    for split, words in (
        ("99,0,1", ["short: the test part of", "no document of the 11", "write 0 for it"]),
        ("949,50,1", ["short: the validation part of", "1 empty document,"]),
        ("90,0,9", ["the test part", "1 empty document,", "of the 11"]),
    ):
        with pytest.raises(DataError) as error:
            open_indexed(
                run(f"{DATA}.train={prefix}", f"{DATA}.split={split}", f"{TRAIN}.eval_interval=null"), VOCAB, None
            )
        for word in words:
            assert word in str(error.value)
    with pytest.raises(DataError, match="40 tokens, less than a window of seq_length \\+ 1 = 65"):
        check_indices(run(f"{DATA}.train={prefix}", f"{DATA}.split=80,20", f"{TRAIN}.seq_length=64"))


def test_tokens_of_another_vocabulary_are_refused(folder, tmp_path):
    data = open_indexed(run(f"{DATA}.train={folder}/a", f"{DATA}.cache_dir={tmp_path}"), 40, None)
    with pytest.raises(DataError, match=r"/a\.bin window 1: the window has the token id .* ids 0 to 39;"):
        data.training.read(0)
    with pytest.raises(DataError, match=r"/a\.bin has the token id .* ids 0 to 39;"):
        check_first_tokens(run(f"{DATA}.train={folder}/a"), 40)
    check_first_tokens(run(f"{DATA}.train={folder}/a"), VOCAB)


def test_files_of_another_tokenizer_are_refused_before_the_first_window(folder, tmp_path):
    for end in (".bin", ".idx"):
        shutil.copy(f"{folder}/a{end}", f"{tmp_path}/x_text_document{end}")
    record = {"settings": {"json_keys": ["text"]}, "vocabulary": {"tokenizer": "first", "sha256": "other"}}
    (tmp_path / "x.preprocess.json").write_text(json.dumps(record))
    tokenizer = SimpleNamespace(get_vocab=lambda: {"a": 0}, eos_token_id=0, name_or_path="second")
    config = run(f"{DATA}.train={tmp_path}/x_text_document", f"{DATA}.cache_dir={tmp_path}")
    with pytest.raises(DataError, match=r"x_text_document: was tokenized with first, .* tokenizer second; set"):
        open_indexed(config, VOCAB, tokenizer)


@pytest.mark.parametrize(
    ("token", "error", "words"),
    [
        ("null", ConfigError, r"data\.eod_mask_loss: true needs the token that ends a document"),
        ("1", DataError, r"/a: none of its first documents ends with token 1.*--append-eod"),
    ],
)
def test_documents_are_separated_by_their_last_token(folder, token, error, words):
    overrides = (f"{DATA}.train={folder}/a", f"{DATA}.eod_token={token}", f"{DATA}.eod_mask_loss=true")
    with pytest.raises(error, match=words):
        open_indexed(run(*overrides), VOCAB, None)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train=[{path: a, weight: 0.5}, {path: b, weight: 0.6}]"], ["sum to 1.1", "1 or 100", "a 45.4545, b"]),
        (["train=[{path: a, weight: 1}, b]"], ["b has no weight"]),
        (["train=[{path: a, columns: {x: y}}]"], ["a has columns", "path, name, weight"]),
        (["train=null"], ["data.train", "mock_data: true"]),
        (["split=0,1,1"], ["not '0,1,1'"]),
        (["validation=b"], ["95,5,0", "data.validation"]),
        (["reset_attention_mask=true"], ["flow.packing true"]),
        (["shuffle=false"], ["shuffled"]),
        (["data_key=dataset"], ["split", "needs data_key indexed"]),
    ],
)
def test_contradictions(overrides, words):
    with pytest.raises(ConfigError) as error:
        run(f"{DATA}.train=a", *(f"{DATA}.{override}" for override in overrides))
    for word in words:
        assert word in str(error.value)


def test_no_line_of_megatron_core_reaches_the_user(folder, tmp_path, log_records):
    open_indexed(run(f"{DATA}.train={folder}/a", f"{DATA}.cache_dir={tmp_path}"), VOCAB, None)
    assert [record for record in log_records if record.name.startswith("megatron")] == []


def test_one_of_several_processes_builds_the_index(folder, tmp_path, monkeypatch):
    import multiprocessing

    from megatron_wrap.data.indexed import megatron_datasets

    real, log = megatron_datasets.write_cache, tmp_path / "log"

    def slow(made, cache):
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(0.3)
        real(made, cache)

    monkeypatch.setattr(megatron_datasets, "write_cache", slow)
    config = run(f"{DATA}.train={folder}/a", f"{DATA}.cache_dir={tmp_path}/cache")
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def body():
        queue.put(open_indexed(config, VOCAB, None).training.read(7)["tokens"].tolist())

    processes = [context.Process(target=body) for _ in range(3)]
    for process in processes:
        process.start()
    actual = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    assert actual[0] == actual[1] == actual[2]
    assert log.read_text() == "built\n"

"""Counts and mistakes of samples, with a tokenizer whose tokens are single characters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from megatron_wrap.config.schema.data import SourceConfig
from megatron_wrap.data.chat.encode import ChatTokens
from megatron_wrap.data.inspect.inspection import (
    Inspection,
    ReadSample,
    histogram,
    inspect,
    ordered,
    segments,
    select_from,
    tokens_of,
)
from megatron_wrap.data.inspect.mistakes import MISTAKES, Checks, Tokens
from megatron_wrap.errors import DataError

BOS, EOS = 1, 2


class Letters:
    """Ids from 32 on are characters; like SentencePiece's decoder it drops a space at the beginning."""

    bos_token_id, eos_token_id, unk_token_id, pad_token_id = BOS, EOS, 3, 0
    all_special_ids = (BOS, EOS)
    added_tokens_decoder: dict[int, str] = {}
    is_fast = True

    def get_chat_template(self, *_: Any) -> str:
        raise ValueError("none")

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join({BOS: "<s>", EOS: "</s>"}.get(i, chr(i)) for i in ids).removeprefix(" ")


def ids_of(text: str) -> list[int]:
    return [ord(character) for character in text]


def encoded(prompt: str, answer: str, end: Sequence[int] = (EOS,), begin: Sequence[int] = (BOS,)) -> ChatTokens:
    prompt_tokens = [*begin, *ids_of(prompt)]
    ids = [*prompt_tokens, *ids_of(answer), *end]
    return ChatTokens(ids, [0] * len(prompt_tokens) + [1] * (len(ids) - len(prompt_tokens)))


def chat(prompt: str, answer: str, **further: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "encoded": encoded(prompt, answer), **further}


def inspected(samples: Sequence[Any], seq_length: int = 20, show: int = 10, **further: Any) -> Inspection:
    def encode(sample: Any) -> list[Tokens]:
        tokens = sample["encoded"]
        weighted = ChatTokens(tokens.input_ids, tokens.loss_mask, sample.get("weight", 1.0))
        return [tokens_of(weighted, seq_length, further.get("rule", "right"))]

    rows = [ReadSample(partial("data:{}".format, index), "data", sample) for index, sample in enumerate(samples, 1)]
    checks = Checks(Letters(), all_trained=further.get("all_trained", False))
    return inspect(rows, encode, checks, seq_length, show, further.get("max_lengths"))


def findings_of(samples: Sequence[Any], **further: Any) -> dict[str, list[str]]:
    return {finding.key: finding.rows for finding in ordered(inspected(samples, **further).findings)}


def test_a_sample_without_mistakes_has_none():
    assert findings_of([chat("ab", "cd"), chat("ab", "ce")]) == {}


def test_each_mistake_is_found_in_its_row():
    good = chat("q", "a")
    question = {"messages": [{"role": "user", "content": "q"}], "encoded": ChatTokens([BOS, *ids_of("q")], [0, 0])}
    cases: dict[str, dict[str, Any]] = {
        "nothing_trained": question,
        "everything_trained": chat("q", "a") | {"encoded": ChatTokens([BOS, *ids_of("qa"), EOS], [1] * 4)},
        "double_bos": chat("q", "a") | {"encoded": encoded("q", "a", begin=(BOS, BOS))},
        "missing_eos": chat("q", "a") | {"encoded": encoded("q", "a", end=())},
        "empty_answer": chat("q", ""),
        "dropped_text": chat("q", "thought a") | {"encoded": encoded("q", "a.")},
        "weight_zero": chat("q", "b", weight=0),
    }
    for key, sample in cases.items():
        assert findings_of([good, sample]) == {key: ["data:2"]}, key
        assert key in MISTAKES


def test_white_space_after_the_end_token_is_no_mistake():
    assert findings_of([chat("q", "a") | {"encoded": encoded("q", "a", end=(EOS, 10))}]) == {}


def test_tool_calls_are_no_empty_answer():
    sample = chat("q", "a")
    sample["messages"].insert(1, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]})
    assert findings_of([sample]) == {}


def test_truncation_is_counted_and_its_tokens_marked():
    result = inspected([chat("q" * 5, "a" * 30), chat("q", "a")])
    assert {f.key: f.count for f in ordered(result.findings)} == {"answer_cut": 1, "truncated": 1}
    [long, _] = result.shown
    # bos, question, answer, eos; the model reads seq_length tokens and predicts seq_length
    assert long.sequences[0].kinds == ["other"] * 6 + ["trained"] * 15 + ["cut"] * 16
    assert long.length == 20
    assert (result.counts.trained, result.counts.other, result.counts.cut) == (15 + 2, 6 + 2, 16)
    assert result.lengths == [(20,), (3,)]
    left = inspected([chat("q" * 5, "a" * 30)], rule="left").shown[0].sequences[0]
    # the first token that is kept cannot be predicted
    assert left.kinds == ["cut"] * 16 + ["other"] + ["trained"] * 20


def test_all_tokens_trained_on_purpose_are_no_mistake():
    sample = chat("q", "a") | {"encoded": ChatTokens([BOS, *ids_of("qa"), EOS], [1] * 4)}
    assert findings_of([sample], all_trained=True) == {}


def test_rows_that_cannot_be_used_and_duplicates_are_listed_with_their_reason():
    samples = [chat("q", "a"), DataError("data:2: not JSON"), chat("r", "a"), chat("q", "a"), chat("long" * 5, "a")]
    result = inspected(samples, max_lengths={"data": 15})
    rows = {finding.key: finding.rows for finding in ordered(result.findings)}
    assert rows == {"refused": ["data:2: not JSON"], "too_long": ["data:5"], "duplicate": ["data:4 is data:1"]}
    assert (result.counts.samples, result.counts.dropped) == (3, 2)
    with pytest.raises(DataError, match=r"^data:1: not JSON$"):
        inspected([DataError("not JSON")])


def test_samples_with_mistakes_are_kept_beyond_those_that_are_shown():
    samples = [chat("q", chr(97 + position)) for position in range(5)] + [chat("q", "") for _ in range(9)]
    kept = [sample.where() for sample in inspected(samples, show=2).shown]
    assert kept[:3] == ["data:1", "data:2", "data:6"]
    assert len(kept) == 2 + 5 + 1  # the five first of both mistakes: empty answers, and their copies


def test_segments_decode_to_the_text_with_its_spaces():
    tokens = tokens_of(encoded("a b", " c d"), 20, "right")
    assert segments(Letters(), tokens) == [("<s>a b", "other"), (" c d</s>", "trained")]
    assert segments(None, Tokens([5, 6, 7], ["other", "trained", "trained"], 2)) == [
        ("5 ", "other"),
        ("6 7 ", "trained"),
    ]


def test_efficiencies_are_shares_of_real_tokens():
    samples = [chat("q" * count, "a") for count in (8, 1, 7, 2)]  # the model reads 10, 3, 9 and 4 tokens
    shares = inspected(samples, seq_length=13).efficiencies(2)
    assert shares == {
        "padded to seq_length": 26 / (4 * 13),
        "padded to the longest of a micro-batch": 26 / (2 * 10 + 2 * 9),
        "packed": 26 / (2 * 13),
    }


def test_the_histogram_counts_every_length():
    width, counts = histogram([0, 1, 9, 10, 99], bins=10)
    assert (width, counts) == (10, [3, 1, 0, 0, 0, 0, 0, 0, 0, 1])
    assert histogram([]) == (1, [0])


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

"""The size of the vocabulary: that of the configuration, else the tokenizer's."""

from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from megatron_wrap.config import load_run_config
from megatron_wrap.config.checks.vocabulary import check_token_ids, model_vocab_size, small_tokenizer
from megatron_wrap.errors import ConfigError, DataError

ARCH = load_run_config(Path(__file__).parents[4] / "configs" / "tiny-llama-mock.yaml").arch


@pytest.mark.parametrize(
    ("configured", "entries", "expected"),
    [(50, None, 50), (50, 50, 50), (50, 48, 50), (None, 48, 48), (None, None, 4096)],
)
def test_the_configured_size_comes_first(configured: int | None, entries: int | None, expected: int) -> None:
    tokenizer = None if entries is None else range(entries)
    assert model_vocab_size(replace(ARCH, vocab_size=configured), tokenizer) == expected


def test_a_larger_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"51 .* 50;"):
        model_vocab_size(replace(ARCH, vocab_size=50), range(51))


@pytest.mark.parametrize(("configured", "entries", "warns"), [(100, 60, True), (100, 90, False), (None, 60, False)])
def test_a_much_smaller_tokenizer_is_a_warning(configured: int | None, entries: int, warns: bool) -> None:
    warning = small_tokenizer(replace(ARCH, vocab_size=configured), range(entries))
    assert (warning is not None) == warns
    assert warning is None or ("60 entries" in warning and "vocab_size: null" in warning)


@pytest.mark.parametrize("kind", [list, numpy.array, torch.tensor])
def test_ids_are_compared_with_the_vocabulary(kind) -> None:
    for ids in ([], [0, 9], [[0, 9], [3, 4]]):
        if kind is not list or not ids or isinstance(ids[0], int):
            check_token_ids("a row", kind(ids), 10)
    for ids, wrong in (([0, 10], 10), ([3, -1, 99], -1)):
        with pytest.raises(DataError, match=f"^a row has the token id {wrong}, but the vocabulary has the ids 0 to 9;"):
            check_token_ids("a row", kind(ids), 10)

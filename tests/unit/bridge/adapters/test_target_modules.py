"""Which rows of tokens are trained: names as in peft, and one error for each wrong value."""

from __future__ import annotations

import pytest

from megatron_wrap.bridge.adapters.target_modules import (
    refuse_unknown_tokens,
    row_factors,
    rows_in_peft,
    saved_parameters,
    tied_copies,
    trained_rows,
)
from megatron_wrap.bridge.mapping.family import EMBEDDING, HEAD
from megatron_wrap.bridge.mapping.tensors import vocabulary
from megatron_wrap.config.schema.model import AdapterConfig
from megatron_wrap.errors import ConfigError

TIED = {EMBEDDING: vocabulary("model.embed_tokens.weight", 50, 8)}
UNTIED = {**TIED, HEAD: vocabulary("lm_head.weight", 50, 8)}


def adapter(wanted: object, **keys: object) -> AdapterConfig:
    return AdapterConfig(trainable_token_indices=wanted, **keys)  # type: ignore[arg-type]


def test_a_list_means_the_embedding_and_a_mapping_each_module() -> None:
    assert trained_rows(UNTIED, adapter((7, 3))) == {EMBEDDING: (7, 3)}
    both = adapter({"embed_tokens": [7, 3], "lm_head": [4]})
    assert trained_rows(UNTIED, both) == {EMBEDDING: (7, 3), HEAD: (4,)}
    shapes = [mapping.shapes() for mapping in row_factors(UNTIED, trained_rows(UNTIED, both)).values()]
    assert shapes == [
        {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": (2, 8)},
        {"base_model.model.lm_head.token_adapter.trainable_tokens_delta": (1, 8)},
    ]
    assert rows_in_peft(both) == {"embed_tokens": [7, 3], "lm_head": [4]}
    assert trained_rows(TIED, adapter({"embed_tokens": [7, 3], "lm_head": [7, 3]})) == {EMBEDDING: (7, 3)}
    assert trained_rows(UNTIED, adapter(())) == {}
    assert rows_in_peft(adapter(())) is None


@pytest.mark.parametrize(
    ("table", "wanted", "message"),
    [
        (
            UNTIED,
            {"embed_token": [1]},
            "embed_token matches no module with rows of tokens; did you mean .*embed_tokens",
        ),
        (UNTIED, (1, 2, 1), "1 is listed twice"),
        (UNTIED, (-1,), "-1 is no index"),
        (UNTIED, {"lm_head": 3}, "lm_head needs a list of indices of tokens, not 3"),
        (TIED, {"embed_tokens": [1], "lm_head": [2]}, "tied .* list the embedding alone"),
        (TIED, {"lm_head": [2]}, "list the embedding alone"),
    ],
)
def test_wrong_rows_are_one_error(table, wanted, message) -> None:
    with pytest.raises(ConfigError, match=f"trainable_token_indices: .*{message}"):
        trained_rows(table, adapter(wanted))


def test_a_token_outside_of_the_vocabulary_is_refused() -> None:
    refuse_unknown_tokens({EMBEDDING: (49,)}, 50)
    with pytest.raises(ConfigError, match="50 is no index of the model's 50 tokens"):
        refuse_unknown_tokens({EMBEDDING: (3, 50)}, 50)


def test_an_embedding_is_trained_whole_or_in_rows_and_tied_on_request() -> None:
    with pytest.raises(ConfigError, match=r"rows of model\.embed_tokens, which modules_to_save trains whole"):
        saved_parameters(UNTIED, adapter((1,), modules_to_save=("embed_tokens",)), [])
    with pytest.raises(ConfigError, match=r"write ensure_weight_tying: true and list model\.embed_tokens"):
        saved_parameters(TIED, adapter((), modules_to_save=("embed_tokens",)), [])
    tied = adapter((), modules_to_save=("embed_tokens",), ensure_weight_tying=True)
    saved = saved_parameters(TIED, tied, [])
    assert list(saved) == [EMBEDDING]
    copies = {"base_model.model.lm_head.weight": "base_model.model.model.embed_tokens.weight"}
    assert tied_copies(TIED, saved) == copies
    untied = adapter((), modules_to_save=("embed_tokens",))
    assert tied_copies(UNTIED, saved_parameters(UNTIED, untied, [])) == {}
    with pytest.raises(ConfigError, match=r"lm_head is tied to model\.embed_tokens; list that"):
        saved_parameters(TIED, adapter((), modules_to_save=("lm_head",), ensure_weight_tying=True), [])
    with pytest.raises(ConfigError, match="ensure_weight_tying: embedding and output layer are not tied"):
        saved_parameters(UNTIED, tied, [])

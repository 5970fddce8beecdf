"""The name that an error suggests."""

import pytest

from megatron_wrap.errors import ConfigError, Mistakes
from megatron_wrap.nearest_names import closest, did_you_mean, missing_path_hint

KEYS = ["num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "clip_grad", "lr", "learning-rate"]
FURTHER = ["mtp_num_layers", "pin_cpu_grads", "attention_backend"]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("num_layer", "num_layers"),
        ("numm_layers", "num_layers"),
        ("hiddne_size", "hidden_size"),
        ("hidden_sise", "hidden_size"),
        ("NUM_LAYERS", "num_layers"),
        ("num-layers", "num_layers"),
        ("learning_rate", "learning-rate"),
        ("rl", "lr"),
        ("layers", "num_layers"),  # no typo, but alike
        ("seed", None),
        ("x", None),
    ],
)
def test_a_misspelled_name_leads_to_the_one_that_was_meant(name, meant):
    assert closest(name, KEYS) == meant
    assert did_you_mean(name, KEYS) == ("" if meant is None else f"; did you mean {meant}?")


def test_further_names_come_first_only_where_they_are_nearer_as_a_typo():
    assert closest("pim_cpu_grads", KEYS, FURTHER) == "pin_cpu_grads"
    assert closest("attention_backnd", KEYS, FURTHER) == "attention_backend"
    assert closest("n_layers", KEYS, FURTHER) == "num_layers"
    assert closest("attention_heads", KEYS, FURTHER) == "num_attention_heads"


def test_the_first_of_several_mistakes_is_raised_with_the_others():
    mistakes = Mistakes()
    for message in ("first", "second"):
        with mistakes.collected():
            raise ConfigError(message)
    with mistakes.collected():
        raise ZeroDivisionError  # caused by a mistake before it
    outer = Mistakes()
    with outer.collected():
        mistakes.raise_first()
    outer.add(ConfigError("third"))
    with pytest.raises(ConfigError, match="first") as raised:
        outer.raise_first()
    assert [str(error) for error in raised.value.further] == ["second", "third"]
    with pytest.raises(ZeroDivisionError), Mistakes().collected():
        raise ZeroDivisionError


def test_a_link_that_leads_nowhere_is_no_misspelled_name(tmp_path):
    (tmp_path / "rows.jsonl").symlink_to("moved.jsonl")
    assert missing_path_hint(tmp_path / "rows.jsonl") == "; it is a link to moved.jsonl, which leads to no file"

"""Values of config.json of other types, and damaged small JSON files: one error each, with the file and the key."""

import json
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.config import config_json
from megatron_wrap.config.config_json import check_types, read_json
from megatron_wrap.config.hugging_face import FAMILIES, read_hugging_face_config
from megatron_wrap.errors import CheckpointError, ConfigError, MegatronWrapError

VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 10**30, 0.5, math.nan, math.inf, "", "x", [], {}, [None], [[1]], {"": {}}, "\ud800"),
)
ROPE = ({"type": "linear"}, {"rope_type": []}, {"rope_type": "llama3", "factor": "x"}, {"factor": [], "type": "yarn"})


@pytest.mark.transformers
@pytest.mark.parametrize("model_type", FAMILIES.keys())
def test_each_value_of_another_type_is_one_error(model_type: str) -> None:
    import transformers

    family = FAMILIES.resolve(model_type)
    complete = getattr(transformers, family.architecture).config_class().to_dict()
    complete.update(rope_scaling=None, rope_parameters=None, rope_theta=1e4, num_experts_per_tok=2)
    translate = family.arch_values
    translate(complete)
    for key in complete:
        changed = [{**complete, key: value} for value in (*VALUES, *(ROPE if key.startswith("rope_") else ()))]
        for values in [*changed, {name: value for name, value in complete.items() if name != key}]:
            with suppress(MegatronWrapError):
                check_types(values)
                translate(values)


LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "rope_theta": 1e4},
    **{"num_attention_heads": 8, "vocab_size": 301, "max_position_embeddings": 512, "rms_norm_eps": 1e-6},
}


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers must be at least 1 and at most 10,000, not the integer"),
        ("num_attention_heads", 0, "num_attention_heads must be at least 1"),
        ("hidden_size", True, "hidden_size must be an integer, not the boolean true"),
        ("rms_norm_eps", "x", "rms_norm_eps must be a number, not the string 'x'"),
        ("rope_theta", math.inf, "rope_theta must be a finite number"),
        ("rope_scaling", [1], r"rope_scaling must be a mapping, not the list \[1\]"),
        ("rope_scaling", {"rope_type": "linear", "factor": "2"}, "rope_scaling.factor must be a number"),
        ("attention_bias", "no", "attention_bias must be true or false"),
        ("initializer_range", None, "initializer_range must be a number, not null"),
    ],
)
def test_the_error_has_the_key_and_the_value(tmp_path: Path, key: str, value: Any, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, key: value}))
    with pytest.raises(ConfigError, match=rf"config\.json: {message}"):
        read_hugging_face_config(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"not JSON \(Expecting value"),
        (b'{"a": \xff}', "not JSON .*utf-8"),
        (b"[" * 100_000, r"not JSON \(nested too deeply\)"),
        (b"9" * 5000, "not JSON .*4300 digits"),
        (b" " * 101, "101 bytes, more than the 100"),
    ],
)
def test_a_damaged_json_file(content: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if len(content) == 101:
        monkeypatch.setattr(config_json, "MAX_BYTES", 100)
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"a\.json: {message}.*; write it again$"):
        read_json(tmp_path / "a.json", "write it again", CheckpointError)


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "missing"])
def test_what_is_not_a_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    expected = {"pipe": "is a pipe", "device": "is a pipe, socket or device", "folder": "Is a directory"}
    with pytest.raises(ConfigError, match=rf"config\.json: .*{expected.get(kind, 'no such file')}"):
        read_hugging_face_config(str(tmp_path))

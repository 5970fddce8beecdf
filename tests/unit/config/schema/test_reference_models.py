"""The forms of `megatron_wrap.models.reference`."""

from pathlib import Path

import pytest

from megatron_wrap.config import load_run_config
from megatron_wrap.config.checks.run import check_values
from megatron_wrap.config.schema.reference_models import ReferenceModelConfig
from megatron_wrap.errors import ConfigError

CONFIG = Path(__file__).parents[4] / "configs" / "tiny-llama-dpo.yaml"
KEY = "megatron_wrap.models.reference"


@pytest.mark.parametrize(
    ("value", "expected", "interval"),
    [
        ("null", None, None),
        ("copy", ReferenceModelConfig(copy=True), None),
        ("{copy: true, ema_decay: 0.5}", ReferenceModelConfig(copy=True, ema_decay=0.5), 1),
        ("{hf_path: a, refresh_interval: 4}", ReferenceModelConfig(hf_path="a", refresh_interval=4), 4),
        ("{checkpoint: a, offload: true}", ReferenceModelConfig(checkpoint="a", offload=True), None),
        ("{precomputed: a}", ReferenceModelConfig(precomputed="a"), None),
        ("{precomputed: a, hf_path: b}", ReferenceModelConfig(precomputed="a", hf_path="b"), None),
    ],
)
def test_forms(value, expected, interval):
    actual = load_run_config(CONFIG, [f"{KEY}={value}"]).models.reference
    assert actual == expected
    assert actual is None or actual.update_interval == interval


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("coppy", "must be copy, base, a mapping with one of copy, base, adapter, hf_path, checkpoint, precomputed"),
        ("{}", "no weights are named"),
        ("{offload: true}", "no weights are named"),
        ("{copy: true, hf_path: a}", "copy and hf_path each name the weights"),
        ("{chekpoint: a}", f"{KEY}.chekpoint: unknown key; did you mean checkpoint?"),
        ("{hf_path: 3}", f"{KEY}.hf_path: must be a string or null, not the integer 3"),
        ("{copy: true, refresh_interval: 0}", "must be at least 1, not 0"),
        ("{copy: true, ema_decay: 1.0}", "must be at least 0 and below 1, not 1.0"),
        ("{precomputed: a, ema_decay: 0.0}", "ema_decay has no effect with precomputed"),
        ("{precomputed: a, offload: true}", "offload has no effect with precomputed"),
    ],
)
def test_refusals(value, message):
    with pytest.raises(ConfigError) as refused:
        load_run_config(CONFIG, [f"{KEY}={value}"])
    assert message in str(refused.value)


def test_a_run_has_a_reference_or_a_teacher():
    both = [f"{KEY}=null", "megatron_wrap.models.teacher={hf_path: a, offload: true}"]
    models = load_run_config(CONFIG, both).models
    assert models.reference_or_teacher == ReferenceModelConfig(hf_path="a", offload=True)
    assert (models.role, models.path) == ("teacher", "megatron_wrap.models.teacher")
    assert load_run_config(CONFIG, []).models.role == "reference"
    with pytest.raises(ConfigError, match=r"models\.reference and models\.teacher"):
        check_values(load_run_config(CONFIG, both[1:]))

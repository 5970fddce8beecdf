"""The forms of `megatron_wrap.models.reference`."""

from pathlib import Path

import pytest

from megatron_wrap.config import load_run_config
from megatron_wrap.config.checks import check_values
from megatron_wrap.config.second_models import SecondModelConfig
from megatron_wrap.errors import ConfigError

CONFIG = Path(__file__).parents[3] / "configs" / "tiny-llama-dpo.yaml"
KEY = "megatron_wrap.models.reference"


@pytest.mark.parametrize(
    ("given", "expected", "interval"),
    [
        ("null", None, None),
        ("copy", SecondModelConfig(copy=True), None),
        ("{copy: true, ema_decay: 0.5}", SecondModelConfig(copy=True, ema_decay=0.5), 1),
        ("{hf_path: a, refresh_interval: 4}", SecondModelConfig(hf_path="a", refresh_interval=4), 4),
        ("{checkpoint: a, offload: true}", SecondModelConfig(checkpoint="a", offload=True), None),
        ("{precomputed: a}", SecondModelConfig(precomputed="a"), None),
        ("{precomputed: a, hf_path: b}", SecondModelConfig(precomputed="a", hf_path="b"), None),
    ],
)
def test_forms(given, expected, interval):
    found = load_run_config(CONFIG, [f"{KEY}={given}"]).models.reference
    assert found == expected
    assert found is None or found.update_interval == interval


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("coppy", "must be copy, a mapping with one of copy, hf_path, checkpoint, precomputed"),
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
def test_refusals(given, message):
    with pytest.raises(ConfigError) as refused:
        load_run_config(CONFIG, [f"{KEY}={given}"])
    assert message in str(refused.value)


def test_a_teacher_is_the_second_model_of_a_run_without_a_reference():
    both = [f"{KEY}=null", "megatron_wrap.models.teacher={hf_path: a, offload: true}"]
    models = load_run_config(CONFIG, both).models
    assert models.second == SecondModelConfig(hf_path="a", offload=True)
    assert (models.role, models.path) == ("teacher", "megatron_wrap.models.teacher")
    assert load_run_config(CONFIG, []).models.role == "reference"
    with pytest.raises(ConfigError, match="one second model"):
        check_values(load_run_config(CONFIG, both[1:]))

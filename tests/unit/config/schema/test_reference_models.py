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


def test_a_run_has_a_reference_or_a_teacher():
    both = [f"{KEY}=null", "megatron_wrap.models.teacher={hf_path: a, offload: true}"]
    models = load_run_config(CONFIG, both).models
    assert models.reference_or_teacher == ReferenceModelConfig(hf_path="a", offload=True)
    assert (models.role, models.path) == ("teacher", "megatron_wrap.models.teacher")
    assert load_run_config(CONFIG, []).models.role == "reference"
    with pytest.raises(ConfigError, match=r"models\.reference and models\.teacher"):
        check_values(load_run_config(CONFIG, both[1:]))

"""Decoding of a flow's section of the YAML into the dataclass that the flow declares. No process group."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_wrap.config import load_run_config
from megatron_wrap.errors import ConfigError, FlowError
from megatron_wrap.flow import (
    FlowOptions,
    MegatronWrapFlowConfig,
    MegatronWrapFlowEntry,
    MegatronWrapGPTModelSFTFlow,
    MegatronWrapMinimalMockFlow,
)
from megatron_wrap.flow.contract.config import decode_flow_config

RUN = """\
megatron_lm:
  model: {arch: {__select__: tiny-llama, __override__: {vocab_size: 64}}}
  train:
    common: {micro_batch_size: 2, global_batch_size: 4, seq_length: 32, train_iters: 2}
    learning-rate: {lr: 1e-3}
    dtype: {__select__: fp32}
megatron_wrap:
  flow:
    __select__: SELECT
    __override__:
      flow_key: FLOW
"""


class Focal(MegatronWrapGPTModelSFTFlow):
    @dataclass(frozen=True, kw_only=True)
    class Config(MegatronWrapGPTModelSFTFlow.Config):
        exponent: float
        layers: tuple[int, ...] = (1, 2)
        name: str | None = None

        def __post_init__(self) -> None:
            if self.exponent < 0:
                raise ValueError(f"exponent is {self.exponent}; 0 or larger")


class Undecorated(MegatronWrapGPTModelSFTFlow):
    class Config(MegatronWrapGPTModelSFTFlow.Config):
        exponent: float = 2.0


class Foreign(MegatronWrapGPTModelSFTFlow):
    @dataclass(frozen=True)
    class Config:  # type: ignore[assignment]
        exponent: float = 2.0


class Silent(MegatronWrapMinimalMockFlow):
    Config = None  # type: ignore[assignment]


HERE = f"{__name__}:"
Read = Callable[..., Any]


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Read:
    """read(flow, *lines of the section): the flow's `flow_config`."""
    monkeypatch.chdir(tmp_path)

    def read(flow: str, *lines: str, select: str = "custom", overrides: tuple[str, ...] = ()) -> Any:
        text = RUN.replace("SELECT", select).replace("FLOW", flow)
        Path("run.yaml").write_text(text + "".join(f"      {line}\n" for line in lines))
        config = load_run_config("run.yaml", overrides)
        return decode_flow_config(MegatronWrapFlowEntry.get_flow_class(config.flow.flow_key), config)

    return read


def test_the_section_is_decoded_into_an_instance(read: Read) -> None:
    result = read(HERE + "Focal", "exponent: 2", "truncation: left", overrides=("megatron_wrap.flow.layers=[3]",))
    assert result == Focal.Config(flow_key=HERE + "Focal", exponent=2.0, truncation="left", layers=(3,))
    assert type(result.exponent) is float
    # with the keys of the selected file
    assert read(HERE + "Focal", "exponent: 0.5", select="gpt_sft").collate_type == "variable_length"


def test_a_flow_registered_by_decorator(read: Read) -> None:
    MegatronWrapFlowEntry.register("focal_of_this_test")(Focal)
    assert read("focal_of_this_test", "exponent: 1").exponent == 1.0


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["exponent: 1", "exponnet: 2"], "run.yaml:13 megatron_wrap.flow.exponnet: unknown key; did you mean exponent"),
        (["exponent: 1", "zz: 2"], "run.yaml:13 megatron_wrap.flow.zz: unknown key; the fields of Focal.Config are "),
        (["exponent: much"], "run.yaml:12 megatron_wrap.flow.exponent: must be a number, not the string 'much'"),
        (
            ["exponent: 1", "truncation: up"],
            "run.yaml:13 megatron_wrap.flow.truncation: must be one of right, left, ref",
        ),
        (["name: x"], "run.yaml:11 megatron_wrap.flow.flow_key: megatron_wrap.flow.exponent is missing"),
        (["exponent: -1"], "Focal.Config refuses its values: exponent is -1.0; 0 or larger"),
    ],
)
def test_the_error_of_a_wrong_section_has_file_and_line(read: Read, lines: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read(HERE + "Focal", *lines)
    assert message in str(refusal.value)
    with pytest.raises(ConfigError, match=r"^command line megatron_wrap\.flow\.exponent: must be a number"):
        read(HERE + "Focal", overrides=("megatron_wrap.flow.exponent=x",))


@pytest.mark.parametrize(
    ("flow", "line", "rule"),
    [
        ("gpt_distill", "beta: 1.5", "at least 0 and at most 1, not 1.5"),
        ("gpt_distill", "top_k: 0", "at least 1, not 0"),
        ("gpt_cpo", "simpo_gamma: -1", "at least 0, not -1.0"),
        ("gpt_dpo", "label_smoothing: 0.5", "at least 0 and below 0.5, not 0.5"),
        ("gpt_kto", "desirable_weight: -1", "at least 0, not -1.0"),
        ("gpt_grpo", "clip_ratio_c: 1", "above 1, not 1.0"),
        ("gpt_reward", "center_rewards_coefficient: -0.1", "at least 0, not -0.1"),
        ("gpt_orpo", "beta: 0", "above 0, not 0.0"),
    ],
)
def test_a_value_out_of_range_is_refused_at_its_line(read: Read, flow: str, line: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rf"^run\.yaml:12 megatron_wrap\.flow\.{line.split(':')[0]}: must be {rule}"):
        read(flow, line, select=flow)


@pytest.mark.parametrize(
    ("flow", "message"),
    [("Undecorated", r"Undecorated\.Config .*@dataclass"), ("Foreign", r"Foreign\.Config .*MegatronWrapFlowConfig")],
)
def test_a_config_that_is_not_a_flow_config_dataclass_is_refused(read: Read, flow: str, message: str) -> None:
    with pytest.raises(FlowError, match=message):
        read(HERE + flow)


class OtherLoss(MegatronWrapGPTModelSFTFlow):
    def calculate_loss(self, loss_inputs: Any, model_forward_output: Any) -> Any:
        raise AssertionError


class Unpackable(MegatronWrapMinimalMockFlow):
    Config = None  # type: ignore[assignment]
    supports_packing = False


def test_packing_of_a_flow_that_does_not_declare_it_is_refused(read: Read) -> None:
    assert read("gpt_sft", "packing: true", select="gpt_sft").packing is True
    assert read(HERE + "Silent", "packing: true", select="minimal_mock").packing is True
    correction = (
        r"self\.sum_per_sequence\(per_token, loss_inputs\).*supports_packing = True.*check-parity.*packing: false"
    )
    with pytest.raises(ConfigError, match=rf"run\.yaml:12 megatron_wrap\.flow\.packing: .*OtherLoss.*{correction}"):
        read(HERE + "OtherLoss", "packing: true")
    with pytest.raises(ConfigError, match=rf"^command line megatron_wrap\.flow\.packing: .*Unpackable.*{correction}"):
        read(HERE + "Unpackable", select="minimal_mock", overrides=("megatron_wrap.flow.packing=true",))


def test_without_a_config_only_the_keys_of_the_tree_are_known(read: Read) -> None:
    result = read(HERE + "Silent", "vary_length: false", select="minimal_mock")
    assert isinstance(result, FlowOptions)
    assert result.vary_length is False
    with pytest.raises(
        ConfigError, match=r"run\.yaml:12 megatron_wrap\.flow\.more: unknown key; Silent declares no keys"
    ):
        read(HERE + "Silent", "more: 1", select="minimal_mock")


def test_keys_beyond_the_file_need_another_flow(read: Read, tmp_path: Path) -> None:
    """A file of the tree lists all keys of its flow, so they are validated without importing the flow."""
    Path("run.yaml").write_text(RUN.replace("SELECT", "gpt_sft").replace("flow_key: FLOW", "colate_type: x"))
    with pytest.raises(ConfigError, match=r"run\.yaml:11 megatron_wrap\.flow\.colate_type: unknown key; did you mean"):
        load_run_config("run.yaml")
    with pytest.raises(ConfigError, match=r"run\.yaml:11 megatron_wrap\.flow\.flow_key: must be a string, not null"):
        read("null")


@pytest.mark.parametrize("flow", [MegatronWrapGPTModelSFTFlow, MegatronWrapMinimalMockFlow])
def test_a_shipped_flow_has_the_defaults_of_its_file(read: Read, flow: Any) -> None:
    key = {MegatronWrapGPTModelSFTFlow: "gpt_sft", MegatronWrapMinimalMockFlow: "minimal_mock"}[flow]
    assert read(key, select=key) == flow.Config(flow_key=key)
    assert issubclass(flow.Config, MegatronWrapFlowConfig)
    assert next(field.name for field in dataclasses.fields(flow.Config)) == "flow_key"

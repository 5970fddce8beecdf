"""Inputs of multi-token prediction: shifted within each sequence; runs that cannot have its layers are refused."""

from pathlib import Path

import pytest
import torch

from megatron_wrap.config import load_run_config
from megatron_wrap.errors import ConfigError, FlowError
from megatron_wrap.flow.contract.config import decode_flow_config
from megatron_wrap.flow.contract.prediction import MultiTokenPrediction
from megatron_wrap.flow.dpo import MegatronWrapGPTModelDPOFlow
from megatron_wrap.flow.sft import MegatronWrapGPTModelSFTFlow

CONFIG = Path(__file__).parents[3] / "distributed" / "layouts.yaml"
ARCH = "megatron_lm.model.arch."
AHEAD = f"{ARCH}mtp_num_layers=1"
TWO = MultiTokenPrediction(num_layers=2, scaling_factor=0.3)


def test_tokens_labels_and_masks_are_shifted_within_each_sequence() -> None:
    inputs = {"input_ids": torch.tensor([[10, 11, 12, 13], [20, 21, 9, 9]])}
    losses = {"labels": torch.tensor([[11, 12, 13, 14], [21, 22, 5, 5]]), "loss_mask": torch.ones(2, 4)}
    ids, labels, mask = TWO.shifted_inputs(inputs, losses, torch.tensor([4, 2]), pad_id=7, flow="Flow")
    assert ids.tolist() == [[[11, 12, 13, 7], [12, 13, 7, 7]], [[21, 7, 7, 7], [7, 7, 7, 7]]]
    assert labels.tolist() == [[[12, 13, 14, 0], [13, 14, 0, 0]], [[22, 0, 0, 0], [0, 0, 0, 0]]]
    assert mask.tolist() == [[[1, 1, 1, 0], [1, 1, 0, 0]], [[1, 0, 0, 0], [0, 0, 0, 0]]]
    assert TWO.weights(mask) == {"mtp_1": 4.0, "mtp_2": 2.0}
    assert TWO.coefficients == {"mtp_1": 0.15, "mtp_2": 0.15}


def test_a_flow_without_labels_is_refused() -> None:
    with pytest.raises(FlowError, match=r"labels, loss_mask is missing.*mtp_num_layers to null"):
        TWO.shifted_inputs({"input_ids": torch.zeros(1, 2)}, {}, torch.tensor([2]), pad_id=0, flow="Flow")


def test_a_flow_that_predicts_no_next_token_keeps_the_layers_without_a_loss() -> None:
    flow = "megatron_wrap.flow.__select__=gpt_dpo"
    with pytest.raises(ConfigError, match=r"mtp_num_layers: MegatronWrapGPTModelDPOFlow.*mtp_loss_scaling_factor to 0"):
        decode_flow_config(MegatronWrapGPTModelDPOFlow, load_run_config(CONFIG, [AHEAD, flow]))
    kept = load_run_config(CONFIG, [AHEAD, flow, f"{ARCH}mtp_loss_scaling_factor=0"])
    assert decode_flow_config(MegatronWrapGPTModelDPOFlow, kept).flow_key == "gpt_dpo"
    assert decode_flow_config(MegatronWrapGPTModelSFTFlow, load_run_config(CONFIG, [AHEAD])).flow_key == "gpt_sft"

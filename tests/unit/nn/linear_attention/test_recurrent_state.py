"""What a layer keeps in generation: the last inputs and the state of each sequence, without the padding of prompts."""

import torch

from megatron_wrap.nn.linear_attention.recurrent_state import RecurrentState


def test_padding_is_zero_in_the_first_pass_alone_and_sequences_begin_with_their_prompt():
    kept = RecurrentState(padding=torch.tensor([2, 0]), sources=torch.tensor([0, 0, 1]))
    inputs = torch.arange(1.0, 13.0).reshape(2, 3, 2)
    first = kept.without_padding(inputs)
    assert first.tolist() == [[[0, 0], [0, 0], [5, 6]], [[7, 8], [9, 10], [11, 12]]]
    kept.keep(first, 2, torch.tensor([10.0, 20.0]))
    assert kept.inputs.tolist() == [[[0, 0], [5, 6]], [[0, 0], [5, 6]], [[9, 10], [11, 12]]]
    assert kept.heads.tolist() == [10, 10, 20]
    second = torch.ones(3, 1, 2)
    assert kept.without_padding(second) is second
    kept.keep(second, 2, torch.tensor([1.0, 2.0, 3.0]))
    assert kept.inputs.tolist() == [[[5, 6], [1, 1]], [[5, 6], [1, 1]], [[11, 12], [1, 1]]]


def test_a_prompt_shorter_than_the_convolution_begins_with_zeros():
    kept = RecurrentState(padding=torch.tensor([0]), sources=torch.tensor([0]))
    kept.keep(torch.ones(1, 1, 2), 3, torch.zeros(1))
    assert kept.inputs.tolist() == [[[0, 0], [0, 0], [1, 1]]]

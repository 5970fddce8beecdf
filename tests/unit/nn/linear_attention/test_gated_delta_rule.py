"""The gated delta rule in chunks against a loop over tokens, and against transformers' of Qwen3-Next; the state that a
layer keeps in generation."""

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from megatron_wrap.nn.linear_attention.gated_delta_rule import RecurrentState, gated_delta_rule, normalized

pytestmark = pytest.mark.transformers

KEY_HEADS, HEADS, D_K, D_V = 2, 6, 5, 9


def inputs(tokens, dtype, batch=2):
    generator = torch.Generator().manual_seed(3)

    def random(*shape):
        return torch.randn(batch, tokens, *shape, generator=generator, dtype=torch.float64)

    query, key, value = random(KEY_HEADS, D_K), random(KEY_HEADS, D_K), random(HEADS, D_V)
    log_decay, beta = -random(HEADS).exp(), random(HEADS).sigmoid()
    return [tensor.to(dtype).requires_grad_() for tensor in (query, key, value, log_decay, beta)]


def loop(query, key, value, log_decay, beta, lengths, state=None):
    """The formula in the module's docstring, token by token."""
    copies = value.shape[2] // key.shape[2]
    query, key = (normalized(tensor).repeat_interleave(copies, dim=2) for tensor in (query, key))
    outputs, first = [], 0
    zero = value.new_zeros(value.shape[0], HEADS, D_K, D_V)
    for number, length in enumerate(lengths):
        state = zero if number or state is None else state
        for t in range(first, first + length):
            state = log_decay[:, t, :, None, None].exp() * state
            read = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
            state = state + torch.einsum("bh,bhk,bhv->bhkv", beta[:, t], key[:, t], value[:, t] - read)
            outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) * D_K**-0.5)
        first += length
    return torch.stack(outputs, dim=1), state


def relative(actual, expected):
    return ((actual - expected).abs().max() / expected.abs().max()).item()


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("lengths", [[150], [64], [37], [1], [70, 1, 64, 5, 10]], ids=str)
def test_chunks_equal_a_loop_over_tokens(lengths, dtype, bound):
    tensors = inputs(sum(lengths), dtype)
    before = torch.randn(2, HEADS, D_K, D_V, dtype=dtype, generator=torch.Generator().manual_seed(4)).requires_grad_()
    tensors.append(before)
    weight = torch.randn(2, sum(lengths), HEADS, D_V, dtype=dtype, generator=torch.Generator().manual_seed(5))

    def values(rule):
        output, state = rule()
        gradients = torch.autograd.grad((output * weight).sum() + state.square().sum(), tensors)
        return [output, state, *gradients]

    ours = values(lambda: gated_delta_rule(*tensors[:5], lengths=lengths, state=before))
    theirs = values(lambda: loop(*tensors[:5], lengths, before))
    assert max(relative(*pair) for pair in zip(ours, theirs, strict=True)) <= bound


def test_the_rule_is_that_of_transformers():
    query, key, value, log_decay, beta = inputs(37, torch.float32)
    output, state = gated_delta_rule(query, key, value, log_decay, beta, chunk_size=16)
    expected, last = torch_recurrent_gated_delta_rule(
        query, key, value, log_decay, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    assert relative(output, expected) <= 1e-5
    assert relative(state, last) <= 1e-5


def test_strong_decay_neither_overflows_nor_ends_in_nan():
    query, key, value, log_decay, beta = inputs(128, torch.float32)
    output, _ = gated_delta_rule(query, key, value, 100 * log_decay, beta)
    gradients = torch.autograd.grad(output.sum(), (query, key, value, log_decay, beta))
    assert all(torch.isfinite(tensor).all() for tensor in (output, *gradients))


def test_the_backward_pass_needs_the_inputs_alone():
    tensors = inputs(150, torch.float32)
    kept = set()

    def keep(tensor):
        kept.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output, _ = gated_delta_rule(*tensors)
    zeros = kept - {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert len(zeros) <= 1  # the state before the row
    gradients = torch.autograd.grad(output.sum(), tensors)
    expected = torch.autograd.grad(gated_delta_rule(*tensors, recompute=False)[0].sum(), tensors)
    assert max(relative(*pair) for pair in zip(gradients, expected, strict=True)) <= 1e-6


def test_the_state_continues_a_row():
    tensors = inputs(90, torch.float64)
    whole, last = gated_delta_rule(*tensors)
    first, state = gated_delta_rule(*(tensor[:, :89] for tensor in tensors))
    second, state = gated_delta_rule(*(tensor[:, 89:] for tensor in tensors), state=state)
    assert relative(torch.cat((first, second), dim=1), whole) <= 1e-10
    assert relative(state, last) <= 1e-10


def test_sequences_that_do_not_cover_the_row_are_refused():
    with pytest.raises(ValueError, match="sequences of 5 tokens in all do not cover a row of 6"):
        gated_delta_rule(*inputs(6, torch.float32), lengths=[2, 3])


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

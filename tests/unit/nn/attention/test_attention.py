"""Core attention, values and gradients, against an explicit float64 softmax; context parallelism simulated in one
process."""

import functools
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_wrap.errors import LayoutError, PlatformError
from megatron_wrap.parallel.zigzag import merge, packed_positions
from megatron_wrap.platform import choose_platform

choose_platform("cpu").install()

from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_wrap.nn.attention import attend as attend_module  # noqa: E402
from megatron_wrap.nn.attention.attend import attend, attend_over_context  # noqa: E402
from megatron_wrap.nn.attention.packed_sequences import PackedSequences  # noqa: E402
from megatron_wrap.nn.attention.torch_attention import TorchCoreAttention  # noqa: E402

CLOSE = {"rtol": 1e-10, "atol": 1e-12}


def reference_attention(query, key, value, masked, scale, softcap=None):
    """softmax in float64 on [s, b, h, d] tensors; `masked` is bool, broadcastable to [b, h, s_q, s_k]."""
    groups = query.shape[2] // key.shape[2]
    key, value = (tensor.repeat_interleave(groups, dim=2) for tensor in (key, value))
    scores = torch.einsum("qbhd,kbhd->bhqk", query, key) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return torch.einsum("bhqk,kbhe->qbhe", scores.masked_fill(masked, -torch.inf).softmax(-1), value)


def tensors(s_q=24, s_k=24, batch=2, heads=4, groups=2, width=8, value_width=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(s_q, batch, heads, width), (s_k, batch, groups, width), (s_k, batch, groups, value_width)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def outside(s_q, s_k=None, left=None, right=0):
    """Masks keys outside [position - left, position + right]; the queries have the last s_q of s_k positions."""
    s_k = s_q if s_k is None else s_k
    distance = torch.arange(s_k) - torch.arange(s_k - s_q, s_k)[:, None]
    masked = distance > right
    return masked if left is None else masked | (distance < -left)


def assert_same(ours, reference, inputs):
    torch.testing.assert_close(ours, reference, **CLOSE)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9), dtype=ours.dtype)
    pairs = (torch.autograd.grad((output * weight).sum(), inputs) for output in (ours, reference))
    for mine, other in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, other, **CLOSE)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("value_width", [8, 5])
def test_causal_attention_with_grouped_queries_and_a_different_value_size(groups, value_width):
    inputs = tensors(groups=groups, value_width=value_width)
    assert_same(attend(*inputs, causal=True, scale=0.3), reference_attention(*inputs, outside(24), 0.3), inputs)


@pytest.mark.parametrize(("s_q", "left"), [(24, None), (24, 5), (7, None), (1, 5)])
def test_scores_are_capped_before_the_mask(s_q, left):
    inputs = tensors(s_q)
    window = None if left is None else (left, 0)
    padding = torch.rand(2, 1, 1, 24, generator=torch.Generator().manual_seed(3)) < 0.2
    padding[..., -s_q:] = False
    for mask in (None, padding):
        masked = outside(s_q, 24, left) if mask is None else outside(s_q, 24, left) | mask
        ours = attend(*inputs, causal=True, scale=0.9, window=window, mask=mask, softcap=1.3)
        assert_same(ours, reference_attention(*inputs, masked, 0.9, softcap=1.3), inputs)


@pytest.mark.parametrize("s_q", [1, 7, 23])
def test_queries_fewer_than_keys_have_the_last_positions(s_q):
    inputs = tensors(s_q=s_q)
    assert_same(attend(*inputs, causal=True, scale=0.5), reference_attention(*inputs, outside(s_q, 24), 0.5), inputs)


def test_non_causal_attention():
    inputs = tensors(s_q=5, s_k=11)
    assert_same(
        attend(*inputs, causal=False, scale=0.5),
        reference_attention(*inputs, torch.zeros(5, 11, dtype=torch.bool), 0.5),
        inputs,
    )


@pytest.mark.parametrize("block", [1, 512])
@pytest.mark.parametrize(("s_q", "left"), [(24, 0), (24, 5), (24, 22), (24, 23), (9, 6), (1, 4)])
def test_sliding_window(monkeypatch, block, s_q, left):
    monkeypatch.setattr(attend_module, "_MIN_WINDOW_BLOCK", block)  # many blocks, or one
    inputs = tensors(s_q=s_q)
    ours = attend(*inputs, causal=True, scale=0.4, window=(left, 0))
    assert_same(ours, reference_attention(*inputs, outside(s_q, 24, left), 0.4), inputs)


@pytest.mark.parametrize(("window", "left", "right"), [((3, 2), 3, 2), ((-1, 2), None, 2), ((4, -1), 4, 99)])
def test_non_causal_window_on_both_sides(monkeypatch, window, left, right):
    monkeypatch.setattr(attend_module, "_MIN_WINDOW_BLOCK", 6)
    inputs = tensors()
    ours = attend(*inputs, causal=False, scale=0.4, window=window)
    assert_same(ours, reference_attention(*inputs, outside(24, 24, left, right), 0.4), inputs)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, (5, 0)])
def test_explicit_mask_with_causality_and_window(causal, window):
    inputs = tensors()
    padding = torch.zeros(2, 1, 1, 24, dtype=torch.bool)
    padding[0, ..., 20:] = padding[1, ..., 15:] = True
    causal_mask = outside(24, 24, window and window[0], 0 if causal or window else 99)
    masked = padding | causal_mask
    fully_masked = masked.all(-1, keepdim=True)  # such a query has a finite but meaningless result
    ours = attend(*inputs, causal=causal, scale=0.4, window=window, mask=padding)
    assert ours.isfinite().all()
    is_meaningful = ~fully_masked.permute(2, 0, 1, 3).expand_as(ours[..., :1])
    reference = reference_attention(*inputs, masked & ~fully_masked, 0.4)
    assert_same(ours * is_meaningful, reference * is_meaningful, inputs)


def on_simulated_ranks(inputs, lengths, cp_size, window=None, causal=True):
    """`attend_over_context` on each rank in turn; `gather` concatenates the tensors that the ranks would send."""
    indices = [packed_positions(lengths, cp_size, rank) for rank in range(cp_size)]
    local = [[tensor[of_rank] for tensor in inputs] for of_rank in indices]
    sent = [torch.cat((key, value), dim=-1) for _, key, value in local]
    attend_local = functools.partial(attend, causal=causal, scale=0.4, window=window)
    outputs = []
    for rank, (query, key, value) in enumerate(local):

        def gather(tensor, rank=rank):
            assert torch.equal(tensor, sent[rank])
            return torch.cat(sent)

        outputs.append(
            attend_over_context(
                *(query, key, value, lengths),
                cp_size=cp_size,
                cp_rank=rank,
                gather=gather,
                causal=causal,
                windowed=window is not None,
                attend=attend_local,
            )
        )
    shares = [length // cp_size for length in lengths]
    return torch.cat([merge(list(parts), 0) for parts in zip(*(out.split(shares) for out in outputs), strict=True)])


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize("value_width", [8, 5])
@pytest.mark.parametrize("window", [None, (7, 0)])
def test_context_parallel_attention(cp_size, value_width, window):
    inputs = tensors(value_width=value_width)
    ours = on_simulated_ranks(inputs, [24], cp_size, window)
    assert_same(ours, reference_attention(*inputs, outside(24, left=window and window[0]), 0.4), inputs)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_packed_documents_with_context_parallelism(cp_size):
    inputs, lengths = tensors(s_q=48, s_k=48, batch=1), [8, 24, 16]
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    masked = outside(48) | (document[:, None] != document)
    assert_same(on_simulated_ranks(inputs, lengths, cp_size), reference_attention(*inputs, masked, 0.4), inputs)


@pytest.fixture
def padded_widths(monkeypatch):
    """Pads values as on a GPU whose fast kernels need it; the head sizes of the values that were padded."""
    widths = []

    def needs_padded_values(query, key, value, *arguments):
        if value.shape[-1] < query.shape[-1]:
            widths.append(value.shape[-1])
        return value.shape[-1] < query.shape[-1]

    monkeypatch.setattr(attend_module, "needs_padded_values", needs_padded_values)
    return widths


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize(("causal", "s_q"), [(True, 24), (False, 24), (True, 8)])
def test_padded_values_give_the_attention_of_torch(padded_widths, dtype, tolerance, causal, s_q):
    inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors(s_q=s_q, groups=4, value_width=5)]
    ours = attend(*inputs, causal=causal, scale=0.3)
    heads_first = (tensor.permute(1, 2, 0, 3) for tensor in inputs)
    mask = ~outside(s_q, 24) if causal else None
    theirs = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=0.3).permute(2, 0, 1, 3)
    assert ours.shape == theirs.shape
    assert padded_widths == [5]
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
    pairs = (torch.autograd.grad((output * weight).sum(), inputs) for output in (ours, theirs))
    for mine, other in zip((ours, *next(pairs)), (theirs, *next(pairs)), strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_padded_values_with_grouped_queries_and_context_parallelism(padded_widths, cp_size):
    inputs = tensors(value_width=5)
    ours = on_simulated_ranks(inputs, [24], cp_size)
    assert_same(ours, reference_attention(*inputs, outside(24), 0.4), inputs)
    assert padded_widths


def test_non_causal_attention_with_context_parallelism():
    inputs = tensors()
    ours = on_simulated_ranks(inputs, [24], 2, causal=False)
    assert_same(ours, reference_attention(*inputs, torch.zeros(24, 24, dtype=torch.bool), 0.4), inputs)


@pytest.mark.parametrize(("lengths", "cp_size"), [([24], 5), ([20, 4], 4), ([16], 2)])
def test_invalid_document_lengths_are_refused(lengths, cp_size):
    query, key, value = (tensor[: 24 // cp_size] for tensor in tensors())
    with pytest.raises(LayoutError, match=f"{cp_size} context-parallel ranks"):
        attend_over_context(
            *(query, key, value, lengths),
            cp_size=cp_size,
            cp_rank=0,
            gather=None,
            causal=True,
            windowed=False,
            attend=None,
        )


def module(mask_type=AttnMaskType.causal, layer_number=1, settings=None, **arguments):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        **(settings or {}),
    )
    return TorchCoreAttention(
        config=config,
        layer_number=layer_number,
        attn_mask_type=mask_type,
        attention_type="self",
        cp_comm_type="p2p",
        **arguments,
    )


def test_module_is_causal_with_the_default_scale():
    inputs = tensors()
    ours = module()(*inputs, None, attn_mask_type=AttnMaskType.causal, attention_bias=None, packed_seq_params=None)
    assert ours.shape == (24, 2, 32)
    assert_same(ours, reference_attention(*inputs, outside(24), 8**-0.5).flatten(2), inputs)


def test_module_supports_the_head_sizes_of_latent_attention():
    inputs = tensors(groups=4, width=12, value_width=6)
    core = module(k_channels=12, v_channels=6)
    assert_same(core(*inputs, None), reference_attention(*inputs, outside(24), 12**-0.5).flatten(2), inputs)
    scaled = module(softmax_scale=0.25, k_channels=12, v_channels=6)(*inputs, None)
    assert_same(scaled, reference_attention(*inputs, outside(24), 0.25).flatten(2), inputs)


def test_module_disables_the_window_on_some_layers():
    inputs = tensors()
    settings = {"window_size": (4, 0), "window_attn_skip_freq": 2}
    for layer_number, left in ((1, 4), (2, None)):
        ours = module(layer_number=layer_number, settings=settings)(*inputs, None)
        assert_same(ours, reference_attention(*inputs, outside(24, left=left), 8**-0.5).flatten(2), inputs)


def test_module_applies_each_mask_type():
    inputs = tensors()
    padding = torch.zeros(2, 1, 1, 24, dtype=torch.bool)
    padding[1, ..., 15:] = True
    arbitrary = torch.rand(1, 1, 24, 24, generator=torch.Generator().manual_seed(3)) < 0.5
    arbitrary[..., 0] = False
    nothing = torch.zeros(24, 24, dtype=torch.bool)
    for mask_type, mask, masked in (
        (AttnMaskType.padding, padding, padding),
        (AttnMaskType.arbitrary, arbitrary, arbitrary),
        (AttnMaskType.causal, padding, padding | outside(24)),
        (AttnMaskType.padding_causal, padding, padding | outside(24)),
        (AttnMaskType.no_mask, padding, nothing),
        (AttnMaskType.padding, None, nothing),
    ):
        ours = module()(*inputs, mask, attn_mask_type=mask_type)
        assert_same(ours, reference_attention(*inputs, masked, 8**-0.5).flatten(2), inputs)


@pytest.mark.parametrize("mask_type", [AttnMaskType.causal, AttnMaskType.padding])
def test_module_with_packed_documents(mask_type):
    inputs = tensors(s_q=20, s_k=20, batch=1)
    document = torch.repeat_interleave(torch.arange(3), torch.tensor([9, 1, 10]))
    masked = document[:, None] != document
    masked = masked | outside(20) if mask_type == AttnMaskType.causal else masked
    packed = PackedSequences.of((9, 1, 10), 1, 0)
    assert packed.cu_seqlens_q.tolist() == [0, 9, 10, 20]
    assert packed.positions.tolist() == [*range(9), 0, *range(10)]
    ours = module(mask_type)(*inputs, None, attn_mask_type=mask_type, packed_seq_params=packed)
    assert ours.shape == (20, 1, 32)
    assert_same(ours, reference_attention(*inputs, masked, 8**-0.5).flatten(2), inputs)
    with pytest.raises(LayoutError, match=r"lengths \[9, 7\] .* 20 tokens"):
        module(mask_type)(*inputs, None, packed_seq_params=PackedSequences.of((9, 7), 1, 0))
    with pytest.raises(PlatformError, match="attention_mask; pass None"):
        module()(*inputs, masked, packed_seq_params=packed)


@pytest.mark.parametrize("cp_rank", [0, 1, 2])
def test_the_halves_of_a_packed_row_are_its_queries_and_the_keys_before_them(cp_rank):
    """Against the definition, on the indices of tokens: rank r has chunks r and 2 * cp - 1 - r of each sequence."""
    lengths, starts = (12, 6, 24), (0, 12, 18)
    packed = PackedSequences.of(lengths, 3, cp_rank)
    rows = [packed_positions(lengths, 3, rank) for rank in range(3)]
    local, of_all_ranks = rows[cp_rank], torch.cat(rows)
    queries = []
    for half, number in zip(packed.halves, (cp_rank, 5 - cp_rank), strict=True):
        chunks = [length // 6 for length in lengths]
        ends = [start + (number + 1) * chunk for start, chunk in zip(starts, chunks, strict=True)]
        expected = [range(end - chunk, end) for end, chunk in zip(ends, chunks, strict=True)]
        before = [range(start, end) for start, end in zip(starts, ends, strict=True)]
        assert local[half.queries].tolist() == list(chain(*expected))
        assert of_all_ranks[half.keys].tolist() == list(chain(*before))
        assert half.cu_seqlens_q.diff().tolist() == chunks
        assert half.cu_seqlens_k.diff().tolist() == [(number + 1) * chunk for chunk in chunks]
        assert (half.longest_q, half.longest_k) == (4, (number + 1) * 4)
        queries.append(local[half.queries])
    assert torch.equal(torch.cat(queries)[packed.order], local)


def test_dropout_is_applied_in_training_only():
    torch.manual_seed(0)
    inputs = tensors()
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, num_query_groups=2, sequence_parallel=False
    )
    config.sequence_parallel = True  # the caller has selected the RNG state then
    core = TorchCoreAttention(config, 1, AttnMaskType.causal, "self", attention_dropout=0.5)
    exact = reference_attention(*inputs, outside(24), 8**-0.5).flatten(2)
    many = torch.stack([core(*inputs, None).detach() for _ in range(400)])
    assert not torch.equal(many[0], many[1])
    standard_error = many.std(0) / 400**0.5
    assert ((many.mean(0) - exact).abs() < 5 * standard_error).all()
    torch.testing.assert_close(core.eval()(*inputs, None), exact, **CLOSE)


def test_features_of_transformer_engine_are_refused():
    with pytest.raises(PlatformError, match="attention_bias"):
        module()(*tensors(), None, attention_bias=torch.zeros(1))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_padding_is_masked_as_by_the_attention_that_is_replaced(softcap):
    """Transformer Engine's attention has a `softcap` of 0.0, with which it caps nothing."""
    inputs = tensors()
    replaced = module(softcap=softcap, query_scaling=None)
    if softcap is None:
        replaced = SimpleNamespace(cp_group=None, softcap=0.0, query_scaling=(0.0, 0), softmax_offset=None)
    layer = SimpleNamespace(core_attention=replaced, config=module().config, layer_number=1, training=False)
    is_padding = torch.arange(24) < torch.tensor([[0], [5]])
    ours = TorchCoreAttention.masked(layer, is_padding)(*inputs, None)
    masked = outside(24) | is_padding[:, None, None, :]
    expected = reference_attention(*inputs, masked, 8**-0.5, softcap).flatten(2)
    torch.testing.assert_close(ours[5:], expected[5:], **CLOSE)  # earlier queries of the padded row attend to nothing

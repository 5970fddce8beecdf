"""Attention with sinks, values and gradients, compared with transformers' eager attention of gpt-oss in float64; the
kernel for GPUs is replaced by its documented arithmetic."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_wrap.platform import choose_platform

choose_platform("cpu").install()

from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_wrap.nn.attention import attend as attend_module  # noqa: E402
from megatron_wrap.nn.attention.attend import attend, attend_packed  # noqa: E402
from megatron_wrap.nn.attention.flash import flash_attention_with_sinks  # noqa: E402
from megatron_wrap.nn.attention.packed_sequences import PackedSequences  # noqa: E402
from megatron_wrap.nn.attention.torch_attention import TorchCoreAttention  # noqa: E402

pytestmark = pytest.mark.transformers

SCALE, HEADS, GROUPS = 0.4, 6, 2


def tensors(s_q: int = 24, s_k: int = 24, batch: int = 2, value_width: int = 8) -> list[Tensor]:
    """Query, key, value and sinks."""
    generator = torch.Generator().manual_seed(s_q)
    shapes = [(s_q, batch, HEADS, 8), (s_k, batch, GROUPS, 8), (s_k, batch, GROUPS, value_width), (HEADS,)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def outside(s_q: int, s_k: int, left: int) -> Tensor:
    distance = torch.arange(s_k) - torch.arange(s_k - s_q, s_k)[:, None]
    return (distance > 0) | (distance < -left)


def theirs(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, masked: Tensor) -> Tensor:
    """[s, b, heads, d_v]; masked is broadcastable to [b, heads, s_q, s_k]."""
    from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

    layer = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, sinks=sinks, training=False)
    heads_first = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
    bias = torch.zeros(masked.shape, dtype=torch.float64).masked_fill(masked, -torch.inf)
    return eager_attention_forward(layer, *heads_first, bias, SCALE)[0].transpose(0, 1)


def assert_same(ours: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-12)
    weight = torch.randn(ours.shape, generator=torch.Generator().manual_seed(9), dtype=ours.dtype)
    pairs = (torch.autograd.grad((output * weight).sum(), inputs) for output in (ours, expected))
    for mine, other in zip(*pairs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("value_width", [8, 5])  # 5: without a kernel
@pytest.mark.parametrize("left", [99, 5])
@pytest.mark.parametrize("s_q", [24, 7, 1])
def test_values_and_gradients_are_those_of_transformers(s_q, left, value_width, monkeypatch):
    monkeypatch.setattr(attend_module, "_MIN_WINDOW_BLOCK", 6)
    inputs = tensors(s_q=s_q, value_width=value_width)
    ours = attend(*inputs[:3], causal=True, scale=SCALE, window=(left, 0), sinks=inputs[3])
    assert_same(ours, theirs(*inputs, outside(s_q, 24, left)), inputs)


def test_explicit_masks():
    inputs = tensors()
    padding = torch.zeros(2, 1, 1, 24, dtype=torch.bool)
    padding[1, ..., 15:] = True
    ours = attend(*inputs[:3], causal=True, scale=SCALE, window=(20, 0), mask=padding, sinks=inputs[3])
    assert_same(ours, theirs(*inputs, outside(24, 24, 20) | padding), inputs)


class DocumentedKernel:
    """The arithmetic of torch's flash attention for concatenated sequences (aten, _flash_attention_forward)."""

    def scores(self, query, key, cu_q, cu_k, scale, left):
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        row = torch.repeat_interleave(torch.arange(len(cu_q) - 1), cu_q.diff().long())
        column = torch.repeat_interleave(torch.arange(len(cu_k) - 1), cu_k.diff().long())
        position = torch.arange(len(query)) - cu_q[row] + (cu_k.diff() - cu_q.diff())[row]
        distance = torch.arange(len(key)) - cu_k[column] - position[:, None]
        masked = (row[:, None] != column) | (distance > 0)
        if left >= 0:
            masked |= distance < -left
        return (torch.einsum("qhd,khd->hqk", query, keys) * scale).masked_fill(masked, -torch.inf)

    def forward(self, query, key, value, cu_q, cu_k, longest_q, longest_k, dropout, causal, debug, **named):
        assert (dropout, causal, debug, named["window_size_right"]) == (0.0, True, False, 0)
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert (longest_q, longest_k) == (int(cu_q.diff().max()), int(cu_k.diff().max()))
        scores = self.scores(query, key, cu_q, cu_k, named["scale"], named["window_size_left"])
        values = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return output, scores.logsumexp(-1), None, None, None

    def backward(self, grad, query, key, value, output, total, cu_q, cu_k, _q, _k, dropout, causal, *_, **named):
        """FlashAttention-2 (arXiv:2307.08691), algorithm 2."""
        assert grad.is_contiguous()
        copies = query.shape[1] // key.shape[1]
        scores = self.scores(query, key, cu_q, cu_k, named["scale"], named["window_size_left"])
        weights = (scores - total[..., None]).exp()
        keys, values = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
        sums = (grad * output).sum(-1).t()[..., None]
        of_scores = weights * (torch.einsum("qhd,khd->hqk", grad, values) - sums) * named["scale"]
        of_query = torch.einsum("hqk,khd->qhd", of_scores, keys)
        of_key, of_value = torch.einsum("hqk,qhd->khd", of_scores, query), torch.einsum("hqk,qhd->khd", weights, grad)
        grouped = (each.unflatten(1, (-1, copies)).sum(2) for each in (of_key, of_value))
        return of_query, *grouped


@pytest.fixture
def documented_kernel(monkeypatch):
    kernel = DocumentedKernel()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", kernel.forward, raising=False)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", kernel.backward, raising=False)
    monkeypatch.setattr(attend_module, "has_flash_kernel", lambda *_: True)


@pytest.mark.parametrize("s_q", [24, 7])
@pytest.mark.parametrize("window", [None, (5, 0)])
def test_the_kernel_for_gpus(s_q, window, documented_kernel):
    inputs = tensors(s_q=s_q)
    ours = attend(*inputs[:3], causal=True, scale=SCALE, window=window, sinks=inputs[3])
    assert_same(ours, theirs(*inputs, outside(s_q, 24, 99 if window is None else 5)), inputs)


def test_the_kernel_for_gpus_in_packed_rows(documented_kernel):
    inputs = tensors(batch=1)
    lengths = [5, 12, 7]
    kernel = functools.partial(flash_attention_with_sinks, sinks=inputs[3])
    ours = attend_packed(*inputs[:3], PackedSequences.of(lengths, 1, 0), SCALE, (4, 0), None, kernel)
    document = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))
    masked = outside(24, 24, 4) | (document[:, None] != document)
    assert_same(ours, theirs(*inputs, masked), inputs)


@pytest.mark.parametrize("softmax_type", ["off-by-one", "learnable"])
def test_a_layer_has_the_sinks_of_its_softmax_type(softmax_type):
    choose_platform("cpu").install()  # another test may have uninstalled it
    sizes = {"num_layers": 1, "hidden_size": 48, "num_attention_heads": HEADS, "num_query_groups": GROUPS}
    config = TransformerConfig(**sizes, softmax_type=softmax_type, params_dtype=torch.float64)
    core = TorchCoreAttention(config, 1, AttnMaskType.causal, "self", softmax_scale=SCALE).eval()
    inputs = tensors()
    if softmax_type == "learnable":
        core.softmax_offset.data.copy_(inputs[3].detach())
    sinks = core.softmax_offset if softmax_type == "learnable" else torch.zeros(HEADS, dtype=torch.float64)
    assert_same(core(*inputs[:3], None), theirs(*inputs[:3], sinks, outside(24, 24, 99)).flatten(2), inputs[:3])

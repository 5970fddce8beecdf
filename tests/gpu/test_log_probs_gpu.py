"""The Triton kernels of `ops.log_probs` against float64 on the CPU; skipped without a GPU."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from megatron_wrap.ops.log_probs import token_log_probs


class OneRank:
    """A process group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize("columns", [7, 4096, 5000, 128256])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_kernels_agree_with_float64(columns, dtype, tolerance):
    torch.manual_seed(columns)
    logits = (torch.randn(2, 33, columns) * 4).to(dtype)
    logits[0, 0, columns // 2 :] = torch.finfo(dtype).min / 2  # masked columns, like vocabulary padding
    ids = torch.randint(0, max(1, columns // 2), (2, 33))
    weights = torch.randn(2, 33)
    on_gpu = logits.cuda().requires_grad_()
    actual = token_log_probs(on_gpu, ids.cuda(), OneRank())
    (actual * weights.cuda()).sum().backward()
    wide = logits.double().requires_grad_()
    expected = wide.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1)
    (expected * weights).sum().backward()
    assert actual.dtype == torch.float32
    assert (actual.cpu().double() - expected).norm() / expected.norm() < 1e-6  # computed in fp32 for any dtype
    assert (on_gpu.grad.cpu().double() - wide.grad).norm() / wide.grad.norm() < tolerance


def test_memory_besides_inputs_and_gradient_is_a_few_numbers_per_token():
    rows, columns = 8192, 128256
    logits = torch.randn(1, rows, columns, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ids = torch.randint(0, columns, (1, rows), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_log_probs(logits, ids, OneRank()).sum().backward()
    gradient_bytes = rows * columns * 2
    assert torch.cuda.max_memory_allocated() - before - gradient_bytes < 200 * rows

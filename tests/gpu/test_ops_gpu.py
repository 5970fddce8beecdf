"""Operations on vocabulary-parallel logits on a GPU, against float64 on the CPU, and their memory; skipped without a
GPU."""

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

from megatron_wrap import ops
from megatron_wrap.ops.vocabulary import CHUNK_BYTES, TOKEN_BYTES

KINDS = ("forward", "reverse", "jensen_shannon")
TOKENS, COLUMNS, K = 8192, 128256, 64


class OneRank:
    """A process group of one rank."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ONE_RANK = OneRank()


def operations(ids, known):
    """name -> (function, number of its logits)"""
    table = {
        "token_log_probs": (lambda x: ops.token_log_probs(x, ids[..., 0], ONE_RANK), 1),
        "log_probs_and_entropy": (lambda x: ops.log_probs_and_entropy(x, ids[..., 0], ONE_RANK)[0], 1),
        "gather_log_probs": (lambda x: ops.gather_log_probs(x, ids, ONE_RANK), 1),
        "gather_logits": (lambda x: ops.gather_logits(x, ids, ONE_RANK), 1),
        "logsumexp": (lambda x: ops.logsumexp(x, ONE_RANK), 1),
        "mean_log_probs": (lambda x: ops.mean_log_probs(x, ONE_RANK), 1),
        "token_terms": (lambda x: torch.stack(ops.token_terms(x, ids[..., 0], ONE_RANK)), 1),
        "entropy": (lambda x: ops.entropy(x, ONE_RANK), 1),
        "vocabulary_max": (lambda x: ops.vocabulary_max(x, ONE_RANK), 1),
        "top_k": (lambda x: ops.top_k(x, ids.shape[-1], ONE_RANK).values, 1),
    }
    for kind in KINDS:
        table[kind] = (lambda x, y, kind=kind: ops.kl_divergence(x, y, kind, 2.0, ONE_RANK), 2)
        table[f"{kind} of top-k"] = (lambda x, kind=kind: ops.kl_divergence(x, known, kind, 2.0, ONE_RANK), 1)
    return table


def distinct_ids(tokens: int, columns: int, k: int, device: str) -> torch.Tensor:
    """[1, tokens, k], distinct within a token."""
    start = torch.randint(0, columns, (1, tokens, 1), device=device)
    return (start + torch.arange(k, device=device) * (columns // k)) % columns


NAMES = tuple(operations(torch.zeros(1, 1, 1), None))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("columns", [1000, 128256])
@pytest.mark.parametrize("name", NAMES)
def test_gpu_agrees_with_float64(name, columns, dtype, tolerance):
    torch.manual_seed(columns)
    ids = distinct_ids(17, columns, 5, "cpu")
    values = torch.randn(1, 17, 5)
    logits = [(torch.randn(1, 17, columns) * 3).to(dtype) for _ in range(2)]
    operation, count = operations(ids.cuda(), ops.TopK(values.cuda(), ids.cuda()))[name]
    reference, _ = operations(ids, ops.TopK(values.double(), ids))[name]
    on_gpu = [x.cuda().requires_grad_() for x in logits[:count]]
    wide = [x.double().requires_grad_() for x in logits[:count]]
    actual, expected = operation(*on_gpu), reference(*wide)
    weights = torch.rand(expected.shape) + 0.5
    (actual * weights.cuda()).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=tolerance, atol=tolerance)
    for ours, theirs in zip(on_gpu, wide, strict=True):
        if name in ("top_k", "vocabulary_max"):
            # which of equal bf16 logits gets the gradient is not defined; the sum over them is
            ours, theirs = (x.grad.double().cpu().sum(-1) for x in (ours, theirs))
        else:
            ours, theirs = ours.grad.double().cpu(), theirs.grad
        assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.mark.parametrize("columns", [1000, 128256])
def test_the_entropy_beside_the_log_probs(columns):
    torch.manual_seed(columns)
    logits, ids = torch.randn(1, 17, columns) * 3, torch.randint(columns, (1, 17))
    logits[..., -5:], logits[:, 3, :900] = torch.finfo(torch.float32).min / 2, -torch.inf
    actual = ops.log_probs_and_entropy(logits.cuda(), ids.cuda(), ONE_RANK)[1]
    expected = torch.distributions.Categorical(logits=logits.double().clamp(min=-1e30)).entropy()
    torch.testing.assert_close(actual.cpu().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_memory_at_8192_tokens_and_a_vocabulary_of_128256(name):
    torch.manual_seed(0)
    ids = distinct_ids(TOKENS, COLUMNS, K, "cuda")
    known = ops.TopK(torch.randn(1, TOKENS, K, device="cuda"), ids)
    operation, count = operations(ids, known)[name]
    logits = [torch.randn(1, TOKENS, COLUMNS, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    for x in logits:
        x.requires_grad_()
    bound = CHUNK_BYTES + TOKEN_BYTES * TOKENS
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = operation(*logits)
    outputs = result.nbytes + (ids.nbytes if name == "top_k" else 0)
    forward = torch.cuda.max_memory_allocated() - before - outputs
    grad_out = torch.ones_like(result)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result.backward(grad_out)
    gradients = sum(x.grad.nbytes for x in logits)
    backward = torch.cuda.max_memory_allocated() - before - gradients
    print(f"{name}: forward {forward / 2**20:.1f} MiB besides inputs and outputs, backward {backward / 2**20:.1f} MiB")
    assert forward <= bound
    assert backward <= bound

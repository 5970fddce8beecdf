"""Calls over the vocabulary are found with their line; those over other dimensions and of megatron_wrap.ops are not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatron_wrap.ops.log_probs import token_log_probs
from megatron_wrap.testing.observer import VocabularyCalls

LOGITS, IDS = torch.randn(2, 5, 11), torch.randint(11, (2, 5))


class OneRank:
    size, rank = staticmethod(lambda: 1), staticmethod(lambda: 0)


def calls_of(function: Callable[[Tensor], object]) -> list[str]:
    watched = VocabularyCalls()
    watched.columns = LOGITS.shape[-1]
    with watched:
        function(LOGITS)
    return list(watched.calls.values())


@pytest.mark.parametrize(
    ("function", "name", "replacement"),
    [
        (lambda logits: functional.cross_entropy(logits.flatten(0, 1), IDS.flatten()), "cross_entropy", "-token_log"),
        (lambda logits: torch.nn.CrossEntropyLoss()(logits.mT, IDS), "cross_entropy", "-token_log_probs"),
        (lambda logits: logits.log_softmax(-1), "log_softmax", "token_log_probs(logits, labels)"),
        (lambda logits: functional.softmax(logits, dim=2), "softmax", "token_log_probs(logits, labels).exp()"),
        (lambda logits: torch.logsumexp(logits, -1), "logsumexp", "logsumexp(logits)"),
        (lambda logits: logits.gather(-1, IDS[..., None]), "gather", "gather_logits(logits, id_sets)"),
        (lambda logits: logits.argmax(dim=-1), "argmax", "top_k(logits, 1).ids[..., 0]"),
        (lambda logits: logits.max(-1), "max", "vocabulary_max(logits)"),
        (lambda logits: logits.topk(3), "topk", "top_k(logits, k)"),
    ],
)
def test_a_call_over_the_vocabulary_has_its_line_and_its_replacement(
    function: Callable[[Tensor], object], name: str, replacement: str
) -> None:
    [call] = calls_of(function)
    assert call.startswith(f"test_observer.py:{function.__code__.co_firstlineno} calls {name} over")
    assert f"write {replacement}" in call


@pytest.mark.parametrize(
    "function",
    [
        lambda logits: logits.softmax(1),
        lambda logits: logits[..., 0].max(),
        lambda logits: IDS.topk(2),
        lambda logits: functional.cross_entropy(logits[..., :4].flatten(0, 1), IDS.flatten() % 4),
        lambda logits: token_log_probs(logits, IDS, OneRank()),  # type: ignore[arg-type]
    ],
)
def test_other_calls_are_not_found(function: Callable[[Tensor], object]) -> None:
    assert calls_of(function) == []

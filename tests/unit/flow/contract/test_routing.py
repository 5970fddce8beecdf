"""A recorded routing of samples: collated, or refused if it is of another model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_wrap.errors import DataError
from megatron_wrap.flow.contract.routing import RoutingShape

SHAPE = RoutingShape(layers=(1, 2), num_layers=3, num_experts=4, topk=2, mode="R3")
ROUTING = torch.tensor([[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[3, 1], [-1, -1]]])
EXPERTS = "model.arch.num_experts=4"
CONFIG = Path(__file__).parents[3] / "distributed" / "models.yaml"


def collated(*routings: Any, lengths: tuple[int, ...]) -> Any:
    return SHAPE.collate([{"routed_experts": routing} for routing in routings], torch.tensor(lengths), 4)


def test_routing_is_padded_and_dense_layers_are_left_out() -> None:
    of_all_layers = torch.cat([torch.full((3, 1, 2), 9), ROUTING], dim=1)
    for form in (ROUTING, ROUTING.tolist(), ROUTING.numpy().astype("int16"), of_all_layers):
        batch = collated(form, ROUTING[:2], lengths=(3, 1))
        assert (batch.dtype, batch.shape) == (torch.int16, (2, 4, 2, 2))
        assert (batch[0, :3] == ROUTING).all()
        assert (batch[1, :1] == ROUTING[:1]).all()
        assert (batch[0, 3:] == -1).all()
        assert (batch[1, 1:] == -1).all()
    assert SHAPE.collate([{}, {}], torch.tensor([3, 3]), 4) is None


@pytest.mark.parametrize(
    ("routing", "named"),
    [
        (ROUTING[:1], r"\[1, 2, 2\].*3 input tokens.*\[3, 2, 2\]"),
        (ROUTING[:, :1], r"\[3, 1, 2\].*2 layers with experts"),
        (ROUTING[..., :1], r"\[3, 2, 1\].*2 experts for each token"),
        (ROUTING + 1, "experts from 0 to 4.*0 to 3"),
        (ROUTING - 1, "experts from -2 to 2"),
        (torch.zeros_like(ROUTING), "one expert twice"),
        (ROUTING.float(), "float32"),
        ("experts", "no array of integers"),
        (None, "only some samples"),
    ],
)
def test_routing_of_another_model_is_refused(routing: Any, named: str) -> None:
    with pytest.raises(DataError, match=named):
        collated(ROUTING, routing, lengths=(3, 3))

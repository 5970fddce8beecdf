"""Parameters that are trained whole in addition to adapters (peft's modules_to_save). The parameter is the trained
copy; the original is kept, for checkpoints with the base and for the model without its adapter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

CHILD = "trained_copies"
"""Name of the module in its model chunk."""


@dataclass(frozen=True)
class TrainedCopy:
    """A parameter of a model chunk."""

    parameter: torch.nn.Parameter
    original: Tensor
    """Value in the base, in the parameter's shape and dtype."""


class TrainedCopies(torch.nn.Module):
    """The originals of parameters of a bare model chunk; its buffers are not part of state dicts.

    Args:
        parameters: name in the chunk -> parameter, whose value is the original one.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        super().__init__()
        self._trained = dict(parameters)  # not registered: they are those of the chunk's other modules
        for number, parameter in enumerate(self._trained.values()):
            self.register_buffer(f"original_{number}", parameter.detach().clone(), persistent=False)

    @property
    def by_name(self) -> dict[str, TrainedCopy]:
        """Name in the chunk -> parameter and original."""
        return {
            name: TrainedCopy(parameter, self.get_buffer(f"original_{number}"))
            for number, (name, parameter) in enumerate(self._trained.items())
        }


def trained_copies(model: torch.nn.Module) -> dict[str, TrainedCopy]:
    """Name in a bare model chunk -> parameter that is trained whole; empty without an adapter."""
    copies = dict(model.named_children()).get(CHILD)
    return copies.by_name if isinstance(copies, TrainedCopies) else {}


@contextlib.contextmanager
def originals_in_place(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Within the context the parameters of model chunks have their original values; the trained ones are kept."""
    modules = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TrainedCopies)]
    copies = [copy for module in modules for copy in module.by_name.values()]
    trained = [copy.parameter.data for copy in copies]
    for copy in copies:
        copy.parameter.data = copy.original
    try:
        yield
    finally:
        for copy, values in zip(copies, trained, strict=True):
            copy.parameter.data = values

"""What can be held against a flow's class before anything runs: its methods and what they take."""

from __future__ import annotations

import inspect

from megatron_wrap.errors import FlowError
from megatron_wrap.flow.base import MegatronWrapTrainingFlowBase

_TAKEN = {
    "__init__": ("flow_config", "context"),
    "get_fields_and_seqdims": (),
    "get_pad_values": (),
    "collate_data_micro_batch": ("iterator",),
    "get_loss_weight": ("loss_inputs",),
    "get_loss_coefficients": (),
    "calculate_loss": ("loss_inputs", "model_forward_output"),
    "calculate_outputs": ("loss_inputs", "model_forward_output"),
    "validate_model_forward_inputs": ("model_forward_inputs",),
}
"""Method -> what the engine calls it with, beside self."""


def check_flow_class(flow_class: type[MegatronWrapTrainingFlowBase]) -> None:
    """Hold a flow's class against the contract.

    Raises:
        FlowError: a method is missing, or cannot be called as the engine calls it.
    """
    name = flow_class.__name__
    missing = sorted(getattr(flow_class, "__abstractmethods__", ()))
    if missing:
        words = " and ".join(f"{method}(self, {', '.join(_TAKEN.get(method, ()))})" for method in missing)
        raise FlowError(f"flow {name} does not implement {words}; see docs/flow-contract.md for what to return")
    for method, taken in _TAKEN.items():
        _check_arguments(name, method, getattr(flow_class, method), taken)


def _check_arguments(name: str, method: str, function: object, taken: tuple[str, ...]) -> None:
    if not callable(function):
        raise FlowError(f"{name}.{method} is {function!r}; write it as a method")
    try:
        inspect.signature(function).bind(None, *taken)
    except TypeError as error:
        wanted = ", ".join(("self", *taken))
        raise FlowError(
            f"{name}.{method} takes {inspect.signature(function)}, but the engine calls it with {len(taken)} "
            f"arguments; write def {method}({wanted}) ({error})"
        ) from None
    except ValueError:  # a built-in without a signature to read
        return

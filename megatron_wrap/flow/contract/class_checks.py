"""Validation of a flow's class before anything runs: its methods and their signatures."""

from __future__ import annotations

import inspect

from megatron_wrap.errors import ConfigError, FlowError
from megatron_wrap.flow.contract.base import MegatronWrapTrainingFlowBase

_HELPERS = {
    "average_loss_across_dp_ranks",
    "token_mean",
    "sequence_mean",
    "sum_per_sequence",
    "sum_on_cp_group",
    "gather_on_cp_group",
}
_ARGUMENTS = {
    name: tuple(inspect.signature(method).parameters)[1:]
    for name, method in vars(MegatronWrapTrainingFlowBase).items()
    if inspect.isfunction(method) and (name == "__init__" or not name.startswith("_")) and name not in _HELPERS
}
"""Method that the engine calls -> the arguments that the engine passes, besides self."""
_ON_ROWS = ("calculate_loss", "calculate_outputs", "calculate_step_values")
"""Methods that get packed rows."""


def check_flow_class(flow_class: type[MegatronWrapTrainingFlowBase]) -> None:
    """Validate a flow's class against the contract.

    Raises:
        FlowError: a method is missing, or cannot be called as the engine calls it.
    """
    name = flow_class.__name__
    missing = sorted(getattr(flow_class, "__abstractmethods__", ()))
    if missing:
        signatures = " and ".join(f"{method}(self, {', '.join(_ARGUMENTS.get(method, ()))})" for method in missing)
        raise FlowError(f"flow {name} does not implement {signatures}; see docs/flow-contract.md for what to return")
    for method, arguments in _ARGUMENTS.items():
        _check_arguments(name, method, getattr(flow_class, method), arguments)


def packing_refusal(flow_class: type[MegatronWrapTrainingFlowBase]) -> str:
    """Why a flow cannot run on packed rows; empty if it can.

    A declaration of `supports_packing` holds for the methods of its class and of the classes above it: a class that
    overrides a method of `_ON_ROWS` declares it again, because only its author knows the sums of the new method.
    """
    name = flow_class.__name__
    if not flow_class.supports_packing:
        return f"{name} does not declare supports_packing"
    for base in flow_class.__mro__:
        if "supports_packing" in vars(base):
            return ""
        for method in _ON_ROWS:
            if method in vars(base):
                return f"{base.__name__} defines {method} and does not declare supports_packing itself"
    return ""


def check_packing(flow_class: type[MegatronWrapTrainingFlowBase], where: str) -> None:
    """Validate that a flow can run on packed rows.

    Args:
        where: the key that requests it, with its file and line.

    Raises:
        ConfigError: it does not declare `supports_packing`.
    """
    reason = packing_refusal(flow_class)
    if reason:
        raise ConfigError(
            f"{where}: true, but {reason}; sum over the tokens of each sequence with "
            "self.sum_per_sequence(per_token, loss_inputs), not per_token.sum(dim=1), write supports_packing = True in "
            "the class, and run megatron-wrap check-parity with --layouts packed; or set packing: false"
        )


def check_multi_token_prediction(flow_class: type[MegatronWrapTrainingFlowBase], where: str) -> None:
    """Validate that losses of multi-token prediction can be added to a flow's.

    Args:
        where: the key that requests them, with its file and line.

    Raises:
        ConfigError: it does not declare `supports_multi_token_prediction`.
    """
    if not flow_class.supports_multi_token_prediction:
        raise ConfigError(
            f"{where}: {flow_class.__name__} has no loss of the next token to which those of multi-token prediction "
            "could be added; set megatron_lm.model.arch.mtp_loss_scaling_factor to 0, which keeps the layers without "
            "training them, or mtp_num_layers to null"
        )


def _check_arguments(name: str, method: str, function: object, arguments: tuple[str, ...]) -> None:
    if not callable(function):
        raise FlowError(f"{name}.{method} is {function!r}; write it as a method")
    try:
        inspect.signature(function).bind(None, *arguments)
    except TypeError as error:
        expected = ", ".join(("self", *arguments))
        raise FlowError(
            f"{name}.{method} takes {inspect.signature(function)}, but the engine calls it with {len(arguments)} "
            f"arguments; write def {method}({expected}) ({error})"
        ) from None
    except ValueError:  # a built-in without a signature
        return

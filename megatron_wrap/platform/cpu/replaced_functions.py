"""The functions of Megatron-Core that are replaced so that it runs on CPUs, after a check of their signatures."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed

from megatron_wrap.platform.megatron_core import versions
from megatron_wrap.platform.megatron_core.undoable_changes import Replacements

# `Tensor.type()` strings that the optimizers compare with -> the strings of CPU tensors.
_TYPE_NAMES = {
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}

Users = Callable[[Callable[..., Any]], Sequence[tuple[types.ModuleType, str]]]
"""Function that returns (module, name) for each name under which the modules of Megatron-Core refer to a function."""


def replace_functions(users: Users, replacements: Replacements) -> None:
    """Import the modules of `_PATCHES`, and replace their functions in every loaded module of Megatron-Core."""
    patched = [importlib.import_module(name) for name in _PATCHES]
    for module, patch in zip(patched, _PATCHES.values(), strict=True):
        patch(module, users, replacements)


def _replace_function(
    module: types.ModuleType,
    name: str,
    replacement: Callable[..., Any],
    users: Users,
    replacements: Replacements,
) -> Any:
    """Replace a function in every loaded module of Megatron-Core that refers to it; returns the original."""
    original = getattr(module, name, None)
    if original is None:
        raise versions.unexpected(f"{module.__name__} has no {name}")
    expected, actual = (list(inspect.signature(function).parameters) for function in (replacement, original))
    if expected != actual:
        raise versions.unexpected(f"{module.__name__}.{name} takes ({', '.join(actual)}), not ({', '.join(expected)})")
    for user, alias in users(original):
        replacements.set(user, alias, replacement)
    return original


def _patch_type_names(module: types.ModuleType, users: Users, replacements: Replacements) -> None:
    """Replace strings such as "torch.cuda.FloatTensor" in a module's compiled functions. The optimizers check dtypes
    with `Tensor.type()`, which includes the device. Changing the code objects reaches every reference to a function."""
    changed = 0
    for function in _functions_of(module):
        code = _with_cpu_type_names(function.__code__)
        if code is not function.__code__:
            replacements.set(function, "__code__", code)
            changed += 1
    if not changed:
        raise versions.unexpected(f"{module.__name__} has no comparison with {', '.join(_TYPE_NAMES)}")


def _functions_of(module: types.ModuleType) -> Iterator[types.FunctionType]:
    for value in list(vars(module).values()):
        members = list(vars(value).values()) if isinstance(value, type) else [value]
        for member in members:
            function = inspect.unwrap(member.__func__ if isinstance(member, classmethod | staticmethod) else member)
            if isinstance(function, types.FunctionType) and function.__module__ == module.__name__:
                yield function


def _with_cpu_type_names(code: types.CodeType) -> types.CodeType:
    constants = tuple(_cpu_constant(constant) for constant in code.co_consts)
    same = all(new is old for new, old in zip(constants, code.co_consts, strict=True))
    return code if same else code.replace(co_consts=constants)


def _cpu_constant(constant: Any) -> Any:
    if isinstance(constant, types.CodeType):
        return _with_cpu_type_names(constant)
    if isinstance(constant, str):
        return _TYPE_NAMES.get(constant, constant)
    if isinstance(constant, tuple | frozenset):
        changed = [_cpu_constant(item) for item in constant]
        return constant if all(a is b for a, b in zip(changed, constant, strict=True)) else type(constant)(changed)
    return constant


def _patch_rng(module: types.ModuleType, users: Users, replacements: Replacements) -> None:
    """Make Megatron-Core's RNG tracker use the CPU generator."""

    def _get_cuda_rng_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def _set_cuda_rng_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    _replace_function(module, "_get_cuda_rng_state", _get_cuda_rng_state, users, replacements)
    _replace_function(module, "_set_cuda_rng_state", _set_cuda_rng_state, users, replacements)


def _patch_mappings(module: types.ModuleType, users: Users, replacements: Replacements) -> None:
    """Make gather and reduce-scatter accept unequal sizes, as experts with tensor parallelism need: NCCL can, gloo
    cannot."""

    def _gather_along_first_dim(
        input_: torch.Tensor, group: Any, output_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if output_split_sizes is None or group.size() == 1:
            return equal_gather(input_, group, output_split_sizes, use_global_buffer)
        sizes = [int(size) for size in output_split_sizes]
        padded = input_.new_zeros((max(sizes), *input_.shape[1:]))
        padded[: input_.shape[0]] = input_
        parts = [torch.empty_like(padded) for _ in sizes]
        torch.distributed.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def _reduce_scatter_along_first_dim(
        input_: torch.Tensor, group: Any, input_split_sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if input_split_sizes is None or group.size() == 1:
            return equal_scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone()
        torch.distributed.all_reduce(total, group=group)
        return total.split([int(size) for size in input_split_sizes])[group.rank()].contiguous()

    equal_gather = _replace_function(module, "_gather_along_first_dim", _gather_along_first_dim, users, replacements)
    equal_scatter = _replace_function(
        module, "_reduce_scatter_along_first_dim", _reduce_scatter_along_first_dim, users, replacements
    )


def _patch_moe_utils(module: types.ModuleType, users: Users, replacements: Replacements) -> None:
    """Convert split sizes to numpy arrays without a device-to-host copy."""

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    _replace_function(module, "maybe_move_tensor_to_cpu", maybe_move_tensor_to_cpu, users, replacements)


_PATCHES: dict[str, Callable[[types.ModuleType, Users, Replacements], None]] = {
    "megatron.core.optimizer.clip_grads": _patch_type_names,
    "megatron.core.optimizer.optimizer": _patch_type_names,
    "megatron.core.optimizer.distrib_optimizer": _patch_type_names,
    "megatron.core.tensor_parallel.random": _patch_rng,
    "megatron.core.tensor_parallel.mappings": _patch_mappings,
    "megatron.core.transformer.moe.moe_utils": _patch_moe_utils,
}

"""CPU processes over gloo: makes Megatron-Core run without CUDA.

Megatron-Core's modules get a proxy of `torch` (`torch_view.py`). The proxy's `cuda` reports no GPU and the CPU as the
current device, and its tensor factories treat device="cuda" as "cpu". An import hook injects the proxy into modules
that are imported later, before their code runs, together with an `__import__` that hides Transformer Engine and other
CUDA packages. In modules that are already imported, the names are rebound.

The host program's `torch` and imports do not change, except for three Tensor methods that behave differently when
Megatron-Core calls them. A few of Megatron-Core's functions are replaced after a check of their signatures. `uninstall`
restores everything except the malloc thresholds (`heap.py`).
"""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from megatron_wrap.errors import PlatformError
from megatron_wrap.platform.base.platform import GIB, NEEDS_CUDA, WITHOUT_FUSED_KERNELS, Platform
from megatron_wrap.platform.cpu.gloo import share_device
from megatron_wrap.platform.cpu.heap import keep_freed_memory
from megatron_wrap.platform.cpu.torch_view import MegatronFinder, TorchView, replace_tensor_methods
from megatron_wrap.platform.megatron_core import adam, repairs, versions
from megatron_wrap.platform.megatron_core.replacements import Replacements

# Packages whose classes and functions Megatron-Core binds when it is imported.
_BOUND_AT_IMPORT = frozenset({"transformer_engine", "transformer_engine_torch", "apex", "amp_C"})

# `Tensor.type()` strings that the optimizers compare with -> the strings of CPU tensors.
_TYPE_NAMES = {
    "torch.cuda.FloatTensor": "torch.FloatTensor",
    "torch.cuda.HalfTensor": "torch.HalfTensor",
    "torch.cuda.BFloat16Tensor": "torch.BFloat16Tensor",
}


class CpuPlatform(Platform):
    """CPU processes; see the module docstring."""

    name = "cpu"
    backend = "gloo"

    def __init__(self) -> None:
        super().__init__()
        self._view = TorchView()  # reused by a later install: imported modules keep a reference to it

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def has_transformer_engine(self) -> bool:
        """False: its kernels need CUDA."""
        return False

    def _install(self, replacements: Replacements, environment: Mapping[str, str]) -> None:
        if any(isinstance(finder, MegatronFinder) for finder in sys.meta_path):
            return  # another CpuPlatform is installed in this process
        loaded = self._view.megatron_modules()
        _refuse_loaded_cuda_packages([module for module in loaded if not self._view.is_known(module)])
        keep_freed_memory()
        share_device(replacements)
        finder = MegatronFinder(self._view)
        sys.meta_path.insert(0, finder)
        replacements.callback(lambda: sys.meta_path.remove(finder))
        self._view.active = True
        replacements.callback(self._view.deactivate)
        for module in loaded:
            self._view.rebind(module, replacements)
        replace_tensor_methods(replacements)
        with repairs.quiet_import():
            patched = [importlib.import_module(name) for name in _PATCHES]
            for module, patch in zip(patched, _PATCHES.values(), strict=True):
                patch(module, self._view.users, replacements)
            adam.use_in_megatron(replacements)
            repairs.repair(replacements)

    def seed(self, seed: int) -> None:
        """Seed the CPU's generator. `torch.manual_seed` would also keep the stack of this call for each kind of device
        that is not in use, for the time when it is: 5 ms."""
        torch.default_generator.manual_seed(seed)

    def synchronize(self) -> None:
        """No-op: CPU operations are synchronous."""

    def empty_cache(self) -> None:
        """No-op: there is no cache."""

    def memory_gib(self) -> dict[str, float]:
        """Resident memory of this process in GiB: current (as both allocated and reserved) and peak."""
        import psutil

        now = psutil.Process().memory_info().rss / GIB
        peak = _peak_bytes() / GIB
        return {"memory_allocated": now, "memory_reserved": now, "memory_max": max(peak, now)}

    def total_memory_bytes(self) -> int:
        """Memory of the host, which its processes share."""
        import psutil

        return int(psutil.virtual_memory().total)

    def transformer_config_settings(
        self, pipeline_size: int, virtual_size: int | None, transformer_engine: bool
    ) -> dict[str, Any]:
        """See `Platform.transformer_config_settings`.

        Raises:
            PlatformError: the layers are to use Transformer Engine.
        """
        if transformer_engine:
            raise PlatformError(
                "transformer_impl transformer_engine needs a GPU; on platform cpu choose transformer_impl torch or auto"
            )
        settings: dict[str, Any] = {**WITHOUT_FUSED_KERNELS, "deallocate_pipeline_outputs": False}
        if pipeline_size > 1 and virtual_size is not None and virtual_size > 1:
            # As on GPUs. With two stages a batch would hold two messages between the same two ranks. gloo matches
            # messages in posting order, which would swap them.
            settings.update(overlap_p2p_comm=True, batch_p2p_comm=False)
        return settings

    def missing_for_fp8(self, recipe: str) -> str | None:
        """See `Platform.missing_for_fp8`."""
        return "it needs a GPU, this is platform cpu"

    def refuse_unsafe(self, settings: Mapping[str, Any], transformer_engine: bool = False) -> None:
        """See `Platform.refuse_unsafe`; also refuses batched p2p communication between two interleaved stages."""
        super().refuse_unsafe(settings, transformer_engine)
        stages = settings.get("pipeline_model_parallel_size", 1)
        chunks = settings.get("virtual_pipeline_model_parallel_size")
        expected = self.transformer_config_settings(stages, chunks, False) if stages == 2 else {}
        for name, value in expected.items():
            if name.endswith("_p2p_comm") and settings.get(name, value) != value:
                raise PlatformError(
                    f"{name}={settings[name]!r} with 2 pipeline stages of {chunks} chunks gives wrong results on "
                    f"platform cpu; omit it or set {value!r}"
                )

    def _safe_values(self, transformer_engine: bool) -> dict[str, tuple[Any, ...]]:
        return {**super()._safe_values(False), **NEEDS_CUDA}


def _refuse_loaded_cuda_packages(loaded: Sequence[types.ModuleType]) -> None:
    """Raise PlatformError if Megatron-Core has imported names from CUDA packages. The modules' HAVE_TE flags are no
    evidence: some are true without Transformer Engine (`multi_latent_attention.py`)."""
    for module in loaded:
        for name, value in list(vars(module).items()):
            source = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
            package = source.partition(".")[0] if isinstance(source, str) else ""
            if package in _BOUND_AT_IMPORT:
                raise PlatformError(
                    f"platform cpu was selected after {module.__name__} had imported {name} from {package}; call "
                    "MegatronWrap.initialize() before the first import of megatron.core, or select platform cuda"
                )


# --- replacements of Megatron-Core's functions ------------------------------------------------------------------------

Users = Callable[[Callable[..., Any]], Sequence[tuple[types.ModuleType, str]]]
"""Function -> the modules in which it has a name, with that name."""


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


def _peak_bytes() -> int:
    """Largest resident memory of this process in bytes. On Linux it is read from /proc: getrusage(2) also counts the
    memory of the process that started this one."""
    import resource

    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _patch_mappings(module: types.ModuleType, users: Users, replacements: Replacements) -> None:
    """Gather and reduce-scatter unequal sizes, as experts with tensor parallelism need: NCCL can, gloo cannot."""

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

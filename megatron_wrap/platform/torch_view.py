"""Megatron-Core's own view of `torch` and of the import statement on the CPU platform; see `platform/cpu.py`."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_wrap.errors import PlatformError
from megatron_wrap.platform.replacements import Replacements
from megatron_wrap.platform.versions import TRITON_MODULES

# CUDA packages that Megatron-Core uses where they import; on this platform it must not find them.
HIDDEN_PACKAGES = {
    *("transformer_engine", "transformer_engine_torch", "apex", "amp_C", "fused_weight_gradient_mlp_cuda", "triton"),
    *("flash_attn", "flash_attn_3", "flash_mla", "flashinfer", "grouped_gemm", "deep_ep", "nvidia_kitchen"),
    *("mamba_ssm", "causal_conv1d"),
}

_FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
)


def is_megatron(module_name: str) -> bool:
    """Whether a dotted module name belongs to Megatron-Core."""
    return module_name.startswith("megatron.")


def megatron_modules() -> list[types.ModuleType]:
    """Megatron-Core's modules that this process has imported so far."""
    return [module for name, module in list(sys.modules.items()) if is_megatron(name) and module is not None]


class _Proxy(types.ModuleType):
    """A module's attributes with some replaced."""

    def __init__(self, real: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        missing = [name for name in replaced if not hasattr(real, name)]
        if missing:
            raise PlatformError(
                f"{real.__name__} {torch.__version__} has no {', '.join(missing)}; use torch 2.10 to 2.13"
            )
        self.__dict__.update(replaced, __spec__=real.__spec__, _megatron_wrap_real=real)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_megatron_wrap_real"], name)


class _NoStream:
    """Stands for torch.cuda.Stream and torch.cuda.Event: work is in order already."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def _nothing(self, *arguments: Any, **named: Any) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, event: Any = None) -> _NoStream:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def _cuda_replacements() -> dict[str, Any]:
    stream = _NoStream()
    cpu = torch.device("cpu")
    seed_all = torch.default_generator.manual_seed
    return {
        "is_available": lambda: False,
        "is_initialized": lambda: False,
        "device_count": lambda: 0,
        "current_device": lambda: cpu,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "Stream": _NoStream,
        "Event": _NoStream,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
        "manual_seed": seed_all,
        "manual_seed_all": seed_all,
        "memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "max_memory_reserved": lambda device=None: 0,
    }


def _factory_on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def wrapper(*arguments: Any, **named: Any) -> torch.Tensor:
        device = named.get("device")
        if device is not None and torch.device(device).type == "cuda":
            named["device"] = "cpu"
        named.pop("pin_memory", None)
        return factory(*arguments, **named)

    return wrapper


def _no_compile(model: Any = None, **options: Any) -> Any:
    """torch.compile as a decorator, with and without arguments: small helpers stay eager and need no compiler."""
    return (lambda function: function) if model is None else model


class TorchView:
    """What Megatron-Core's modules see instead of torch and of the import statement, while active."""

    def __init__(self) -> None:
        self.active = False
        cuda = _Proxy(torch.cuda, _cuda_replacements())
        replaced = {name: _factory_on_cpu(getattr(torch, name)) for name in _FACTORIES}
        view = _Proxy(torch, {**replaced, "cuda": cuda, "compile": _no_compile})
        self._of: dict[int, Any] = {id(torch): view, id(torch.cuda): cuda}
        for name, value in _cuda_replacements().items():
            self._of[id(getattr(torch.cuda, name))] = value  # for names that were imported from torch.cuda
        # A copy of the builtins with two of them looked up late, for whoever replaces them later.
        self.builtins = dict(vars(builtins), __import__=self._import, print=_print)

    def deactivate(self) -> None:
        """Modules that were imported with this view see torch and every package again."""
        self.active = False
        for module in megatron_modules():
            for name, value in list(vars(module).items()):
                if isinstance(value, _Proxy):
                    setattr(module, name, value.__dict__["_megatron_wrap_real"])

    def take_over(self, module: types.ModuleType, replacements: Replacements) -> None:
        """Rebind torch's names, and unwrap compiled functions, in a module that was imported before."""
        for name, value in list(vars(module).items()):
            if id(value) in self._of:
                replacements.set(module, name, self._of[id(value)])
            elif isinstance(value, type) and value.__module__ == module.__name__:
                for attribute, member in list(vars(value).items()):
                    _unwrap_compiled(value, attribute, member, replacements)
            else:
                _unwrap_compiled(module, name, value, replacements)

    def _import(
        self,
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        """`__import__` of Megatron-Core's modules."""
        if self.active and level == 0 and name.partition(".")[0] in HIDDEN_PACKAGES:
            raise ModuleNotFoundError(f"{name} is hidden from Megatron-Core on platform cpu", name=name)
        module = builtins.__import__(name, globals, locals, fromlist or (), level)
        return self._of.get(id(module), module) if self.active else module


def _unwrap_compiled(owner: Any, name: str, value: Any, replacements: Replacements) -> None:
    if isinstance(value, types.FunctionType) and "_torchdynamo_orig_callable" in vars(value):
        replacements.set(owner, name, vars(value)["_torchdynamo_orig_callable"])


def _print(*arguments: Any, **named: Any) -> None:
    builtins.print(*arguments, **named)  # noqa: T201


class MegatronFinder(importlib.abc.MetaPathFinder):
    """Finds Megatron-Core's modules as the other finders do and gives them the view before they run."""

    def __init__(self, view: TorchView) -> None:
        self.view = view

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The spec of the next finder with a loader that installs the view; None for a module of another package."""
        if not is_megatron(name):
            return None
        if name in TRITON_MODULES:
            return importlib.util.spec_from_loader(name, _NoKernelsLoader())
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self.view)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Another loader that gives the module its builtins first: `import torch` is then answered by the view."""

    def __init__(self, loader: Any, view: TorchView) -> None:
        self._loader = loader
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        if self._view.active:
            module.__dict__["__builtins__"] = self._view.builtins
        self._loader.exec_module(module)


class _NoKernelsLoader(importlib.abc.Loader):
    """A module of Triton kernels in which every name is None."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name, "Triton kernels, absent on platform cpu.")
        module.__dict__["__getattr__"] = _none_unless_special
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _none_unless_special(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)


def replace_tensor_methods(replacements: Replacements) -> None:
    """`cuda`, `pin_memory` and `record_stream` of a CPU tensor do nothing when Megatron-Core calls them."""
    answers: dict[str, Callable[[torch.Tensor], Any]] = {
        "cuda": lambda tensor: tensor,
        "pin_memory": lambda tensor: tensor,
        "record_stream": lambda tensor: None,
    }
    for name, answer in answers.items():
        replacements.set(torch.Tensor, name, _unless_megatron_calls(getattr(torch.Tensor, name), answer))


def _unless_megatron_calls(method: Callable[..., Any], answer: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if self.device.type == "cpu" and is_megatron(sys._getframe(1).f_globals.get("__name__") or ""):
            return answer(self)
        return method(self, *arguments, **named)

    return wrapper

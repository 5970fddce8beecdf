"""The proxies of `torch` and of `import` that Megatron-Core's modules get on the CPU platform; see `platform.py`."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron_wrap.errors import PlatformError
from megatron_wrap.platform.megatron_core.undoable_changes import Replacements
from megatron_wrap.platform.megatron_core.versions import TRITON_MODULES

# Packages that Megatron-Core uses if it can import them, hidden from it on this platform: those of CUDA, and loggers of
# its training loop and inference engines, whose import takes 0.9 s.
HIDDEN_PACKAGES = {
    *("transformer_engine", "transformer_engine_torch", "apex", "amp_C", "fused_weight_gradient_mlp_cuda", "triton"),
    *("flash_attn", "flash_attn_3", "flash_mla", "flashinfer", "grouped_gemm", "deep_ep", "nvidia_kitchen"),
    *("mamba_ssm", "causal_conv1d"),
    *("wandb", "torch.utils.tensorboard"),
}

_MEGATRON = "megatron."
_COMPILED = "_torchdynamo_orig_callable"
"""Attribute of torch.compile's result that holds the original function."""
_FACTORIES = (
    *("tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "linspace", "eye"),
    *("rand", "randn", "randint", "randperm"),
    *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"),
)


def is_megatron(module_name: str) -> bool:
    """Whether a dotted module name belongs to Megatron-Core."""
    return module_name.startswith(_MEGATRON)


class _Imported:
    """Finds the imported modules of Megatron-Core. The thousands of other modules are read once, not at each
    installation: in a forked process, reading them copies as many pages."""

    def __init__(self) -> None:
        self._names: dict[str, None] = {}
        self._newest = ""  # the last name of sys.modules, where new ones are added, when it was read

    def modules(self) -> list[types.ModuleType]:
        """Modules of Megatron-Core that have been imported so far."""
        try:
            new = [*itertools.takewhile(lambda name: name != self._newest, reversed(sys.modules))]
        except RuntimeError:  # another thread imports
            new = list(sys.modules)[::-1]
        self._newest = new[0] if new else self._newest
        self._names |= dict.fromkeys(name for name in reversed(new) if name.startswith(_MEGATRON))
        return [module for name in self._names if (module := sys.modules.get(name)) is not None]


class _Record(NamedTuple):
    """Record of an imported module, so that another installation need not read it again."""

    num_names: int
    rebound: list[tuple[Any, str, Any, Any]]
    """(module or class, name, value of the name, replacement) of each name to rebind."""
    functions: frozenset[int]
    """Ids of the functions that the module's names refer to."""

    def fits(self, module: types.ModuleType) -> bool:
        """Whether the module has not changed since the record was made."""
        if self.num_names != len(vars(module)):
            return False
        values = ((vars(owner).get(name), old, new) for owner, name, old, new in self.rebound)
        return all(value is old or value is new for value, old, new in values)


class _ModuleProxy(types.ModuleType):
    """A module with some attributes replaced."""

    def __init__(self, real: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(real.__name__, real.__doc__)
        missing = [name for name in replaced if not hasattr(real, name)]
        if missing:
            raise PlatformError(
                f"{real.__name__} {torch.__version__} has no {', '.join(missing)}; use torch 2.11 to 2.13"
            )
        # a module's `__getattr__`, without a frame of Python at each access
        forwarded = functools.partial(getattr, real)
        self.__dict__.update(replaced, __spec__=real.__spec__, _megatron_wrap_real=real, __getattr__=forwarded)


class _DummyStream:
    """Replaces torch.cuda.Stream and torch.cuda.Event by no-ops: CPU operations run in order."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def _no_op(self, *arguments: Any, **named: Any) -> None:
        pass

    wait_stream = wait_event = wait = record = synchronize = _no_op

    def record_event(self, event: Any = None) -> _DummyStream:
        return self

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: Any) -> float:
        return 0.0


def _cuda_replacements() -> dict[str, Any]:
    stream = _DummyStream()
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
        "Stream": _DummyStream,
        "Event": _DummyStream,
        "current_stream": lambda device=None: stream,
        "default_stream": lambda device=None: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda new_state, device="cuda": torch.set_rng_state(new_state),
        "manual_seed": seed_all,
        "manual_seed_all": seed_all,
        **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda device=None: 0),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda device=None: 0),
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


def _eager(model: Any = None, **options: Any) -> Any:
    """Replaces torch.compile, as a decorator with or without arguments: helpers run eagerly and need no compiler."""
    return (lambda function: function) if model is None else model


class TorchView:
    """Replacements for torch and `__import__` in Megatron-Core's modules, in effect while `active`."""

    def __init__(self) -> None:
        self.active = False
        self._imported = _Imported()
        self._imported_while_active: list[types.ModuleType] = []
        self._records: dict[types.ModuleType, _Record] = {}
        cuda = _ModuleProxy(torch.cuda, _cuda_replacements())
        replaced = {name: _factory_on_cpu(getattr(torch, name)) for name in _FACTORIES}
        view = _ModuleProxy(torch, {**replaced, "cuda": cuda, "compile": _eager})
        self._replacement_by_id: dict[int, Any] = {id(torch): view, id(torch.cuda): cuda}
        for name, value in _cuda_replacements().items():
            self._replacement_by_id[id(getattr(torch.cuda, name))] = value  # for `from torch.cuda import ...`
        # `_import` and `_print` look up the builtins at each call, so later replacements of these take effect.
        self.builtins = dict(vars(builtins), __import__=self._import, print=_print)

    def deactivate(self) -> None:
        """Rebind torch itself in the modules that were imported while active, and stop hiding packages."""
        self.active = False
        for module in self._imported_while_active:
            self._records.pop(module, None)
            for name, value in list(vars(module).items()):
                if isinstance(value, _ModuleProxy):
                    setattr(module, name, value.__dict__["_megatron_wrap_real"])
        self._imported_while_active.clear()

    def imported(self, module: types.ModuleType) -> None:
        """Record a module of Megatron-Core that is about to run while active."""
        self._imported_while_active.append(module)

    def megatron_modules(self) -> list[types.ModuleType]:
        """The modules of Megatron-Core imported so far."""
        return self._imported.modules()

    def is_known(self, module: types.ModuleType) -> bool:
        """Whether an earlier installation has read this module, and the module has not changed since."""
        record = self._records.get(module)
        return record is not None and record.fits(module)

    def rebind(self, module: types.ModuleType, replacements: Replacements) -> None:
        """Rebind torch's names, and unwrap compiled functions, in a module that is already imported."""
        for owner, name, _, replacement in self._record(module).rebound:
            replacements.set(owner, name, replacement)

    def users(self, function: Callable[..., Any]) -> list[tuple[types.ModuleType, str]]:
        """(module, name) for each name under which the modules of Megatron-Core refer to a function."""
        modules = [module for module in self.megatron_modules() if id(function) in self._record(module).functions]
        return [(module, name) for module in modules for name, value in vars(module).items() if value is function]

    def _record(self, module: types.ModuleType) -> _Record:
        if not self.is_known(module):
            values = list(vars(module).items())
            functions = frozenset(id(value) for _, value in values if isinstance(value, types.FunctionType))
            self._records[module] = _Record(len(values), list(self._rebound(module)), functions)
        return self._records[module]

    def _rebound(self, module: types.ModuleType) -> Iterator[tuple[Any, str, Any, Any]]:
        for name, value in list(vars(module).items()):
            if id(value) in self._replacement_by_id:
                yield module, name, value, self._replacement_by_id[id(value)]
            elif isinstance(value, type) and value.__module__ == module.__name__:
                for attribute, member in list(vars(value).items()):
                    if _is_compiled(member):
                        yield value, attribute, member, vars(member)[_COMPILED]
            elif _is_compiled(value):
                yield module, name, value, vars(value)[_COMPILED]

    def _import(
        self,
        name: str,
        globals: Any = None,
        locals: Any = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> types.ModuleType:
        """The `__import__` of Megatron-Core's modules."""
        if self.active and level == 0 and not HIDDEN_PACKAGES.isdisjoint((name, name.partition(".")[0])):
            raise ModuleNotFoundError(f"{name} is hidden from Megatron-Core on platform cpu", name=name)
        module = builtins.__import__(name, globals, locals, fromlist or (), level)
        return self._replacement_by_id.get(id(module), module) if self.active else module


def _is_compiled(value: Any) -> bool:
    return isinstance(value, types.FunctionType) and _COMPILED in vars(value)


def _print(*arguments: Any, **named: Any) -> None:
    builtins.print(*arguments, **named)  # noqa: T201


class MegatronFinder(importlib.abc.MetaPathFinder):
    """Import hook that finds Megatron-Core's modules with the other finders and injects the view before they run."""

    def __init__(self, view: TorchView) -> None:
        self.view = view

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """The next finder's spec with a loader that injects the view; None for modules of other packages."""
        if not is_megatron(name):
            return None
        if name in TRITON_MODULES:
            return importlib.util.spec_from_loader(name, _StubLoader())
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, self.view)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Wraps a loader to set the module's builtins first, so that its `import torch` returns the view."""

    def __init__(self, loader: Any, view: TorchView) -> None:
        self._loader = loader
        self._view = view

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        if self._view.active:
            self._view.imported(module)
            module.__dict__["__builtins__"] = self._view.builtins
        self._loader.exec_module(module)


class _StubLoader(importlib.abc.Loader):
    """Replaces a module of Triton kernels by a module in which every name is None."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name, "Triton kernels, absent on platform cpu.")
        module.__dict__["__getattr__"] = _none_for_any_name
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def _none_for_any_name(name: str) -> None:
    if name.startswith("__"):
        raise AttributeError(name)


def replace_tensor_methods(replacements: Replacements) -> None:
    """Make `cuda`, `pin_memory` and `record_stream` of CPU tensors no-ops when called by Megatron-Core."""
    no_ops: dict[str, Callable[[torch.Tensor], Any]] = {
        "cuda": lambda tensor: tensor,
        "pin_memory": lambda tensor: tensor,
        "record_stream": lambda tensor: None,
    }
    for name, no_op in no_ops.items():
        replacements.set(torch.Tensor, name, _no_op_for_megatron(getattr(torch.Tensor, name), no_op))


def _no_op_for_megatron(method: Callable[..., Any], no_op: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: torch.Tensor, *arguments: Any, **named: Any) -> Any:
        if self.device.type == "cpu" and is_megatron(sys._getframe(1).f_globals.get("__name__") or ""):
            return no_op(self)
        return method(self, *arguments, **named)

    return wrapper

"""Plug-ins by name: registered with a decorator, offered by an installed package, or `module.path:Attribute`."""

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Generic, TypeVar

from megatron_wrap.errors import ConfigError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a key of the YAML to a class or function.

    Args:
        kind: what is registered, for messages ("flow", "model provider", ...).
        entry_point_group: installed packages may offer more through this Python entry point group.
        builtin: key -> "module.path:Attribute" of the shipped ones, imported on first use.
    """

    def __init__(self, kind: str, entry_point_group: str, builtin: dict[str, str]) -> None:
        self.kind = kind
        self.entry_point_group = entry_point_group
        self._targets: dict[str, str | T] = dict(builtin)

    def register(self, key: str) -> Callable[[T], T]:
        """Decorator that makes the decorated object available as `key`; a key is taken once."""

        def decorate(target: T) -> T:
            known = self._targets.get(key)
            if known is not None and known is not target:
                raise ConfigError(f"{self.kind} {key!r} is registered already ({known}); choose another key")
            self._targets[key] = target
            return target

        return decorate

    def keys(self) -> list[str]:
        """All keys that `resolve` takes beside `module:Attribute`, sorted."""
        offered = {point.name for point in importlib.metadata.entry_points(group=self.entry_point_group)}
        return sorted(offered | set(self._targets))

    def resolve(self, key: str) -> T:
        """The registered object of `key`, importing it when needed.

        Raises:
            ConfigError: no such key, module or attribute; the message lists the keys and the nearest one.
        """
        if ":" in key:
            return self._import(key)
        target = self._targets.get(key)
        if isinstance(target, str):
            return self._import(target)
        if target is not None:
            return target
        for point in importlib.metadata.entry_points(group=self.entry_point_group):
            if point.name == key:
                return self._import(point.value)
        known = self.keys()
        raise ConfigError(
            f"unknown {self.kind} {key!r}{did_you_mean(key, known) or '.'} Known: {', '.join(known)}; or write "
            "my_package.my_module:Name"
        )

    def _import(self, path: str) -> T:
        module_name, _, attribute = path.partition(":")
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name and not module_name.startswith(error.name):
                raise  # the module is there; something that it needs is not
            raise ConfigError(
                f"{self.kind} {path!r}: module {module_name!r} cannot be found; is its folder on PYTHONPATH?"
            ) from error
        try:
            return getattr(module, attribute)
        except AttributeError as error:
            raise ConfigError(f"{self.kind} {path!r}: module {module_name!r} has no {attribute!r}") from error

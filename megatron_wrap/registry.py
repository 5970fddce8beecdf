"""Plug-ins by name: registered with a decorator, an entry point of an installed package, or `module.path:Attribute`."""

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Generic, TypeVar

from megatron_wrap.errors import ConfigError
from megatron_wrap.nearest_names import did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a key of the YAML to a class or function.

    Args:
        kind: noun for the registered objects in error messages ("flow", "model provider", ...).
        entry_point_group: Python entry point group in which installed packages register more.
        builtin: key -> "module.path:Attribute" of the built-in plug-ins, imported on first use.
    """

    def __init__(self, kind: str, entry_point_group: str, builtin: dict[str, str]) -> None:
        self.kind = kind
        self.entry_point_group = entry_point_group
        self._targets: dict[str, str | T] = dict(builtin)

    def register(self, key: str) -> Callable[[T], T]:
        """Decorator that registers an object as `key`; raises ConfigError if another object has that key."""

        def decorate(target: T) -> T:
            known = self._targets.get(key)
            if known is not None and known is not target:
                raise ConfigError(f"{self.kind} {key!r} is already registered ({known}); choose another key")
            self._targets[key] = target
            return target

        return decorate

    def __contains__(self, key: str) -> bool:
        """Whether a key is registered or comes from an entry point; the metadata of all packages is read only for the
        latter."""
        return key in self._targets or key in self.keys()

    def keys(self) -> list[str]:
        """All keys, registered or from entry points, sorted."""
        from_packages = {point.name for point in importlib.metadata.entry_points(group=self.entry_point_group)}
        return sorted(from_packages | set(self._targets))

    def resolve(self, key: str) -> T:
        """The object registered as `key`, imported if necessary.

        Raises:
            ConfigError: no such key, module or attribute; the message lists the keys and suggests the closest.
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
            if error.name and not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module exists but one of its own imports is missing
            raise ConfigError(
                f"{self.kind} {path!r}: module {module_name!r} was not found; check that its folder is on PYTHONPATH"
            ) from error
        except SystemExit as end:
            raise ConfigError(
                f"{self.kind} {path!r}: module {module_name!r} calls sys.exit({end.code or 0}) when it is imported; "
                "move what it runs as a program below `if __name__ == '__main__':`"
            ) from end
        try:
            return getattr(module, attribute)
        except AttributeError as error:
            raise ConfigError(f"{self.kind} {path!r}: module {module_name!r} has no {attribute!r}") from error

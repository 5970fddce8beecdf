"""Recorded changes of foreign objects (monkey-patches) that can be undone."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from types import TracebackType
from typing import Any


class Replacements:
    """Sets attributes of foreign objects and records their previous values, so that `undo` can restore them. As a
    context manager, it undoes them on exit."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def __enter__(self) -> Replacements:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`setattr(owner, name, value)`, reverted by `undo`, which deletes an attribute that a class inherits."""
        if isinstance(owner, type) and name not in vars(owner):
            self._undo.append(lambda: delattr(owner, name))
        elif hasattr(owner, name):
            previous = vars(owner).get(name, getattr(owner, name))  # vars: getattr would unwrap a classmethod
            self._undo.append(lambda: setattr(owner, name, previous))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def on_undo(self, action: Callable[[], object]) -> None:
        """Run `action` in `undo`, which reverts changes and runs actions in reverse order."""
        self._undo.append(action)

    def keep_item(self, mapping: MutableMapping[str, Any], key: str) -> None:
        """Make `undo` restore the current item of a mapping, such as an environment variable, or its absence."""
        value = mapping.get(key)
        self.on_undo(lambda: mapping.pop(key, None) if value is None else mapping.update({key: value}))

    def undo(self) -> None:
        """Revert everything, the last change first."""
        while self._undo:
            self._undo.pop()()

"""Changes of objects that are not ours, recorded so that all can be undone."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


class Replacements:
    """Attributes set on objects that are not ours, kept with what they were so that all can be put back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """`setattr(owner, name, value)`; undone by `undo`. An attribute that a class inherits is deleted again."""
        if isinstance(owner, type) and name not in vars(owner):
            self._undo.append(lambda: delattr(owner, name))
        elif hasattr(owner, name):
            previous = vars(owner).get(name, getattr(owner, name))  # vars: a classmethod stays one
            self._undo.append(lambda: setattr(owner, name, previous))
        else:
            self._undo.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    def on_undo(self, action: Callable[[], object]) -> None:
        """Run `action` when all is put back, in reverse order."""
        self._undo.append(action)

    def keep_variable(self, name: str) -> None:
        """Whatever becomes of an environment variable, `undo` gives it back what it is now."""
        value = os.environ.get(name)
        self.on_undo(lambda: os.environ.pop(name, None) if value is None else os.environ.update({name: value}))

    def undo(self) -> None:
        """Put everything back, the last change first."""
        while self._undo:
            self._undo.pop()()

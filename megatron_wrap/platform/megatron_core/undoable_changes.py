"""Recorded changes of foreign objects (monkey-patches) that can be undone."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import ExitStack
from typing import Any


class Replacements(ExitStack):
    """Sets attributes of foreign objects and records their previous values. `close` and the end of a `with` block
    restore them, the last change first."""

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute as `setattr(owner, name, value)`. `close` reverts it, and deletes an attribute that a class
        inherits."""
        if isinstance(owner, type) and name not in vars(owner):
            self.callback(delattr, owner, name)
        elif hasattr(owner, name):
            previous = vars(owner).get(name, getattr(owner, name))  # vars: getattr would unwrap a classmethod
            self.callback(setattr, owner, name, previous)
        else:
            self.callback(delattr, owner, name)
        setattr(owner, name, value)

    def keep_item(self, mapping: MutableMapping[str, Any], key: str) -> None:
        """Make `close` restore the current item of a mapping, such as an environment variable, or its absence."""
        value = mapping.get(key)
        self.callback(lambda: mapping.pop(key, None) if value is None else mapping.update({key: value}))

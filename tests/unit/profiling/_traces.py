"""Events of Chrome traces."""

from __future__ import annotations

from typing import Any

MAIN = 7


def event(category: str, name: str, start: float, end: float, thread: int = MAIN, **args: Any) -> dict[str, Any]:
    """Something that lasts, on a thread."""
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": start, "dur": end - start, "args": args}

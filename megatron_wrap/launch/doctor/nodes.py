"""One report from the answers of all nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_wrap.core.validation.validations import Item
from megatron_wrap.launch.doctor.checks import Answer
from megatron_wrap.parallel.nodes import difference_of

_SHOWN_NODES = 4
"""Whose different answers a line without an error shows."""


class NodeAnswers(NamedTuple):
    """What the checks found on a node."""

    node: str
    answers: Sequence[Answer]


def merged(nodes: Sequence[NodeAnswers]) -> list[Item]:
    """A line for each check; a node that differs, or has a warning or an error, is named if there are several."""
    names = dict.fromkeys(answer.name for node in nodes for answer in node.answers)
    return [item for name in names for item in _of_check(name, nodes)]


def _of_check(name: str, nodes: Sequence[NodeAnswers]) -> list[Item]:
    items: list[Item] = []
    good: dict[str, str] = {}
    bad: dict[tuple[str, str], list[str]] = {}
    severity = "ok"
    for node, answers in nodes:
        for answer in answers:
            if answer.name == name and answer.status == "ok":
                good[node] = f"{good[node]}; {answer.text}" if node in good else answer.text
                severity = answer.if_nodes_differ
            elif answer.name == name:
                bad.setdefault((answer.status, answer.text), []).append(node)
    for (status, text), where in bad.items():
        # an answer for all nodes needs no name
        prefix = "" if len(nodes) == 1 or len(where) == len(nodes) else f"{', '.join(where)}: "
        items.append(Item(status, name, prefix + text))  # type: ignore[arg-type]
    if bad and len(nodes) > 1:
        return items
    difference = difference_of(list(good), list(good.values())) if good else None
    if difference is None and good:
        items.append(Item("ok", name, next(iter(good.values()))))
    elif difference is not None and severity != "ok":
        items.append(Item(severity, name, difference))  # type: ignore[arg-type]
    elif difference is not None:
        shown = [f"{node}: {text}" for node, text in list(good.items())[:_SHOWN_NODES]]
        more = [f"{len(good) - _SHOWN_NODES} more nodes"] if len(good) > _SHOWN_NODES else []
        items.append(Item("ok", name, "; ".join([*shown, *more])))
    return items

"""What a check of a node is, and one report from the answers of all nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from megatron_wrap.config import RunConfig
from megatron_wrap.core.validation.validations import Item
from megatron_wrap.parallel.nodes import difference_of

Status = Literal["ok", "warning", "error"]
_SHOWN_NODES = 4
"""Whose different answers a line without an error shows."""


@dataclass(frozen=True)
class Subject:
    """This node, and the run that it is examined for."""

    config: RunConfig | None = None
    """None: no run, and what depends on one is not checked."""
    processes: int = 1
    """Of the run, on this node."""
    world_size: int = 1
    """Processes of the run, over all nodes."""
    num_nodes: int = 1

    @property
    def save(self) -> Path | None:
        """The folder of checkpoints; None: there is none."""
        folder = None if self.config is None else self.config.train.save
        return None if folder is None else Path(folder).expanduser().absolute()


class Finding(NamedTuple):
    """One thing that a check has seen."""

    text: str
    """With a warning or an error: what is wrong, with the numbers; then what to do."""
    status: Status = "ok"


class Check(NamedTuple):
    """Something that is looked at on each node."""

    name: str
    look: Callable[[Subject], Iterable[Finding]]
    """Returns nothing where there is nothing to look at."""
    if_nodes_differ: Status = "ok"
    """What it is when a node's text is another one."""
    is_quick: bool = True
    """Takes milliseconds and imports no torch, so that `megatron-wrap train` begins with it."""


class Answer(NamedTuple):
    """A finding of a check, as a node sends it to the others."""

    name: str
    text: str
    status: Status
    if_nodes_differ: Status = "ok"


class NodeAnswers(NamedTuple):
    """What the checks found on a node."""

    node: str
    answers: Sequence[Answer]


def answers(checks: Iterable[Check], subject: Subject) -> list[Answer]:
    """What the checks find on this node."""
    return [Answer(check.name, *finding, check.if_nodes_differ) for check in checks for finding in check.look(subject)]


def merged(nodes: Sequence[NodeAnswers]) -> list[Item]:
    """A line for each check; a node that differs, or has a warning or an error, is named if there are several."""
    names = dict.fromkeys(answer.name for node in nodes for answer in node.answers)
    return [item for name in names for item in _of_check(name, nodes)]


def _of_check(name: str, nodes: Sequence[NodeAnswers]) -> list[Item]:
    of_nodes = [(node, answer) for node, answers in nodes for answer in answers if answer.name == name]
    items, good = [], dict[str, str]()
    for status, text in dict.fromkeys((answer.status, answer.text) for _, answer in of_nodes):
        where = dict.fromkeys(node for node, answer in of_nodes if (answer.status, answer.text) == (status, text))
        if status == "ok":
            good |= {node: f"{good[node]}; {text}" if node in good else text for node in where}
        else:  # an answer for all nodes needs no name
            items.append(Item(status, name, text if len(where) == len(nodes) else f"{', '.join(where)}: {text}"))
    if not good or (items and len(nodes) > 1):
        return items
    difference, severity = difference_of(list(good), list(good.values())), of_nodes[0][1].if_nodes_differ
    if difference is None:
        return [*items, Item("ok", name, next(iter(good.values())))]
    if severity != "ok":
        return [*items, Item(severity, name, difference)]
    shown = [f"{node}: {text}" for node, text in list(good.items())[:_SHOWN_NODES]]
    more = [f"{len(good) - _SHOWN_NODES} more nodes"] if len(good) > _SHOWN_NODES else []
    return [*items, Item("ok", name, "; ".join([*shown, *more]))]

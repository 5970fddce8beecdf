"""The checks of a node, and one report from the answers of all nodes."""

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
"""Largest number of nodes whose different answers are shown in a line without an error."""


@dataclass(frozen=True)
class Subject:
    """The node to examine, and the run that it is examined for."""

    config: RunConfig | None = None
    """The run's configuration; None: there is no run, and checks that depend on one are skipped."""
    processes: int = 1
    """Number of processes of the run on this node."""
    world_size: int = 1
    """Number of processes of the run, over all nodes."""
    num_nodes: int = 1

    @property
    def save(self) -> Path | None:
        """The folder of checkpoints; None: the run saves none."""
        folder = None if self.config is None else self.config.train.save
        return None if folder is None else Path(folder).expanduser().absolute()


class Finding(NamedTuple):
    """One result of a check."""

    text: str
    """Description of the result; for a warning or an error, what is wrong, with the numbers, then what to do."""
    status: Status = "ok"


class Check(NamedTuple):
    """One check that is made on each node."""

    name: str
    look: Callable[[Subject], Iterable[Finding]]
    """Function that returns the findings about a subject; empty where there is nothing to check."""
    if_nodes_differ: Status = "ok"
    """Status of the check when the texts of the nodes differ."""
    is_quick: bool = True
    """Whether the check takes milliseconds and imports no torch, so that `megatron-wrap train` begins with it."""


class Answer(NamedTuple):
    """A finding of a check, as a node sends it to the others."""

    name: str
    text: str
    status: Status
    if_nodes_differ: Status = "ok"


class NodeAnswers(NamedTuple):
    """Answers of the checks on a node."""

    node: str
    answers: Sequence[Answer]


def answers(checks: Iterable[Check], subject: Subject) -> list[Answer]:
    """Answers of the checks on this node."""
    return [Answer(check.name, *finding, check.if_nodes_differ) for check in checks for finding in check.look(subject)]


def merged(nodes: Sequence[NodeAnswers]) -> list[Item]:
    """A line for each check. Of several nodes, those that differ or have a warning or an error are named."""
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

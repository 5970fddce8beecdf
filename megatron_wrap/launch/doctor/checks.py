"""What a check of a node is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_wrap.config import RunConfig

Status = Literal["ok", "warning", "error"]


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
    node_rank: int = 0
    master_address: str = "127.0.0.1"
    master_port: int = 0
    """0: any free one."""
    launcher: str = "local"
    have_met: bool = False
    """The nodes are connected already, by torchrun's agents."""

    @property
    def meets(self) -> frozenset[str]:
        """The values of `Check.needs` that it has."""
        config = self.config
        present = {
            "config": config is not None,
            "save": config is not None and config.train.save is not None,
            "nodes": self.num_nodes > 1,
            "meeting": self.num_nodes > 1 and not self.have_met,
        }
        return frozenset(name for name, is_present in present.items() if is_present)


class Finding(NamedTuple):
    """One thing that a check has seen."""

    text: str
    """With a warning or an error: what is wrong, with the numbers; then what to do."""
    status: Status = "ok"


@dataclass(frozen=True)
class Check:
    """Something that is looked at on each node."""

    name: str
    look: Callable[[Subject], Iterable[Finding]]
    needs: tuple[Literal["config", "save", "nodes", "meeting"], ...] = ()
    """Without them there is nothing to look at."""
    is_quick: bool = True
    """Takes milliseconds and imports no torch, so that `megatron-wrap train` begins with it."""
    if_nodes_differ: Status = "ok"
    """What it is when a node's text is another one."""


class Answer(NamedTuple):
    """A finding of a check, as a node sends it to the others."""

    name: str
    text: str
    status: Status
    if_nodes_differ: Status = "ok"


def answers(checks: Iterable[Check], subject: Subject) -> list[Answer]:
    """What the checks that have something to look at find on this node."""
    results = []
    for check in checks:
        if subject.meets.issuperset(check.needs):
            results += [Answer(check.name, *finding, check.if_nodes_differ) for finding in check.look(subject)]
    return results

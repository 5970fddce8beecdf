"""The report of `check_parity`: one row for each layout, as a table and as plain values."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from megatron_wrap.metrics.number_format import counted


@dataclass(frozen=True)
class LayoutVerdict:
    """One row of the report."""

    layout: str
    processes: int
    agrees: bool | None
    """Whether the layout agrees; None: it was skipped, and `note` has the reason."""
    objective_difference: float = math.nan
    """Largest relative difference of the objective over the steps."""
    metric_difference: float = math.nan
    gradient_difference: float = math.nan
    """Relative difference of the gradient of `worst_parameter`."""
    worst_parameter: str = ""
    worst_metric: str = ""
    """The metric with the largest disagreement, and both values; empty if all agree."""
    gradient_ratio: float = math.nan
    """Least-squares factor between this layout's gradient and the reference's, over all parameters; 1 if they agree."""
    router_loss_difference: float = math.nan
    """Largest difference of the router losses, which are not part of the objective; nan for a dense model."""
    note: str = ""


@dataclass(frozen=True)
class ParityReport:
    """All rows, and notes on the flow itself."""

    flow: str
    rows: list[LayoutVerdict]
    notes: list[str] = field(default_factory=list)
    platform: str = "cpu"

    @property
    def agrees(self) -> bool:
        """Whether every layout that ran agrees."""
        return all(row.agrees is not False for row in self.rows)

    def table(self) -> str:
        """The report as a table for the console."""
        where = "" if self.platform == "cpu" else f", on {self.platform}"
        lines = [f"parity of {self.flow} with one process{where}", ""]
        width = max([14, *(len(row.layout) for row in self.rows)])
        lines.append(f"{'layout':<{width}} {'ranks':>5}  {'objective':>9}  {'metrics':>9}  {'gradients':>9}")
        for row in self.rows:
            mark = {True: "agrees", False: "DISAGREES", None: "left out"}[row.agrees]
            numbers = [row.objective_difference, row.metric_difference, row.gradient_difference]
            shown = "  ".join(f"{'-' if math.isnan(number) else format(number, '.1e'):>9}" for number in numbers)
            routers = "" if math.isnan(row.router_loss_difference) else f"; routers' {row.router_loss_difference:.1e}"
            lines.append(f"{row.layout:<{width}} {row.processes:>5}  {shown}  {mark}{routers}")
            if row.agrees is False and row.worst_parameter:
                lines.append(f"{'':>{width}} worst: {row.worst_parameter}; gradient ratio {row.gradient_ratio:.6g}")
            if row.worst_metric:
                lines.append(f"{'':>{width}} metric {row.worst_metric}")
            if row.note:
                lines.append(f"{'':>{width}} {row.note}")
        lines += ["", *self.notes] if self.notes else []
        ran = [row for row in self.rows if row.agrees is not None]
        right = sum(bool(row.agrees) for row in ran)
        verdict = "" if self.agrees else ": the flow is NOT layout-invariant"
        lines.append(f"{right} of {counted(len(ran), 'layout')} {'agrees' if right == 1 else 'agree'}{verdict}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """The report as plain values; nan and infinite numbers are None."""
        rows = [
            {
                key: None if isinstance(value, float) and not math.isfinite(value) else value
                for key, value in row.items()
            }
            for row in map(asdict, self.rows)
        ]
        return {"flow": self.flow, "platform": self.platform, "agrees": self.agrees, "rows": rows, "notes": self.notes}

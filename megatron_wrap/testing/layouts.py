"""Names of parallel layouts, such as `tp2-sp-pp2`, as overrides of a configuration."""

from __future__ import annotations

import re
from dataclasses import dataclass

from megatron_wrap.errors import ConfigError

PARALLEL = "megatron_lm.model.parallel"
_SIZES = {
    "tp": f"{PARALLEL}.tensor_model_parallel_size",
    "pp": f"{PARALLEL}.pipeline_model_parallel_size",
    "cp": f"{PARALLEL}.context_parallel_size",
    "vpp": f"{PARALLEL}.virtual_pipeline_model_parallel_size",
}

DEFAULT_LAYOUTS = (
    "mbs1",
    "padded",
    "dp2",
    "dp2-dopt",
    "tp2",
    "tp2-sp",
    "pp2",
    "pp2-vpp2",
    "cp2",
    "tp2-sp-pp2",
    "tp2-sp-cp2",
    "tp2-sp-dp2",
    "pp2-dp2",
    "cp2-dp2",
    "pp2-cp2",
)
"""What `check-parity` runs: every kind of parallelism, their pairs, another cut into micro-batches, more padding."""


@dataclass(frozen=True)
class LayoutCase:
    """One way to run the same step."""

    name: str
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    vpp: int = 1
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    micro_batch_size: int | None = None
    """None: the reference's."""
    extra_padding: bool = False

    @property
    def processes(self) -> int:
        """Ranks that the layout takes."""
        return self.tp * self.pp * self.cp * self.dp

    def overrides(self) -> tuple[str, ...]:
        """The layout as overrides of a configuration."""
        values = [f"{path}={getattr(self, axis)}" for axis, path in _SIZES.items() if axis != "vpp"]
        values.append(f"{PARALLEL}.sequence_parallel={str(self.sequence_parallel).lower()}")
        values.append(f"{_SIZES['vpp']}={self.vpp if self.vpp > 1 else 'null'}")
        values.append(
            f"megatron_lm.train.optimizer.use_distributed_optimizer={str(self.distributed_optimizer).lower()}"
        )
        if self.micro_batch_size is not None:
            values.append(f"megatron_lm.train.common.micro_batch_size={self.micro_batch_size}")
        return tuple(values)


def parse_layout(name: str) -> LayoutCase:
    """The layout of a name: parts joined by `-`, each `tpN`, `ppN`, `cpN`, `dpN`, `vppN`, `sp` (sequence parallel),
    `dopt` (distributed optimizer), `mbsN` (micro-batch size) or `padded` (sequences padded further).

    Raises:
        ConfigError: a part that is none of these.
    """
    fields: dict[str, int | bool] = {}
    for part in name.split("-"):
        match = re.fullmatch(r"(tp|pp|cp|dp|vpp|mbs)([1-9]\d*)", part)
        if match:
            fields["micro_batch_size" if match[1] == "mbs" else match[1]] = int(match[2])
        elif part in ("sp", "dopt", "padded"):
            key = {"sp": "sequence_parallel", "dopt": "distributed_optimizer", "padded": "extra_padding"}[part]
            fields[key] = True
        else:
            raise ConfigError(
                f"layout {name!r}: {part!r} is unknown; write parts such as tp2, sp, pp2, vpp2, cp2, dp2, dopt, mbs1 "
                "or padded, joined by '-'"
            )
    return LayoutCase(name, **fields)  # type: ignore[arg-type]

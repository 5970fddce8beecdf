"""Parallel layouts by their names, as overrides."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod
from types import MappingProxyType

PARALLEL = "megatron_lm.model.parallel."
SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "first": "decoder_first_pipeline_num_layers",
    "last": "decoder_last_pipeline_num_layers",
}
DISTRIBUTED = ("megatron_lm.train.optimizer.use_distributed_optimizer=true",)
OVERLAP = (
    *DISTRIBUTED,
    "megatron_lm.misc.ddp.overlap_grad_reduce=true",
    "megatron_lm.misc.ddp.overlap_param_gather=true",
)
PACKED = ("megatron_wrap.flow.packing=true",)
SWITCHES = {
    "one": (),
    "nosp": (f"{PARALLEL}sequence_parallel=false",),
    "dopt": DISTRIBUTED,
    "overlap": OVERLAP,
    "packed": PACKED,
}


def layout(name: str, switches: Mapping[str, tuple[str, ...]] = MappingProxyType({})) -> tuple[int, tuple[str, ...]]:
    """Number of processes and overrides of names such as tp2-pp2 and dp2-ep2; expert parallelism uses the processes of
    the other axes, and tensor parallelism is sequence parallel without `nosp`.

    Args:
        switches: further parts of names.
    """
    sizes, overrides = {}, []
    for part in name.split("-"):
        sized = re.fullmatch(r"([a-z]+)(\d+)", part)
        if sized is None or part in switches:
            overrides += {**SWITCHES, **switches}[part]
            continue
        sizes[sized[1]] = int(sized[2])
        overrides += [f"{PARALLEL}{SIZES[sized[1]]}={sized[2]}"] if sized[1] in SIZES else []
    count = prod(sizes.get(axis, 1) for axis in ("tp", "pp", "cp", "dp"))
    return max(count, sizes.get("ep", 1)), tuple(overrides)

"""Writes a run's adapter as a folder that peft loads. Collective over all ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.bridge.export.weight_stream import WeightStream
from megatron_wrap.parallel.agreement import agreed
from megatron_wrap.utils.atomic_write import atomic_file, write_atomically

if TYPE_CHECKING:
    from megatron_wrap.parallel.state import ParallelState

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def save_adapter(
    stream: WeightStream,
    peft_values: dict[str, Any],
    parallel: ParallelState,
    folder: str | os.PathLike[str],
    tokenizer: Any = None,
    copies: Mapping[str, str] | None = None,
) -> Path:
    """Write adapter_model.safetensors and adapter_config.json, on rank 0; the latter last.

    Args:
        stream: of the factors, under peft's names.
        peft_values: content of adapter_config.json.
        folder: on a file system that all ranks share.
        tokenizer: saved with the adapter; None: no tokenizer.
        copies: name of a further tensor -> that of the tensor which it is equal to.

    Raises:
        CheckpointError: on every rank, if rank 0 could not write.
    """
    target = Path(folder).expanduser()
    # collective; an adapter is small enough for the memory of rank 0
    whole: dict[str, Any] = {name: tensor.cpu() if parallel.world.rank == 0 else None for name, tensor in stream}
    with agreed(f"no adapter could be written to {target}: {{}}"):
        if parallel.world.rank == 0:
            from safetensors.torch import save

            whole |= {copy: whole[name].clone() for copy, name in (copies or {}).items()}
            target.mkdir(parents=True, exist_ok=True)
            with atomic_file(target / WEIGHTS) as file:
                file.write(save(whole, metadata={"format": "pt"}))
            if tokenizer is not None:
                tokenizer.save_pretrained(str(target))
            write_atomically(target / CONFIG, json.dumps(peft_values, indent=2, ensure_ascii=False) + "\n")
    return target

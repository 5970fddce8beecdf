"""What commands that load a model in this single process share: a temporary run file, and a layout of one process."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PARALLEL = "megatron_lm.model.parallel."
_TRAIN = "megatron_lm.train.common."

SINGLE = (
    *(f"{_PARALLEL}{kind}_parallel_size=1" for kind in ("tensor_model", "pipeline_model", "context", "expert_model")),
    *(
        f"{_PARALLEL}{key}=null"
        for key in (
            "expert_tensor_parallel_size",
            "sequence_parallel",
            "num_layers_per_virtual_pipeline_stage",
            "virtual_pipeline_model_parallel_size",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
        )
    ),
    *(f"{_TRAIN}{key}=null" for key in ("save", "save_interval", "load", "rampup_batch_size")),
)
"""Overrides that reduce any run to one process without checkpoints."""


@contextmanager
def run_file(content: Mapping[str, Any]) -> Iterator[Path]:
    """Path of a temporary run file with this content, deleted when the context exits."""
    with tempfile.TemporaryDirectory(prefix="megatron-wrap-") as folder:
        path = Path(folder, "run.yaml")
        path.write_text(json.dumps(content), encoding="utf-8")  # JSON is YAML
        yield path

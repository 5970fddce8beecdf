"""What commands that work in this single process share: a temporary run file, a layout of one process, and the flow
without a process group."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_wrap.config import RunConfig
from megatron_wrap.errors import ConfigError

if TYPE_CHECKING:
    from megatron_wrap.flow import MegatronWrapTrainingFlowBase

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


def vocabulary_size(config: RunConfig, tokenizer: Any) -> int:
    """The model's vocabulary size, without padding; ConfigError if it is not known."""
    vocab_size = config.arch.vocab_size
    if vocab_size is None and tokenizer is None:
        raise ConfigError("megatron_lm.model.arch.vocab_size is null and there is no tokenizer; set one of the two")
    return len(tokenizer) if vocab_size is None else vocab_size


def flow_of_one_rank(config: RunConfig, tokenizer: Any) -> MegatronWrapTrainingFlowBase:
    """The run's flow with micro-batches of one sample, to encode samples; no process group is needed.

    Raises:
        ConfigError: the vocabulary size is not known.
    """
    from megatron_wrap.flow import FlowContext, MegatronWrapFlowEntry
    from megatron_wrap.flow.config import decode_flow_config

    vocab_size = vocabulary_size(config, tokenizer)
    flow_class = MegatronWrapFlowEntry.get_flow_class(config.flow.flow_key)
    context = FlowContext(
        micro_batch_size=1,
        seq_length=config.train.seq_length,
        vocab_size=vocab_size,
        cp_size=1,
        sum_on_cp_group=lambda partial: partial,
        average_across_dp_ranks=lambda value: value,
        tokenizer=tokenizer,
        sources=tuple(source.name for source in config.data.train),
    )
    return flow_class(decode_flow_config(flow_class, config), context)

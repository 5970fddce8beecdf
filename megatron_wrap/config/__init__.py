"""Configuration: a run's YAML read strictly over the tree `configs/nest` into frozen dataclasses."""

from megatron_wrap.config.decode import load_resolved, load_run_config, write_resolved
from megatron_wrap.config.schema.run import RunConfig

__all__ = ["RunConfig", "load_resolved", "load_run_config", "write_resolved"]

"""Import path `megatron_wrap.core.config`; the code is in `megatron_wrap.config`."""

from megatron_wrap.config import RunConfig, load_resolved, load_run_config, write_resolved

__all__ = ["RunConfig", "load_resolved", "load_run_config", "write_resolved"]

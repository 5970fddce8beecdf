"""Import path `megatron_wrap.core.model`; the code is in `megatron_wrap.model`."""

from megatron_wrap.model import MegatronModelProviderEntry, ModelRequest

__all__ = ["MegatronModelProviderEntry", "ModelRequest"]

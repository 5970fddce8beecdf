"""Model providers, Megatron-Core's configuration of the model, and initial weights."""

from megatron_wrap.model.provider import MegatronModelProviderEntry
from megatron_wrap.model.request import ModelRequest

__all__ = ["MegatronModelProviderEntry", "ModelRequest"]

"""Models: the tree's architecture as Megatron-Core's configuration, providers, and initial weights."""

from megatron_wrap.model.provider import MegatronModelProviderEntry
from megatron_wrap.model.request import ModelRequest

__all__ = ["MegatronModelProviderEntry", "ModelRequest"]

"""Models: the tree's architecture as Megatron-Core's configuration, providers, and initial weights."""

from megatron_wrap.model.provider import MegatronModelProviderEntry, ModelRequest

__all__ = ["MegatronModelProviderEntry", "ModelRequest"]

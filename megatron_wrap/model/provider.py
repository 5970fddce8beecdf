"""Model providers: functions that build one model chunk, registered by `provider_key`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_wrap.config.schema import derived
from megatron_wrap.model.request import ModelRequest
from megatron_wrap.registry import Registry

ModelProvider = Callable[[ModelRequest], torch.nn.Module]

_PROVIDERS: Registry[ModelProvider] = Registry(
    "model provider",
    "megatron_wrap.model_providers",
    {
        "gpt_model": "megatron_wrap.model.gpt_provider:gpt_model_provider",
        derived.VALUE_PROVIDER: "megatron_wrap.model.gpt_provider:gpt_value_model_provider",
    },
)


class MegatronModelProviderEntry:
    """Providers by key: built-in, registered, from entry points, or `my_package.my_module:my_provider`."""

    @staticmethod
    def register(provider_key: str) -> Callable[[Any], Any]:
        """Decorator that registers a function (ModelRequest) -> torch.nn.Module as `provider_key`."""
        return _PROVIDERS.register(provider_key)

    @staticmethod
    def get_provider(provider_key: str) -> ModelProvider:
        """The provider registered as `provider_key`; `ConfigError` if unknown."""
        return _PROVIDERS.resolve(provider_key)

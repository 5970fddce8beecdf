"""Model providers: functions that build one model chunk, found by `provider_key`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_wrap.model.request import ModelRequest
from megatron_wrap.registry import Registry

ModelProvider = Callable[[ModelRequest], torch.nn.Module]

_PROVIDERS: Registry[ModelProvider] = Registry(
    "model provider", "megatron_wrap.model_providers", {"gpt_model": "megatron_wrap.model.gpt:gpt_model_provider"}
)


class MegatronModelProviderEntry:
    """Providers by key: shipped ones, registered ones, `my_package.my_module:my_provider` and entry points."""

    @staticmethod
    def register(provider_key: str) -> Callable[[Any], Any]:
        """Decorator that makes a function (ModelRequest) -> torch.nn.Module available as `provider_key`."""
        return _PROVIDERS.register(provider_key)

    @staticmethod
    def get_provider(provider_key: str) -> ModelProvider:
        """The provider of `provider_key`; `ConfigError` when unknown."""
        return _PROVIDERS.resolve(provider_key)


def padded_vocab_size(vocab_size: int, divisible_by: int, tensor_parallel_size: int) -> int:
    """The smallest multiple of divisible_by * tensor_parallel_size that holds the vocabulary (Megatron-LM's rule,
    megatron/training/tokenizer)."""
    multiple = divisible_by * tensor_parallel_size
    return -(-vocab_size // multiple) * multiple

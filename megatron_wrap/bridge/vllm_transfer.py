"""Former path of `megatron_wrap.bridge.engines.vllm`."""

import warnings

from megatron_wrap.bridge.engines.vllm import *  # noqa: F403

warnings.warn(f"{__name__} is now megatron_wrap.bridge.engines.vllm", DeprecationWarning, stacklevel=2)

"""Former path of `megatron_wrap.bridge.engines.sglang`."""

import warnings

from megatron_wrap.bridge.engines.sglang import *  # noqa: F403

warnings.warn(f"{__name__} is now megatron_wrap.bridge.engines.sglang", DeprecationWarning, stacklevel=2)

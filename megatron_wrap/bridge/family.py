"""Former path of `megatron_wrap.bridge.mapping.family`."""

import warnings

from megatron_wrap.bridge.mapping.family import *  # noqa: F403

warnings.warn(f"{__name__} is now megatron_wrap.bridge.mapping.family", DeprecationWarning, stacklevel=2)

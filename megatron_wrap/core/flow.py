"""The import path `megatron_wrap.core.flow`, which users' flows take; the code is in `megatron_wrap.flow`."""

from megatron_wrap import flow
from megatron_wrap.flow import *  # noqa: F403

__all__ = flow.__all__

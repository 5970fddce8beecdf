"""Import path `megatron_wrap.core.flow`, used by users' flows; the code is in `megatron_wrap.flow`."""

from megatron_wrap import flow
from megatron_wrap.flow import *  # noqa: F403

__all__ = flow.__all__

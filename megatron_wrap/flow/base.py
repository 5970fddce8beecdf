"""The former path of `megatron_wrap.flow.contract.base`: names of the contract are in `megatron_wrap.core.flow`."""

import warnings

from megatron_wrap.flow.contract.base import *  # noqa: F403

warnings.warn("megatron_wrap.flow.base is deprecated; import from megatron_wrap.core.flow", DeprecationWarning, 2)

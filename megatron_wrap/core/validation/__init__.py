"""Validation of a run before it begins: one list of named validations, for `train` and `check`."""

from megatron_wrap.core.validation.validations import validate

__all__ = ["validate"]

"""Rotary parameters by the kind of a layer, which OLMo 3 and Gemma 3 share: layers with a sliding window have separate
frequencies, which are not scaled."""

from __future__ import annotations

from megatron_wrap.bridge.families.common_keys import need, refuse_unless
from megatron_wrap.bridge.families.mistral import FULL, SLIDING
from megatron_wrap.bridge.mapping.family import Config, Values
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.errors import UnsupportedModel


def rope_of_kinds(config: Config, *, base: float, window_base: float) -> tuple[Values, Values]:
    """The rotary parameters of layers without and with a window, from `rope_parameters` by kind (transformers 5), and
    those of layers without one also from `rope_theta` and `rope_scaling` (earlier).

    Args:
        base, window_base: of the frequencies, where config.json has none.
    """
    by_kind = config.get("rope_parameters") or {}
    if set(by_kind) - {FULL, SLIDING}:
        raise UnsupportedModel(f"rope_parameters must have {FULL} and {SLIDING}, not {', '.join(by_kind)}")
    whole, window = (by_kind.get(kind) or {"rope_type": "default"} for kind in (FULL, SLIDING))
    whole = {"rope_theta": config.get("rope_theta", base), **whole, **(config.get("rope_scaling") or {})}
    return whole, {"rope_theta": window_base, **window}


def window_rope_values(values: Config, window: Config) -> Values:
    """Architecture key of the rotary parameters `window` of layers with a window, in addition to the other keys."""
    refuse_unless(window, rope_type="default", type="default", partial_rotary_factor=(None, 1.0))
    scaled = values["use_rope_scaling"] or values["rope_type"] != "rope"
    scaled = scaled or values["rotary_seq_len_interpolation_factor"] is not None
    theta = float(need(window, "rope_theta"))
    if values["window_size"] is None or (theta == values["rotary_base"] and not scaled):
        return {"window_rotary_base": None}
    return {"window_rotary_base": theta}


def rope_of_kinds_config(arch: ArchConfig, values: Config) -> Values:
    """The inverse of both functions, in addition to the other `values` of config.json; layers without a window have the
    earlier form."""
    whole = {"rope_type": "default", **(values["rope_scaling"] or {}), "rope_theta": arch.rotary_base}
    base = arch.rotary_base if arch.window_rotary_base is None else arch.window_rotary_base
    return {"rope_parameters": {FULL: whole, SLIDING: {"rope_type": "default", "rope_theta": base}}}

"""Which extra states of Transformer Engine's modules a checkpoint may contain."""

import dataclasses
import enum
import importlib
import os
import pickle
import sys
import types

import pytest
import torch

from megatron_wrap.errors import CheckpointError
from megatron_wrap.platform.gpu.fp8_scales import RECIPES, readable_scales

PERMISSION = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"


@dataclasses.dataclass
class DelayedScaling:
    """A recipe with the fields that matter here."""

    fp8_format: enum.Enum
    amax_history_len: int = 1024


class TEDelayedScaling(DelayedScaling):
    """Megatron-Core's, which its autocast uses."""


class Format(enum.Enum):
    """A format of Transformer Engine is an enumeration as well."""

    HYBRID = (448, 57344)


class Attack:
    """Runs a command when it is read."""

    def __reduce__(self):
        return os.system, ("exit 1",)


@pytest.fixture(autouse=True)
def _recipes(monkeypatch):
    """The module of the recipes, where Transformer Engine is not installed."""
    module = types.ModuleType(RECIPES)
    for recipe in (DelayedScaling, Format):
        monkeypatch.setattr(recipe, "__module__", RECIPES)
        setattr(module, recipe.__name__, recipe)
    module.system = os.system
    extended = types.ModuleType("megatron.core.extensions.transformer_engine")
    extended.TEDelayedScaling = TEDelayedScaling
    monkeypatch.setattr(TEDelayedScaling, "__module__", extended.__name__)
    monkeypatch.setitem(sys.modules, extended.__name__, extended)
    for name in ("transformer_engine", "transformer_engine.common"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, RECIPES, module)
    assert importlib.import_module(RECIPES) is module


def state_of(content) -> torch.Tensor:
    """As Transformer Engine's get_extra_state makes it of a dictionary."""
    return torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)


def scales(recipe=DelayedScaling, **further):
    return {
        "recipe": recipe(Format.HYBRID),
        "scale_fwd": torch.ones(3),
        "amax_history_fwd": torch.zeros(16, 3),
        "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": 1},
        **further,
    }


@pytest.mark.parametrize("recipe", [DelayedScaling, TEDelayedScaling])
def test_scales_are_read_and_the_permission_ends_with_them(recipe, monkeypatch):
    monkeypatch.delenv(PERMISSION, raising=False)
    with readable_scales(
        [("a._extra_state", state_of(scales(recipe))), ("b._extra_state", torch.empty(0)), ("c", None)]
    ):
        assert os.environ[PERMISSION] == "1"
    assert PERMISSION not in os.environ


@pytest.mark.parametrize("content", [Attack(), scales(scale_bwd=Attack()), scales(more=types.SimpleNamespace())])
def test_anything_else_is_refused_unread(content, monkeypatch):
    states = [("layer.3._extra_state", state_of(content))]
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("it ran"))
    with pytest.raises(CheckpointError, match=r"layer\.3\._extra_state"), readable_scales(states):
        pytest.fail("it was permitted")


def test_a_function_that_the_module_of_the_recipes_imports_is_refused():
    calls = b"c" + RECIPES.encode() + b"\nsystem\n(S'exit 1'\ntR."
    state = torch.frombuffer(bytearray(calls), dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=r"system"), readable_scales([("_extra_state", state)]):
        pytest.fail("it was permitted")

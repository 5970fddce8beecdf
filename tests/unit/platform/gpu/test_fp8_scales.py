"""Which extra states of Transformer Engine's modules a checkpoint may contain."""

import dataclasses
import enum
import importlib
import io
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


class Storage:
    """A tensor's storage as torch pickles it, with other bytes in it."""

    def __init__(self, content):
        self.content = content

    def __reduce__(self):
        return torch.storage._load_from_bytes, (self.content,)


def written_by_torch(content) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


def test_what_torch_wrote_inside_an_extra_state_is_refused_as_well(monkeypatch):
    hostile = written_by_torch({"scale_fwd": Attack()})
    states = hostile, state_of(scales(scale_bwd=Storage(hostile.getvalue())))
    monkeypatch.setattr(os, "system", lambda command: pytest.fail("it ran"))
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    for state in states:
        with pytest.raises(CheckpointError, match=r"a\._extra_state"), readable_scales([("a._extra_state", state)]):
            pytest.fail("it was permitted")
    with readable_scales([("a._extra_state", written_by_torch({"scale_fwd": torch.ones(3)}))]):
        pass


def test_a_pickle_that_changes_a_recipe_is_refused():
    changes = pickle.dumps((None, {"amax_history_len": 1}), protocol=2)[2:-1]
    state = torch.frombuffer(bytearray(f"c{RECIPES}\nDelayedScaling\n".encode() + changes + b"b."), dtype=torch.uint8)
    with (
        pytest.raises(CheckpointError, match=r"it asks for a change of .*DelayedScaling"),
        readable_scales([("_extra_state", state)]),
    ):
        pytest.fail("it was permitted")
    assert DelayedScaling.amax_history_len == 1024


def test_a_module_receives_no_extra_state_that_was_refused():
    from megatron_wrap.checkpoint.saved_tensors import load_model

    class Layer(torch.nn.Module):
        """As Transformer Engine's, which reads any pickle."""

        def set_extra_state(self, state):
            pytest.fail("the module received it")

        def get_extra_state(self):
            return torch.empty(0, dtype=torch.uint8)

    with pytest.raises(CheckpointError, match="_extra_state of the checkpoint is not the state of an FP8 recipe"):
        load_model([Layer()], {"model": {"_extra_state": state_of(Attack())}})

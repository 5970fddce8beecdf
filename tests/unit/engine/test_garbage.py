"""Garbage collection waits for the end of a step."""

import gc
import weakref

import pytest

from megatron_wrap.engine.garbage import delayed_collection


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


@delayed_collection()
def _fail() -> None:
    cycle = weakref.ref(_Cycle())
    raise ValueError(gc.isenabled(), cycle() is None, cycle)


def test_collection_waits_for_the_end_also_of_a_failure():
    with pytest.raises(ValueError, match="False") as failure:
        _fail()
    enabled, collected, cycle = failure.value.args
    assert (enabled, collected) == (False, False)
    assert gc.isenabled()
    assert cycle() is None


def test_a_program_without_collection_keeps_it_disabled():
    gc.disable()
    try:
        with delayed_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

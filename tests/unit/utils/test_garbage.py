"""Garbage collection waits until the host waits for the device, or for the end of a step."""

import gc
import weakref

import pytest

from megatron_wrap.utils.garbage import collect_delayed, delayed_collection


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


def test_collection_where_the_host_waits():
    with delayed_collection():
        first, second = weakref.ref(_Cycle()), weakref.ref(_Cycle())
        collect_delayed()
        assert first() is second() is None
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_program_without_collection_keeps_it_disabled():
    gc.disable()
    try:
        with delayed_collection():
            cycle = weakref.ref(_Cycle())
            collect_delayed()
        assert cycle() is not None
        assert not gc.isenabled()
    finally:
        gc.enable()

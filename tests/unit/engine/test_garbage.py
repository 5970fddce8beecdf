"""Garbage collection waits for the end of a step."""

import gc
import weakref

import pytest

from megatron_wrap.engine.garbage import collected_at_end


class _Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_collection_waits_for_the_end_also_of_a_failure():
    with pytest.raises(ValueError, match="stop"), collected_at_end():
        assert not gc.isenabled()
        cycle = weakref.ref(_Cycle())
        assert cycle() is not None
        raise ValueError("stop")
    assert gc.isenabled()
    assert cycle() is None


def test_a_program_without_collection_keeps_it_disabled():
    gc.disable()
    try:
        with collected_at_end():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()

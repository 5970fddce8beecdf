"""Packages whose imports fail for a while."""

import importlib
import sys

import pytest

from megatron_wrap.platform.base.machine import without_packages


@pytest.mark.parametrize("imported", [False, True])
def test_an_import_fails_inside_and_succeeds_afterwards(imported, tmp_path, monkeypatch):
    (tmp_path / "kernels_of_gpus/ops").mkdir(parents=True)
    (tmp_path / "kernels_of_gpus/ops/__init__.py").write_text("rule = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    if imported:
        before = importlib.import_module("kernels_of_gpus.ops")
    with without_packages(("kernels_of_gpus",)):
        for name in ("kernels_of_gpus", "kernels_of_gpus.ops"):
            with pytest.raises(ModuleNotFoundError):
                importlib.import_module(name)
    after = importlib.import_module("kernels_of_gpus.ops")
    assert after.rule == 1
    assert not imported or after is before
    for name in [name for name in sys.modules if name.startswith("kernels_of_gpus")]:
        del sys.modules[name]

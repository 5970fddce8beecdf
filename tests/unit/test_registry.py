"""Plug-ins by name: which error blames the user's name, and which comes from inside the plug-in."""

from pathlib import Path

import pytest

from megatron_wrap.errors import ConfigError
from megatron_wrap.registry import Registry


def test_a_missing_import_of_a_plug_in_is_not_blamed_on_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "absent_package_ext.py").write_text("import absent_package\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[object] = Registry("flow", "no.such.group", {})
    with pytest.raises(ModuleNotFoundError, match="'absent_package'"):
        registry.resolve("absent_package_ext:Flow")
    with pytest.raises(ConfigError, match=r"'absent_package\.flow' was not found; .*PYTHONPATH"):
        registry.resolve("absent_package.flow:Flow")


def test_a_module_that_ends_the_process_on_import_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_program.py").write_text("raise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry: Registry[object] = Registry("flow", "no.such.group", {})
    with pytest.raises(ConfigError, match=r"'a_program:Flow': module 'a_program' calls sys\.exit\(0\)"):
        registry.resolve("a_program:Flow")

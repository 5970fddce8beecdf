"""The wheel holds what a YAML anywhere needs: built for real, and read from a folder of its own."""

import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import megatron_wrap

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the unpacked wheel of this checkout."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    for name in ("megatron_wrap", "configs", "examples"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "generated"))
    build = "from setuptools import build_meta; build_meta.build_wheel('dist')"  # as pip does, in one process of three
    subprocess.run([sys.executable, "-c", build], cwd=source, check=True, stdout=subprocess.DEVNULL)
    with zipfile.ZipFile(next((source / "dist").glob("*.whl"))) as wheel:
        wheel.extractall(target)
    return target


def test_the_wheel_holds_the_whole_tree(installed: Path) -> None:
    shipped = {path.relative_to(ROOT / "configs") for path in (ROOT / "configs" / "nest").rglob("*") if path.is_file()}
    shipped |= {Path("schema.json")}
    packed = installed / "megatron_wrap" / "configs"
    assert {path.relative_to(packed) for path in packed.rglob("*") if path.is_file()} == shipped
    files = {path.relative_to(ROOT) for path in (ROOT / "megatron_wrap").rglob("*") if path.is_file()}
    files = {file for file in files if file.parent.name != "__pycache__"}
    files |= {Path("megatron_wrap/examples/train.py")}  # which `megatron-wrap train` runs
    unpacked = {path.relative_to(installed) for path in (installed / "megatron_wrap").rglob("*") if path.is_file()}
    assert {file for file in unpacked if file.parts[1] != "configs" and file.parent.name != "__pycache__"} == files


def test_a_yaml_anywhere_reads_the_installed_tree(installed: Path, tmp_path: Path) -> None:
    shutil.copy(ROOT / "configs" / "tiny-llama-mock.yaml", tmp_path / "mine.yaml")
    command = [sys.executable, "-m", "megatron_wrap.cli.main", "explain", "mine.yaml", "megatron_lm.train.common.seed"]
    result = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        check=True,
    )
    source = installed / "megatron_wrap/configs/nest/megatron_lm/train/common.yaml"
    lines = [number for number, text in enumerate(source.read_text().splitlines(), 1) if text.startswith("seed: ")]
    assert f"set at {source}:{lines[0]} (default): 1234" in result.stdout


def test_the_metadata_names_script_versions_and_extras(installed: Path) -> None:
    actual = importlib.metadata.Distribution.at(next(installed.glob("megatron_wrap-*.dist-info")))
    assert [(script.name, script.value) for script in actual.entry_points] == [
        ("megatron-wrap", "megatron_wrap.cli.main:main")
    ]
    assert (actual.metadata["Name"], actual.version) == ("megatron-wrap", megatron_wrap.__version__)
    pythons = SpecifierSet(actual.metadata["Requires-Python"])
    assert [minor for minor in range(8, 16) if f"3.{minor}" in pythons] == [11, 12, 13]
    needs = {(need.name, str(need.marker)): need for need in map(Requirement, actual.requires or [])}
    core = needs["megatron-core", "None"].specifier
    releases = ("0.15.3", "0.16.0", "0.16.1", "0.17.1", "0.18.0", "0.19.0", "0.19.2", "0.20.0")
    assert [release for release in releases if release in core] == ["0.16.1", "0.19.0", "0.19.2"]
    tested = (ROOT / "environment/wrap_environment/requirements.txt").read_text()
    pins = [Requirement(line) for line in tested.splitlines() if not line.startswith("#")]
    used = [(pin.name.lower(), str(pin.specifier)[2:]) for pin in pins if pin.marker is None]
    on_gpus = [("torch", "2.11.0"), ("numpy", "2.5.2"), ("transformers", "5.17.0"), ("tokenizers", "0.23.2")]
    for name, version in [*used, *on_gpus]:
        marker = 'extra == "tensorboard"' if name == "tensorboard" else "None"
        assert version in needs[name, marker].specifier, name
    for name, version in (("torch", "2.14.0"), ("transformers", "5.16.1"), ("transformers", "5.24.0")):
        assert version not in needs[name, "None"].specifier
    assert {"gpu", "dev", "tensorboard"} <= set(actual.metadata.get_all("Provides-Extra") or [])

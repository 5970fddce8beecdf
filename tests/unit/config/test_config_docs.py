"""A key is documented once: the files of the tree and the page of the site are those that its dataclass generates."""

import dataclasses
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from megatron_wrap.config import load_run_config
from megatron_wrap.config.reading.yaml_nodes import read_yaml
from megatron_wrap.config.schema.keys import describe_key, documentation, key, key_ranges
from megatron_wrap.config.schema.model import ArchConfig
from megatron_wrap.config.schema.run import SECTION_PATHS

ROOT = Path(__file__).parents[3]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """`a.shape`: the shape."""

    sides: int = key(at_least=3)
    """Sides, in
    one number."""
    angle: float = key(0.5, above=0, at_most=1)
    """The angle."""
    color: Literal["red", "blue"] | None = None
    """The color; null: none."""
    mode: Literal["fast", "slow"] = "fast"
    """fast: at once; slow: later."""
    names: tuple[str, ...] = ("a", "b")
    """The names."""
    paths: dict[str, str] = key({}, kind="a path or null")  # noqa: RUF009 - a field, which copies it
    """The paths."""


@pytest.fixture(scope="module")
def config_docs(load_script: Callable[[str], ModuleType]) -> Any:
    return load_script("config_docs")


def test_the_tree_is_that_of_the_dataclasses(config_docs: Any) -> None:
    assert config_docs.main(["--check"]) == 0, "run make config-docs"


def test_a_file_has_the_default_and_what_the_value_does_not_show(config_docs: Any, tmp_path: Path) -> None:
    text = config_docs.Keys(Shape, {"sides": 4}).yaml("The shape.")
    assert text.splitlines()[1:] == [
        "# The shape.",
        "sides: 4  # Sides, in one number.",
        "angle: 0.5  # The angle. Above 0 and at most 1.",
        "color: null  # The color; null: none. One of red, blue.",
        "mode: fast  # fast: at once; slow: later.",
        "names: [a, b]  # The names.",
        "paths: null  # The paths.",
    ]
    (tmp_path / "shape.yaml").write_text(text)
    assert read_yaml(tmp_path / "shape.yaml").plain()["names"] == ["a", "b"]
    assert "sides: null  # Sides, in one number. Required.\n" in config_docs.Keys(Shape).yaml("The shape.")


def test_a_long_comment_stands_above_its_key(config_docs: Any) -> None:
    lines = config_docs.Keys(ArchConfig).yaml("").splitlines()
    assert max(map(len, lines)) <= 120
    index = lines.index("ffn_hidden_size: null")
    assert lines[index - 2].startswith("# Inner width of the MLP")


def test_the_table_has_type_range_and_default(config_docs: Any) -> None:
    rows = config_docs.Keys(Shape).table().splitlines()
    assert rows[2:5] == [
        "| `sides` | an integer, at least 3 | required | Sides, in one number. |",
        "| `angle` | a number, above 0 and at most 1 | `0.5` | The angle. |",
        "| `color` | one of red, blue or null | `null` | The color; null: none. |",
    ]
    assert "| a path or null |" in rows[-1]


def test_an_outdated_file_is_detected_and_rewritten(
    config_docs: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "configs/nest", tmp_path / "configs/nest")
    file = tmp_path / "configs/nest/megatron_lm/train/optimizer/adam.yaml"
    current = file.read_text()
    file.write_text(current.replace("clip_grad: 1.0", "clip_grad: 2.0"))
    assert config_docs.main(["--check"], tmp_path) == 1
    captured = capsys.readouterr().err
    assert captured.startswith("configs/nest/megatron_lm/train/optimizer/adam.yaml differ")
    assert config_docs.main([], tmp_path) == 0
    assert file.read_text() == current
    assert config_docs.main(["--check"], tmp_path) == 0


def test_the_page_has_every_section_and_flow(config_docs: Any) -> None:
    page = config_docs.reference_page()
    headings = [f"\n## {path}\n" for path in SECTION_PATHS.values()]
    headings += [f"\n### {SECTION_PATHS['flow']}: {flow_key}\n" for flow_key in config_docs.SHIPPED]
    assert all(heading in page for heading in headings)
    assert "| `micro_batch_size` | an integer, at least 1 | required | " in page
    assert "| `full` | " in page, "the files of a section's folder"


def test_a_key_without_a_docstring_is_refused(config_docs: Any) -> None:
    @dataclass(frozen=True)
    class Silent:
        """`a.silent`: nothing."""

        sides: int = 3

    with pytest.raises(ValueError, match=r"Silent\.sides has no docstring"):
        config_docs.Keys(Silent).yaml("Nothing.")


def test_a_range_holds_its_bounds() -> None:
    sides, angle = key_ranges(Shape)["sides"], key_ranges(Shape)["angle"]
    assert [sides.holds(value) for value in (2, 3, 10**9)] == [False, True, True]
    assert [angle.holds(value) for value in (0, 1e-9, 1, 1.1)] == [False, True, True, False]
    assert "color" not in key_ranges(Shape)
    assert describe_key(Shape, "color") == "one of red, blue or null"
    assert documentation(Shape)["sides"] == "Sides, in one number."


def test_the_default_of_each_key_is_in_its_range() -> None:
    config = load_run_config(ROOT / "configs/tiny-llama-mock.yaml")
    for section in SECTION_PATHS:
        decoded = type(getattr(config, section))
        for field in dataclasses.fields(decoded):
            allowed = key_ranges(decoded).get(field.name)
            if allowed is not None and field.default not in (None, dataclasses.MISSING):
                assert allowed.holds(field.default), (section, field.name)

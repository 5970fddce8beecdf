"""The documentation site: the examples of the API reference run, every public verb has one, and the site builds."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_wrap import ops, testing
from megatron_wrap.core import MegatronWrap, flow

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs/reference"
PAGES = sorted(REFERENCE.glob("*.md"))


class Hub:
    """Stands in for the hub, which is not asked."""

    def create_repo(self, name: str, **options: object) -> None: ...

    def upload_folder(self, **options: object) -> SimpleNamespace:
        return SimpleNamespace(commit_url="https://hub.example/commit/1")


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.documentation
@pytest.mark.process_group
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    """As one program, in a forked process, beside the configurations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    Path("configs").symlink_to(ROOT / "configs")
    exec(compile("\n".join(python_blocks(page)), page.name, "exec", dont_inherit=True), {"__name__": "example"})


def public_verbs() -> list[str]:
    """Public methods and properties of the facade that are no part of where a process is in the layout."""
    names = [name for name, _ in inspect.getmembers(MegatronWrap) if not name.startswith("_")]
    return [name for name in names if not re.fullmatch(r"(tp|pp|dp|cp|ep)_(size|rank|group)", name)]


@pytest.mark.parametrize(
    ("page", "names"),
    [
        pytest.param("megatron-wrap", public_verbs(), id="MegatronWrap"),
        pytest.param("ops", ops.__all__, id="ops"),
        pytest.param("testing", ["check_parity", "assert_layout_invariant"], id="testing"),
    ],
)
def test_every_public_name_is_documented_and_has_an_example(page, names):
    text = (REFERENCE / f"{page}.md").read_text(encoding="utf-8")
    examples = "\n".join(python_blocks(REFERENCE / f"{page}.md"))
    for name in names:
        directive = re.search(rf"^::: [\w.]+\.{name}$", text, re.M)
        listed = re.search(rf"^\|.*`wrap\.{name}`.*\|.*\|$", text, re.M)
        assert directive or listed, f"docs/reference/{page}.md does not describe {name}"
        assert listed or re.search(rf"\b{name}\b", examples), f"docs/reference/{page}.md has no example of {name}"


def test_every_public_name_of_the_flows_is_documented():
    text = (REFERENCE / "flow.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: [\w.]+\.(\w+)$", text, re.M))
    assert set(flow.__all__) - named == {"FlowOptions", "Metric"}  # a type, and what a flow without `Config` gets
    assert set(testing.__all__) <= set(re.findall(r"^::: [\w.]+\.(\w+)$", (REFERENCE / "testing.md").read_text(), re.M))


class Links(HTMLParser):
    """Addresses of everything that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in ("script", "img", "iframe") or (tag == "link" and values.get("rel") in ("stylesheet", "icon")):
            self.loaded += [values[name] or "" for name in ("src", "href") if name in values]


@pytest.mark.skipif(sys.version_info < (3, 11, 5), reason="requirements-docs.txt needs Python 3.11.5")
@pytest.mark.matrix
@pytest.mark.parametrize("npm", [True, False], ids=["diagrams", "without npm"])
def test_the_site_builds_and_loads_nothing_from_elsewhere(tmp_path, npm):
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    if not npm:
        environment["DOCS_WITHOUT_NPM"] = "1"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = sorted((tmp_path / "site").rglob("*.html"))
    assert {"index.html", "get-started.html", "megatron-wrap.html", "architecture.html"} <= {
        page.name for page in pages
    }
    for page in pages:
        links = Links()
        links.feed(page.read_text(encoding="utf-8"))
        assert links.loaded
        assert not [address for address in links.loaded if re.match(r"(https?:)?//", address)], page.name
    reference = (tmp_path / "site/reference/megatron-wrap.html").read_text(encoding="utf-8")
    for name in public_verbs():
        assert f"wrap.{name}" in reference or f".{name}" in reference

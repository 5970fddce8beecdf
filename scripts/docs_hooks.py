"""Hooks of mkdocs: pages and links outside docs/, generated pages, and mermaid without a network.

Diagrams need mermaid's script, which the theme would load from a content delivery network. It is taken from npm into
build/ once and copied into the site. Without npm the diagrams' sources are shown as text.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
MERMAID = "11.17.2"
"""Version of mermaid; the theme calls the interface of this major version."""
OUTSIDE = {
    "index.md": "README.md",
    "index-zh.md": "README-zh.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
}
"""Page of the site -> file of the repository."""
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")

log = logging.getLogger("mkdocs.hooks.docs")


def on_config(config: Any) -> Any:
    """Add mermaid's script if it is available."""
    config.extra["mermaid_script"] = mermaid_script()
    if config.extra["mermaid_script"]:
        config.extra_javascript.append("assets/mermaid.min.js")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages of the repository's root, generated pages, and mermaid's script."""
    pages = {page: (ROOT / source).read_text(encoding="utf-8") for page, source in OUTSIDE.items()}
    for page, text in {**pages, **generated_pages()}.items():
        files.append(File.generated(config, page, content=text))
    script = config.extra["mermaid_script"]
    if script:
        files.append(File.generated(config, "assets/mermaid.min.js", abs_src_path=str(script)))
    return files


def generated_pages() -> dict[str, str]:
    """Page -> text of the pages that are written from the package's own tables."""
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
    import config_docs
    import familiar_names

    return {"config-reference.md": config_docs.reference_page(), "familiar-names.md": familiar_names.page_text()}


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Point links to the site's pages; show the path of any other file, or link to it under `repo_url`."""
    folder = posixpath.dirname(page.file.src_uri)
    origin = "" if page.file.src_uri in OUTSIDE else posixpath.join("docs", folder)
    inside = {source: target for target, source in OUTSIDE.items()}

    def resolve(match: re.Match[str]) -> str:
        text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match.group()
        path, hash_, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(origin, path))
        to = path.removeprefix("docs/") if path.startswith("docs/") else inside.get(path)
        if to is not None:
            return f"[{text}]({posixpath.relpath(to, folder or '.')}{hash_}{anchor})"
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    parts = re.split(r"(^ *```.*?^ *```$)", markdown, flags=re.M | re.S)
    parts[::2] = [LINK.sub(resolve, part).replace("](docs/images/", "](images/") for part in parts[::2]]
    if not config.extra["mermaid_script"]:
        parts = [re.sub(r"^```mermaid$", "```text", part, flags=re.M) for part in parts]
    return "".join(parts)


def mermaid_script() -> Path | None:
    """The minified script, downloaded once; None without npm or network."""
    script = ROOT / "build" / f"mermaid-{MERMAID}.min.js"
    npm = shutil.which("npm")
    if script.is_file():
        return script
    if npm is None or os.environ.get("DOCS_WITHOUT_NPM"):
        log.info("no npm: diagrams are shown as text")
        return None
    with tempfile.TemporaryDirectory() as folder:
        command = [npm, "pack", f"mermaid@{MERMAID}", "--silent"]
        packed = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        archive = next(Path(folder).glob("mermaid-*.tgz"), None)
        if packed.returncode or archive is None:
            log.info("npm could not download mermaid: diagrams are shown as text")
            return None
        script.parent.mkdir(exist_ok=True)
        with tarfile.open(archive) as files:
            content = files.extractfile("package/dist/mermaid.min.js")
            assert content is not None
            partial = script.with_suffix(f".{os.getpid()}")
            partial.write_bytes(content.read())
            partial.replace(script)
    return script

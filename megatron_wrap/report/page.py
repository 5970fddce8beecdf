"""Self-contained HTML pages from Jinja templates: one file without requests; every text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class Item:
    """One item of a page on which the reader steps through items."""

    title: str
    facts: Sequence[str]
    texts: Sequence[Sequence[tuple[str, str]]]
    """Texts of the item, each as parts (text, kind); a kind is `trained`, `other` or `cut`."""
    labels: Sequence[str] = ()
    """Keys by which the reader can filter items."""


def rendered(template: Path, **values: Any) -> str:
    """The HTML of a template that extends `page.html`.

    Args:
        values: variables of the template; `page.html` uses `title` and `subtitle`.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader([template.parent, TEMPLATES])
    options: dict[str, Any] = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True}
    environment = Environment(loader=loader, undefined=StrictUndefined, finalize=_shown, **options)
    return environment.get_template(template.name).render(values)


def visible(text: str) -> str:
    """Text with control characters other than line feeds and tabs replaced by Unicode's pictures of them, and lone
    surrogates by question marks."""
    table = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
    return text.translate(table).encode("utf-8", "replace").decode("utf-8")


def _shown(value: Any) -> Any:
    return visible(value) if type(value) is str else value

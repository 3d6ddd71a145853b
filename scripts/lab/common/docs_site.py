"""Hook of mkdocs: links that leave docs/ lead to the repository's host, the search ranks pages, and diagrams are drawn.

A site that loads something from another host is an error, because readers may have no access to the internet.
"""

from __future__ import annotations

import posixpath
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from lab.common.diagrams import with_drawings
from lab.common.own_host import foreign_loads

ROOT = Path(__file__).parents[3]
# Factors for hits below a path. Operators search for symptoms and tasks, and long references match almost any word.
_SEARCH_BOOSTS = {
    "troubleshooting/index.md": 3.0,
    "guides/": 1.5,
    "engines/": 2.0,
    "reference/options.md": 0.5,
    "reference/cli.md": 0.5,
    "reference/metrics.md": 0.5,
    "performance.md": 0.5,
    "contributing/": 0.2,
}
# Sections of one page, whose navigation would list that page alone.
_ALONE = {"index.md", "performance.md"}
_cell = re.compile(r"<td[ >].*?</td>", re.DOTALL)
_code = re.compile(r"<code>.*?</code>", re.DOTALL)
_link = re.compile(r"\]\(([^)#\s]+)(#[^)\s]*)?\)")


class _File(Protocol):
    src_uri: str


class _Page(Protocol):
    file: _File
    meta: dict[str, object]


def on_page_markdown(markdown: str, *, page: _Page, **_: object) -> str:
    """Return a page's text with addresses for the links that leave docs/. mkdocs calls it for each page."""
    for path, boost in _SEARCH_BOOSTS.items():
        if page.file.src_uri.startswith(path):
            page.meta["search"] = {"boost": boost}
    if page.file.src_uri in _ALONE:
        page.meta["hide"] = ["navigation"]
    directory = posixpath.dirname(f"docs/{page.file.src_uri}")

    def absolute(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(directory, match[1]))
        if ":" in match[1] or path.startswith("docs/") or not (ROOT / path).exists():
            return match[0]
        return f"]({_source()}/blob/main/{path}{match[2] or ''})"

    return with_drawings(page.file.src_uri, _link.sub(absolute, markdown))


def on_page_content(html: str, **_: object) -> str:
    """Return a page in which names in tables may be broken after an underscore. mkdocs calls it for each page."""
    return _cell.sub(lambda cell: _code.sub(lambda code: code[0].replace("_", "_<wbr>"), cell[0]), html)


def on_post_build(*, config: Mapping[str, object], **_: object) -> None:
    """Examine the built site. mkdocs calls it after the last page.

    Raises:
        ValueError: A file of the site loads something from another host.

    """
    if problems := foreign_loads(Path(str(config["site_dir"]))):
        raise ValueError("the site loads from other hosts:\n" + "\n".join(problems))


def _source() -> str:
    source: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    return source

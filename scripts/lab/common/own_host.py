"""Find what a built site would load from another host: scripts, styles, fonts, pictures and data."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

_LOADING_ATTRIBUTES: Final = {"action", "data", "poster", "src", "srcset", "style"}
_LOADING_LINKS: Final = {
    "apple-touch-icon",
    "dns-prefetch",
    "icon",
    "manifest",
    "modulepreload",
    "preconnect",
    "prefetch",
}
_STYLESHEET_LINKS: Final = {"preload", "stylesheet"}
# Addresses in Material's script that no page of this site asks for, and the condition under which it would.
UNUSED_ADDRESSES: Final = {
    "https://api.github.com/repos/": "repo_url of mkdocs.yml is on GitHub",
    "https://api.github.com/users/": "repo_url of mkdocs.yml is on GitHub",
    "https://unpkg.com/mermaid@11/dist/mermaid.min.js": "a page has an element of the class mermaid",
    "https://unpkg.com/resize-observer-polyfill": "the browser is older than 2020",
}
_foreign: Final = re.compile(r"(?:https?:)?//[\w.-]+\.\w")
_in_style: Final = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])((?:https?:)?//[^"')\s]+)""")
_in_script: Final = re.compile(r"""["'`]((?:https?:)?//[\w.-]+\.\w[^"'`\s)$]*)""")  # strings, no comments
_NAMESPACES: Final = "http://www.w3.org/"


class _Loads(HTMLParser):
    """Collects the addresses of other hosts that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect the addresses that this element loads."""
        values = {name: value or "" for name, value in attrs}
        self._inside = tag
        names = _LOADING_ATTRIBUTES & values.keys()
        if tag == "link" and (_LOADING_LINKS | _STYLESHEET_LINKS) & {*values.get("rel", "").split()}:
            names |= {"href"}
        if tag in {"image", "use"}:
            names |= {"href", "xlink:href"} & values.keys()
        self.found += [values[name] for name in sorted(names) if _foreign.search(values.get(name, ""))]
        if "mermaid" in values.get("class", "").split():
            self.found.append("an element of the class mermaid, for which Material loads Mermaid")

    def handle_data(self, data: str) -> None:
        """Collect the addresses that a style or script in the page loads."""
        if self._inside == "style":
            self.found += _in_style.findall(data)
        elif self._inside == "script":
            self.found += _in_script.findall(data)

    def handle_endtag(self, tag: str) -> None:
        """Leave an element."""
        self._inside = ""


def foreign_loads(site: Path) -> list[str]:
    """Return what the files of a site would load from other hosts, as `file: address`."""
    problems = []
    for path in sorted(site.rglob("*")):
        match path.suffix:
            case ".html":
                parser = _Loads()
                parser.feed(path.read_text(encoding="utf-8"))
                found = parser.found
            case ".css" | ".svg":
                found = _in_style.findall(path.read_text(encoding="utf-8"))
            case ".js":
                found = _in_script.findall(path.read_text(encoding="utf-8"))
            case _:
                found = []
        problems += [f"{path.relative_to(site)}: {one}" for one in found if not _is_harmless(one)]
    return problems


def _is_harmless(address: str) -> bool:
    return address in UNUSED_ADDRESSES or address.startswith(_NAMESPACES)

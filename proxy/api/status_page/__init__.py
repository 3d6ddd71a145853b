"""The status page: one static document that loads its data from this listener.

The document is assembled from the files of this directory at the first request. Browsers run and apply nothing else,
connect to no other host, and create no markup from text (Content Security Policy 3; Trusted Types). So texts of engines
stay text.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_STYLES: Final = ("style.css",)
_SCRIPTS: Final = (
    *("figures.js", "elements.js", "charts.js", "tables.js", "failures.js", "administration.js", "page.js"),
)


class StatusPage:
    """Serves the status page."""

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the route for a listener where `/` has no other use."""
        return [web.get("/", self.show)]

    async def show(self, request: web.Request) -> web.Response:
        """Answer a request with the status page."""
        body, headers = _page()
        return web.Response(body=body, headers=headers)


def is_wanted(request: web.Request) -> bool:
    """Return whether a browser requests a page, and not a program."""
    return "text/html" in request.headers.get(hdrs.ACCEPT, "")


@cache
def _page() -> tuple[bytes, Mapping[str, str]]:
    """Return the document, and the headers that restrict it."""
    style, script = _joined(_STYLES), _joined(_SCRIPTS)
    document = _text("page.html").replace("/*style*/", style, 1).replace("/*script*/", script, 1)
    headers = {
        hdrs.CONTENT_TYPE: "text/html; charset=utf-8",
        hdrs.CACHE_CONTROL: "no-store",
        "Content-Security-Policy": _policy(style, script),
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
    return document.encode(), headers


def _policy(style: str, script: str) -> str:
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{_hash(script)}'",
            f"style-src '{_hash(style)}'",
            "connect-src 'self'",
            "img-src data:",  # the icon
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _joined(names: Sequence[str]) -> str:
    return "".join(map(_text, names))


def _text(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")

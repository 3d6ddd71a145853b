"""Which web pages may read what clients' routes answer: those whose origin is configured (Fetch, "CORS protocol").

Without that a browser keeps the answer from a page of another origin. Routes of administrators have none of it, and
cookies play no part: a page shows a key or none, like any client.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

if TYPE_CHECKING:
    from collections.abc import Callable

    from proxy.settings import Listen

ANY: Final = "*"
_MAX_AGE_SECONDS: Final = 600
_SHOWN: Final = "X-Request-Id, X-PDProxy-Error-Code, Retry-After, retry-after-ms, x-should-retry"
_is_list_of_names: Final = re.compile(r"[A-Za-z0-9_, -]{0,2048}").fullmatch


class Cors:
    """`is_clients`: whether a path is a route of clients."""

    def __init__(self, is_clients: Callable[[str], bool], listen: Listen) -> None:
        self._is_clients = is_clients
        self.configure(listen)

    def configure(self, listen: Listen) -> None:
        """From now on these origins."""
        self._origins = frozenset(listen.cors_origins)

    async def on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Tell the browser that the page may read an answer. For the application's `on_response_prepare`."""
        response.headers.extend(self.fields(request))

    def fields(self, request: web.Request) -> list[tuple[str, str]]:
        """Return the headers by which a browser lets a page read the answer to a request."""
        if not self._origins or not self._is_clients(request.path):
            return []
        fields: list[tuple[str, str]] = []
        if ANY not in self._origins:
            fields.append((hdrs.VARY, hdrs.ORIGIN))  # in every answer: caches must not mix them up
        if (origin := self._allowed(request)) is not None:
            fields.append((hdrs.ACCESS_CONTROL_ALLOW_ORIGIN, origin))
            fields.append((hdrs.ACCESS_CONTROL_EXPOSE_HEADERS, _SHOWN))
        return fields

    def preflight(self, request: web.Request) -> web.Response | None:
        """The answer to a browser that asks whether it may send a request at all; None: it is none, or may not."""
        names = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        is_asking = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if not is_asking or not _is_list_of_names(names) or self._allowed(request) is None:
            return None
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: names,  # clients have their own, and `*` would not cover Authorization
            hdrs.ACCESS_CONTROL_MAX_AGE: str(_MAX_AGE_SECONDS),
        }
        return web.Response(status=204, headers=headers)

    def _allowed(self, request: web.Request) -> str | None:
        """The origin as it is to be told; None: it may not, or it is no page's request."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or not self._is_clients(request.path):
            return None
        if ANY in self._origins:
            return ANY
        return origin if origin in self._origins else None

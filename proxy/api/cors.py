"""Lets web pages of configured origins use the routes for clients (Fetch standard, "CORS protocol").

Otherwise a browser hides the answer from pages of another origin. Administrators' routes are never open to pages.
Cookies are not used: a page sends a client key or none, as any client.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

ANY: Final = "*"
_MAX_AGE_SECONDS: Final = 600
_SHOWN: Final = "X-Request-Id, X-PDProxy-Error-Code, Retry-After, retry-after-ms, x-should-retry"
_is_list_of_names: Final = re.compile(r"[A-Za-z0-9_, -]{0,2048}").fullmatch


class Cors:
    """Writes the CORS headers of answers, and answers preflight requests."""

    def __init__(self, is_clients: Callable[[str], bool], origins: Callable[[], Collection[str]]) -> None:
        """Prepare the CORS headers for the allowed origins.

        Args:
            is_clients: Returns whether a path is a route of clients.
            origins: Returns the origins that may use these routes. They may change at any time.
        """
        self._is_client_route = is_clients
        self._allowed_origins = origins

    async def on_prepare(self, request: web.Request, response: web.StreamResponse) -> None:
        """Add the CORS headers to an answer. Used as the application's `on_response_prepare`."""
        response.headers.extend(self.make_headers(request))

    def make_headers(self, request: web.Request) -> list[tuple[str, str]]:
        """Return the headers that let a page read the answer to a request."""
        origins = self._allowed_origins()
        if not origins or not self._is_client_route(request.path):
            return []
        fields: list[tuple[str, str]] = []
        if ANY not in origins:
            fields.append((hdrs.VARY, hdrs.ORIGIN))  # in every answer, so that caches do not mix them up
        if (origin := self._find_allowed_origin(request)) is not None:
            fields.append((hdrs.ACCESS_CONTROL_ALLOW_ORIGIN, origin))
            fields.append((hdrs.ACCESS_CONTROL_EXPOSE_HEADERS, _SHOWN))
        return fields

    def make_preflight_answer(self, request: web.Request) -> web.Response | None:
        """Return the answer to a preflight request, or None if the request or its origin does not qualify."""
        names = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
        is_asking = request.method == hdrs.METH_OPTIONS and hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if not is_asking or not _is_list_of_names(names) or self._find_allowed_origin(request) is None:
            return None
        headers = {
            hdrs.ACCESS_CONTROL_ALLOW_METHODS: "GET, POST",
            hdrs.ACCESS_CONTROL_ALLOW_HEADERS: names,  # `*` would not include Authorization
            hdrs.ACCESS_CONTROL_MAX_AGE: str(_MAX_AGE_SECONDS),
        }
        return web.Response(status=204, headers=headers)

    def _find_allowed_origin(self, request: web.Request) -> str | None:
        """Return the origin for the answer, or None if it is not allowed or the request has none."""
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None or not self._is_client_route(request.path):
            return None
        origins = self._allowed_origins()
        if ANY in origins:
            return ANY
        return origin if origin in origins else None

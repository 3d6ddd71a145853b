"""Helps clients that request an unknown path, and answers `GET /` with the list of routes.

Browsers get the status page at `/` if operators have no other listener. An error quotes the path of a request if it has
no special characters.
"""

from __future__ import annotations

import difflib
import re
from typing import TYPE_CHECKING, Final

from aiohttp import hdrs, web

from proxy import __version__
from proxy.api import status_page
from proxy.common.errors import GatewayError
from proxy.listener.replies import json_response

if TYPE_CHECKING:
    from collections.abc import Sequence

    from proxy.api.status_page import StatusPage

_slashes: Final = re.compile("/{2,}")
_is_harmless: Final = re.compile("[A-Za-z0-9/._-]+").fullmatch

# Longer paths get no hint.
_MAX_PATH: Final = 256
_MAX_QUERY: Final = 1024
_MAX_QUOTED: Final = 100
# Two paths with at least this similarity (difflib's ratio) count as mistyped.
_MIN_SIMILARITY: Final = 0.85
_API: Final = "/v1"
# Hints for paths of engines and other services, by the beginning of the path after the version.
_NOT_SERVED: Final = (
    (
        "/responses",
        "responses are not stored here: POST /v1/responses answers at once, and its client keeps the conversation",
    ),
    ("/api", "Ollama's API is not served here, but OpenAI's is: /v1/chat/completions"),
    ("/generate", "SGLang's API is served with the connector sglang_bootstrap only, OpenAI's API with all connectors"),
    *((path, "this page does not exist here; GET /openapi.json describes the routes") for path in ("/docs", "/redoc")),
)


class Signposts:
    """Answers `GET /` and requests for paths without a route."""

    def __init__(self, routes: Sequence[web.RouteDef], status_page: StatusPage | None = None) -> None:
        """Prepare the answers with hints for unknown routes.

        Args:
            routes: The routes of clients. Other routes, such as those of administrators, are never named.
            status_page: The status page. None: another listener serves it.
        """
        self._status_page = status_page
        everything = [*routes, *self.routes()]
        self._open_paths = tuple(route.path.partition("{")[0] for route in everything if "{" in route.path)
        self._known_paths = {route.path for route in everything if "{" not in route.path}
        listed = sorted({f"{route.method} {route.path.replace(':.+', '')}" for route in everything})
        self._welcome_members = {"service": "pdproxy", "version": __version__, "routes": listed}

    def routes(self) -> Sequence[web.RouteDef]:
        """Return the routes that answer with a hint."""
        return [web.get("/", self._list_routes)]

    def is_client_route(self, path: str) -> bool:
        """Return whether a path is a route for clients."""
        return path in self._known_paths or path.startswith(self._open_paths)

    def make_not_found_answer(self, request: web.Request) -> web.Response | GatewayError:
        """Return a redirect if the path only has too many slashes, or else an error with a hint."""
        path = request.path
        if len(path) > _MAX_PATH:
            return _make_not_found_error(path, None)
        tidy = _slashes.sub("/", path).rstrip("/")
        if tidy != path and tidy in self._known_paths:
            query = request.rel_url.raw_query_string[:_MAX_QUERY]
            return web.Response(status=307, headers={hdrs.LOCATION: f"{tidy}?{query}" if query else tidy})
        return _make_not_found_error(tidy, self._hint_for(tidy.lower()))

    def _hint_for(self, path: str) -> str | None:
        if (meant := self._find_similar_route(path)) is not None:
            return f"did you mean {meant}?"
        rest = path
        while rest.startswith(_API + "/"):
            rest = rest.removeprefix(_API)
        for beginning, words in _NOT_SERVED:
            if rest == beginning or rest.startswith(beginning + "/"):
                return words
        mistyped = difflib.get_close_matches(path, self._known_paths - {"/"}, n=1, cutoff=_MIN_SIMILARITY)
        return f"did you mean {mistyped[0]}?" if mistyped else None

    def _find_similar_route(self, path: str) -> str | None:
        """Return a route that ends like the path, or a route that begins with the path; None if there is none."""
        if path.count("/") == 0 or path == _API:
            return None
        longest_first = sorted(self._known_paths - {"/"}, key=len, reverse=True)
        for end in (path, path + "s"):
            for route in longest_first:
                if end.endswith((route, route.removeprefix(_API))):
                    return route
        longer = [route for route in longest_first if route.startswith(path + "/")]
        return longer[-1] if longer else None

    async def _list_routes(self, request: web.Request) -> web.Response:
        if self._status_page is None:
            return json_response(self._welcome_members)
        is_for_a_browser = status_page.is_wanted(request)
        answer = await self._status_page.show(request) if is_for_a_browser else json_response(self._welcome_members)
        answer.headers[hdrs.VARY] = hdrs.ACCEPT
        return answer


def _make_not_found_error(path: str, hint: str | None) -> GatewayError:
    quoted = path[:_MAX_QUOTED]
    route = f"route {quoted}" if _is_harmless(quoted) else "such route"
    words = hint or "GET / lists the routes"
    return GatewayError(f"there is no {route} on this gateway; {words}", code="not_found", status=404)

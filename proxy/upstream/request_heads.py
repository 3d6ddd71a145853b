"""The heads of requests to engines, of which most is the same each time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.balancer.engines import EngineKeys
    from proxy.common.backend import Backend

# Backends come and go.
_MAX_KNOWN: Final = 1000


class RequestHeads:
    """Renders heads; `keys` says which credential a backend is sent."""

    def __init__(self, keys: EngineKeys) -> None:
        self._keys = keys
        self._beginnings: dict[tuple[str, str, str | None], str] = {}
        """Of heads, up to what differs, by all that they depend on, so that none is ever out of date."""

    def render(self, backend: Backend, path: str, body_bytes: int, headers: Mapping[str, str]) -> bytes:
        """The head of a POST with a JSON body. `headers`: see Upstream.open."""
        key = self._keys.authorization  # who is sent it, says EngineKeys.headers
        sent = (key if backend.trusted else "") if key else None
        of = backend.name, path, sent
        head = f"{self._beginnings.get(of) or self._begin(*of)}Content-Length: {body_bytes}\r\n"
        for name, value in headers.items():
            if name != "authorization":
                head += f"{name}: {value}\r\n"
            elif value and sent is None:
                head += f"Authorization: {value}\r\n"
        return (head + "\r\n").encode("utf-8", "surrogateescape")  # so aiohttp decoded a client's header

    def _begin(self, host: str, path: str, authorization: str | None) -> str:
        """`authorization`: None: the client's own; empty: none."""
        if len(self._beginnings) >= _MAX_KNOWN:
            self._beginnings.clear()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nAccept-Encoding: identity\r\n"
        )
        if authorization:
            head += f"Authorization: {authorization}\r\n"
        self._beginnings[host, path, authorization] = head
        return head

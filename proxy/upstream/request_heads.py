"""The heads of requests to engines, of which most is the same each time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from proxy.backend import Backend
    from proxy.balancer.engine_keys import EngineKeys

# Backends come and go.
_MAX_KNOWN: Final = 1000


class RequestHeads:
    """Renders heads; `keys` says which credential a backend is sent."""

    def __init__(self, keys: EngineKeys) -> None:
        self._keys = keys
        self._begins: dict[tuple[str, str], bytes] = {}
        """What they begin with, by the name of the backend and the path."""

    def render(self, backend: Backend, path: str, body_bytes: int, headers: Mapping[str, str]) -> bytes:
        """The head of a POST with a JSON body. `headers`: see Upstream.open."""
        begins = self._begins.get((backend.name, path)) or self._begin(backend, path)
        head = "".join([f"{name}: {value}\r\n" for name, value in headers.items() if name != "authorization"])
        for name, value in self._keys.headers(backend, headers.get("authorization")).items():
            head += f"{name}: {value}\r\n"
        # So aiohttp decoded a client's header.
        return b"%bContent-Length: %d\r\n%b\r\n" % (begins, body_bytes, head.encode("utf-8", "surrogateescape"))

    def _begin(self, backend: Backend, path: str) -> bytes:
        if len(self._begins) >= _MAX_KNOWN:
            self._begins.clear()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {backend.name}\r\nContent-Type: application/json\r\n"
            "Accept-Encoding: identity\r\n"
        )
        self._begins[backend.name, path] = begins = head.encode()
        return begins

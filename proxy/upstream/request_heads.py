"""The heads of requests to engines, of which most is the same each time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from proxy.backend import Backend
    from proxy.balancer.engines.engine_keys import EngineKeys

# Backends come and go.
_MAX_KNOWN: Final = 1000


class RequestHeads:
    """Renders heads; `keys` says which credential a backend is sent."""

    def __init__(self, keys: EngineKeys) -> None:
        self._keys = keys
        self._forms: dict[tuple[str | None, ...], str] = {}
        """With gaps for what differs, by all that they depend on, so that none is ever out of date."""

    def render(self, backend: Backend, path: str, body_bytes: int, headers: Mapping[str, str]) -> bytes:
        """The head of a POST with a JSON body. `headers`: see Upstream.open."""
        if not headers.get("authorization", True):
            headers = {name: value for name, value in headers.items() if name != "authorization"}
        key = self._keys.authorization  # who is sent it, says EngineKeys.headers
        sent = (key if backend.trusted else "") if key else None
        of = backend.name, path, sent, *headers
        form = self._forms.get(of) or self._form(of, backend.name, path, sent, headers)
        # So aiohttp decoded a client's header.
        return (form % (body_bytes, *headers.values())).encode("utf-8", "surrogateescape")

    def _form(
        self, of: tuple[str | None, ...], host: str, path: str, authorization: str | None, names: Iterable[str]
    ) -> str:
        """`authorization`: None: the client's own; empty: none. `names`: of the headers."""
        if len(self._forms) >= _MAX_KNOWN:
            self._forms.clear()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nAccept-Encoding: identity\r\n"
        )
        if authorization:
            head += f"Authorization: {authorization}\r\n"
        form = head.replace("%", "%%") + "Content-Length: %d\r\n"
        for name in names:
            if name != "authorization":
                form += name.replace("%", "%%") + ": %s\r\n"
            elif authorization is None:
                form += "Authorization: %s\r\n"
            else:
                form += "%.0s"  # takes the client's, and shows nothing of it
        self._forms[of] = form = form + "\r\n"
        return form

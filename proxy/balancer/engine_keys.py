"""Which engine is given which credential.

The gateway's engine key goes only to endpoints that stand in the configuration. An instance added at run time gets
traffic but never the key: otherwise whoever may add an instance could collect the key with a server of his own.
Without an engine key the client's own credential is passed on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from proxy.balancer.backend import Backend


class EngineKeys:
    """`key` None or empty: the engines ask for none. `configured`: host and port of every endpoint that may have it."""

    def __init__(self, key: str | None, configured: Iterable[tuple[str, int]]) -> None:
        self._authorization = f"Bearer {key}" if key else ""
        self._configured = frozenset(configured)

    def headers(self, backend: Backend, clients_own: str | None = None) -> dict[str, str]:
        """Headers for a request to `backend`; `clients_own` is the Authorization that the client sent, if any."""
        if not self._authorization:
            return {"Authorization": clients_own} if clients_own else {}
        if (backend.host, backend.port) in self._configured:
            return {"Authorization": self._authorization}
        return {}

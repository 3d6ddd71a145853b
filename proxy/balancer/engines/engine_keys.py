"""Which engine is given which credential.

The gateway's engine key goes only to trusted backends: those of the configuration, and those an administrator added
with `"send_key": true`. Any other added instance gets traffic without it, so that a mistyped address cannot collect the
key. Without an engine key the client's own credential is passed on.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from proxy.common.backend import Backend


_MASK: Final = b"***"
_MIN_SECRET_BYTES: Final = 8
"""A shorter key is no secret, and would be found in ordinary words."""


def without_key(body: bytes, authorization: str | None) -> bytes:
    """Return an engine's refusal without the credential that the engine was sent, which it may quote.

    `authorization`: the header's value; None or empty: the engine was sent none.
    """
    key = (authorization or "").removeprefix("Bearer ")
    for spelling in {key, json.dumps(key)[1:-1]}:
        if len(spelling) >= _MIN_SECRET_BYTES:
            body = body.replace(spelling.encode("utf-8", "surrogateescape"), _MASK)
    return body


class EngineKeys:
    """`key` None or empty: the engines ask for none."""

    def __init__(self, key: str | None) -> None:
        self.configure(key)

    def configure(self, key: str | None) -> None:
        """Send this key from now on."""
        self.authorization = f"Bearer {key}" if key else ""
        """What trusted backends are sent; empty: what clients show."""

    def advice(self, backend: Backend) -> str:
        """What to look at when a backend has answered 401."""
        if not self.authorization:
            return (
                "asks for a key, and this gateway has none for it: set OPENAI_API_KEY or auth.engine_api_key, unless "
                "clients are to show the engines' own"
            )
        if not backend.trusted:
            return 'asks for a key and is sent none, as it was added without "send_key": true'
        return "refuses the key it is sent: check that OPENAI_API_KEY or auth.engine_api_key is the engines' key"

    @property
    def forwards_client_key(self) -> bool:
        """Engines are sent what clients show."""
        return not self.authorization

    def mask(self, body: bytes) -> bytes:
        """Return an engine's refusal without the gateway's own key. See without_key."""
        return without_key(body, self.authorization)

    def headers(self, backend: Backend, clients_own: str | None = None) -> dict[str, str]:
        """Headers for a request to `backend`; `clients_own` is the Authorization that the client sent, if any."""
        if not self.authorization:
            return {"Authorization": clients_own} if clients_own else {}
        return {"Authorization": self.authorization} if backend.trusted else {}
